"""`distlaunch agent`: the process that an engine starts on each host."""

from __future__ import annotations

import click


@click.command("agent", hidden=True)
def command() -> None:
    """Serve the launcher of a job over standard input and output.

    Engines start the agent on each host as `python -m distlaunch.agent.remote`, since this command may not be on PATH.
    Running it by hand only shows that it can start.
    """
    from distlaunch.agent.remote.__main__ import main

    main()
