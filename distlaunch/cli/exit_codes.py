"""The exit codes that `--help` of each command lists."""

from __future__ import annotations

import click

from distlaunch.base.errors import MEANINGS, ExitCode

_LOOKS = (ExitCode.DONE, ExitCode.USAGE, ExitCode.FAILED, ExitCode.INTERRUPTED)
_ASKS_HOSTS = (*_LOOKS[:3], ExitCode.TEMPORARY, ExitCode.INTERRUPTED)
_TRAINS = (ExitCode.DONE, ExitCode.USAGE, ExitCode.FAILED, ExitCode.PREEMPTED, ExitCode.TEMPORARY)
CODES = {
    "train": _TRAINS,
    "run": _TRAINS,
    "submit": (*_TRAINS, ExitCode.INTERRUPTED),
    "wait": (*_TRAINS, ExitCode.INTERRUPTED),
    "plan": _ASKS_HOSTS,
    "verify": (ExitCode.DONE, ExitCode.DIFFERS, *_ASKS_HOSTS[1:]),
    "validate": _LOOKS,
    "doctor": _ASKS_HOSTS,
    "evaluate": _ASKS_HOSTS,
    "predict": _ASKS_HOSTS,
    "export": _ASKS_HOSTS,
    "runs": _LOOKS,
    "logs": _LOOKS,
    "stop": _ASKS_HOSTS,
    "report": _LOOKS,
    "schema": _LOOKS,
    "init": _LOOKS,
}
"""The codes of each command, the usual ones of its errors included."""


class Command(click.Command):
    """A command whose help ends with its exit codes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), MEANINGS[code]) for code in CODES[str(self.name)]])
