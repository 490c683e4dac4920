"""The `distlaunch` command. Commands are imported when they are called, so that `--help` is instant."""

from __future__ import annotations

from distlaunch.cli.first_signals import RESUMED, end_jobs_at_once_on_signals

# isort: split
import importlib
import os
import re
import signal
import sys
from types import FrameType
from typing import Any

import click

from distlaunch import __version__
from distlaunch.base.errors import (
    ConfigError,
    DistlaunchError,
    ExitCode,
    RunBusyError,
    StopRequested,
    UsageError,
    code_of_os_error,
    message_of,
)
from distlaunch.base.protocol import HELD_ENV
from distlaunch.base.signals import JOB_STOP_SIGNALS
from distlaunch.base.standard_streams import (
    keep_going_without_readers,
    open_missing_streams,
    output_error,
    reader_has_gone,
)
from distlaunch.ui.plain import echo_error

COMMANDS = {
    "train": "Train the model of a config, with checkpoints, validation and exports.",
    "run": "Run a TensorFlow or JAX script as a cluster of tasks.",
    "submit": "Submit a config as a batch job that resumes after a preemption.",
    "plan": "Show what `train` would start, without starting it.",
    "verify": "Compare each strategy with one device, on your model and data.",
    "tune": "Measure strategies and settings on your model and data, and name the fastest.",
    "validate": "Check configs and report every error.",
    "doctor": "Check the hosts of a config, and show their versions and resources.",
    "evaluate": "Evaluate a checkpoint of a run.",
    "predict": "Write predictions of a run's model or an exported model.",
    "export": "Export a run's model as SavedModel, .keras, weights or TFLite.",
    "runs": "List runs and their status.",
    "compare": "Show runs side by side: settings that differ, values, times.",
    "logs": "Show the output of a run's tasks, also while it is running.",
    "wait": "Wait until runs have ended, and exit with the worst code.",
    "stop": "Stop a running job, with a checkpoint.",
    "report": "Report on a run: attempts, epochs, checkpoints, variables.",
    "track": "Send the values of a run to experiment trackers.",
    "schema": "Print the JSON Schema of the config.",
    "init": "Create a small project: a model, data and a config.",
}


_EXTRA_ARGUMENT = re.compile(r"Got unexpected extra arguments? \((\S+?)\)?(?:\s|$)")
"""Beginning of a message of click, with the first such argument."""
_RERAISE_AFTER_S = 0.01


class LazyGroup(click.Group):
    """A group that imports the command NAME from `distlaunch.cli.NAME` when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name != "agent":  # `agent` is hidden: engines start it, not users
            return None
        return importlib.import_module(f"distlaunch.cli.{cmd_name}").command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if close:
                raise click.UsageError(f"{error.message} Did you mean '{close[0]}'?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="distlaunch")
def cli() -> None:
    """Train any Keras 3 model on one device, several devices or several processes, from one YAML file."""


def _with_hint(error: click.ClickException) -> click.ClickException:
    """Add a hint to the error for an argument or option that is a key of the config."""
    if isinstance(error, click.NoSuchOption):
        return _with_key(error)
    extra = _EXTRA_ARGUMENT.match(error.message)
    if isinstance(error, click.UsageError) and extra is not None:
        from distlaunch.cli.options import hint_of_setting

        if hint := hint_of_setting(extra[1], error.ctx):
            return click.UsageError(f"got '{extra[1]}'; {hint}", error.ctx)
    return error


def _with_key(error: click.NoSuchOption) -> click.UsageError:
    """Suggest `--set` in the error for an unknown option that has the name of a config key."""
    from distlaunch.config.read.keys import keys_called

    takes_values = error.ctx is not None and any("--set" in option.opts for option in error.ctx.command.params)
    keys = keys_called(error.option_name.lstrip("-")) if takes_values else []
    if not keys:
        return error
    ways = " or ".join(f"--set {key}=VALUE" for key in keys)
    return click.UsageError(f"No such option: {error.option_name}; it is a config key: use {ways}", error.ctx)


def _code_of_interrupt() -> int:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return ExitCode.PREEMPTED if command in RESUMED else ExitCode.INTERRUPTED


def _handle_signals() -> None:
    """Turn signals into exceptions, so that a command removes its temporary folders and helper processes.

    `train` and `run` end at once instead, until their job installs its own handlers.
    """
    end_jobs_at_once_on_signals()
    for number in JOB_STOP_SIGNALS:
        # a signal that was ignored before (`nohup`) stays ignored; click handles Ctrl-C
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end_with_cleanup)
    sys.unraisablehook = _raise_again


class _Ended(SystemExit):
    """Raised by a signal that ends the command."""


def _end_with_cleanup(number: int, frame: FrameType | None) -> None:
    # a second signal must not interrupt the cleanup after the first
    for each in JOB_STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Ended(128 + number)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise an exception of a signal handler again if Python has ignored it, as in a callback of C code."""
    error = lost.exc_value
    if not isinstance(error, _Ended | KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise error

    signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, _RERAISE_AFTER_S)


def check_directory() -> None:
    """Raise UsageError if the current directory was deleted, since relative paths do not work then."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the current directory cannot be used ({error.strerror}); change to another") from None


def main() -> None:
    """Run the command, and print errors of the user as one message without a traceback."""
    open_missing_streams()
    keep_going_without_readers()
    try:
        _handle_signals()
        check_directory()
        # in standalone mode, click would print errors itself and exit with other codes
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        _with_hint(error).show()
        code = error.exit_code
    # click turns Ctrl-C into Abort
    except (click.Abort, KeyboardInterrupt):
        code = _code_of_interrupt()
    except StopRequested as asked:
        echo_error(message_of(asked))
        code = asked.exit_code
    except DistlaunchError as error:
        if isinstance(error, ConfigError):
            from distlaunch.ui.ci import annotate

            annotate(error.problems)
        message = message_of(error)
        echo_error(message if "\n" in message else f"error: {message}")
        code = error.exit_code
        if isinstance(error, RunBusyError) and (held := os.environ.get(HELD_ENV, "")).isdigit():
            code = int(held)
    except OSError as error:
        # a full disk, or a directory without write permission
        code = code_of_os_error(error)
        echo_error(f"error: {message_of(error)}")
    # a command without a return value has succeeded
    sys.exit(_after_output(int(code) if isinstance(code, int) else 0))


def _after_output(code: int) -> int:
    """Return the exit code of a command. It is 3 instead of 0 if output was lost, unless the command runs a job."""
    sys.stdout.flush()
    error = output_error()
    # it is no error if the reader has closed the pipe, as in `distlaunch schema | head`
    if error is None or reader_has_gone():
        return code
    click.echo(f"error: standard output: {error.strerror}; some output is lost", err=True)
    # lost output does not make a job fail
    is_job = any(command in sys.argv[1:2] for command in RESUMED)
    return code or (ExitCode.DONE if is_job else ExitCode.FAILED)
