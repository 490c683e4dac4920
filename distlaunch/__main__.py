"""`python -m distlaunch` is the `distlaunch` command."""

from distlaunch.cli.main import main

if __name__ == "__main__":
    main()
