"""The exit codes that `--help` of each command lists."""

from __future__ import annotations

import click

from distlaunch.base.errors import MEANINGS, ExitCode

_LOCAL_COMMAND = (ExitCode.DONE, ExitCode.USAGE, ExitCode.FAILED, ExitCode.INTERRUPTED)
_HOST_COMMAND = (*_LOCAL_COMMAND[:3], ExitCode.TEMPORARY, ExitCode.INTERRUPTED)
_JOB_COMMAND = (ExitCode.DONE, ExitCode.USAGE, ExitCode.FAILED, ExitCode.PREEMPTED, ExitCode.TEMPORARY)
CODES = {
    "train": _JOB_COMMAND,
    "run": _JOB_COMMAND,
    "submit": (*_JOB_COMMAND, ExitCode.INTERRUPTED),
    "wait": (*_JOB_COMMAND, ExitCode.INTERRUPTED),
    "plan": _HOST_COMMAND,
    "verify": (ExitCode.DONE, ExitCode.DIFFERS, *_HOST_COMMAND[1:]),
    "tune": _HOST_COMMAND,
    "validate": _LOCAL_COMMAND,
    "doctor": _HOST_COMMAND,
    "evaluate": _HOST_COMMAND,
    "predict": _HOST_COMMAND,
    "export": _HOST_COMMAND,
    "runs": _LOCAL_COMMAND,
    "compare": _LOCAL_COMMAND,
    "logs": _LOCAL_COMMAND,
    "stop": _HOST_COMMAND,
    "report": _LOCAL_COMMAND,
    "track": _LOCAL_COMMAND,
    "schema": _LOCAL_COMMAND,
    "init": _LOCAL_COMMAND,
}
"""The exit codes of each command, including those of common errors."""


_IN_HELP = {
    **MEANINGS,
    ExitCode.DIFFERS: "a strategy does not give the numbers of one device",
    ExitCode.PREEMPTED: "the job was stopped; start it again to continue",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C; after another signal, 128 + its number",
}
"""Descriptions that do not name commands, for the help of a single command."""


class Command(click.Command):
    """A command whose help ends with its exit codes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), _IN_HELP[code]) for code in CODES[str(self.name)]])
