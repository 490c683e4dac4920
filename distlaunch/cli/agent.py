"""`distlaunch agent`: the process that an engine starts on each host."""

from __future__ import annotations

import click


@click.command("agent", hidden=True)
def command() -> None:
    """Serve the controller of a job over standard input and output, as engines have it on each host.

    Engines start it as `python -m distlaunch.agent.remote`, which need not be on PATH. By hand it only shows that it
    starts.
    """
    from distlaunch.agent.remote.__main__ import main

    main()
