"""Options that several commands share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from distlaunch.base.run_dir import BEST, BestName, RunDir

OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a config value, e.g. --set train.epochs=3.",
)
JSON_EVENTS = click.option("--json", "as_json", is_flag=True, help="Print only events, as JSON lines.")


class CheckpointName(click.ParamType[Any]):
    """A step, or `best` for the checkpoint of the best epoch."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | BestName:
        if value == BEST or isinstance(value, int):  # a default value is an integer
            return value
        if not str(value).isascii() or not str(value).isdigit():
            self.fail(f"got {value!r}; expected a step such as 120, or {BEST}{_if_run(value)}", param, ctx)
        return int(value)


class PageFile(click.Path):
    """A file to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value and Path(value).is_dir():  # empty if the option has no value
            self.fail(f"got the folder {value!r}; expected a file{_if_run(value)}", param, ctx)
        return super().convert(value, param, ctx)


def _if_run(value: Any) -> str:
    """Return a hint for a run that was taken as the value of the option before it, which needs none."""
    return "; write the run before this option" if RunDir(Path(value)).exists() else ""


class RunPath(click.ParamType[Any]):
    """A run, by its path or by its name in the folder `runs`.

    Completion in the shell offers the runs in `runs`, or else folders.
    """

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        folder = Path(incomplete).parent if "/" in incomplete else Path("runs")
        try:
            found = sorted(path for path in folder.iterdir() if RunDir(path).exists())
        except OSError:
            found = []
        names = [name for path in found for name in (str(path), path.name) if name.startswith(incomplete)]
        names = names if incomplete else [str(path) for path in found]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


class FolderPath(click.ParamType[Any]):
    """A folder, which may not exist yet. Completion in the shell offers folders."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class FileName(click.Path):
    """A file name that the shell can complete. It is checked where the file is read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(param, click.Argument) and not os.path.lexists(value) and (hint := hint_of_setting(value, ctx)):
            raise click.UsageError(f"got '{value}'; {hint}", ctx)
        return super().convert(value, param, ctx)


def hint_of_setting(text: str, ctx: click.Context | None) -> str:
    """Return a hint for an argument such as `epochs=3` of a command that has `--set`, or an empty string."""
    from distlaunch.config.read.keys import settings_in

    takes_values = ctx is not None and any("--set" in option.opts for option in ctx.command.params)
    ways = settings_in(text) if takes_values and "=" in text else []
    return f"to change a value of the config, write {' or '.join(ways)}" if ways else ""


FILE = FileName()
FOLDER = FolderPath()
JUNIT = click.option(
    "--junit-xml",
    metavar="FILE",
    type=FILE,
    help="Also write a JUnit report with a test case for each config. The folder of FILE is created if needed.",
)
CHECKPOINT = click.option(
    "--checkpoint", type=CheckpointName(), metavar="STEP|best", help="Checkpoint to use. Default: the newest."
)


METRICS_PORT = click.option(
    "--metrics-port", metavar="[HOST:]PORT", help="Serve OpenMetrics at this port, by default only on 127.0.0.1."
)
METRICS_FILE = click.option(
    "--metrics-file", metavar="FILE.prom", help="Write OpenMetrics to this file every 5 seconds."
)


class Since(click.ParamType[float]):
    """A date or an age, as seconds since 1970."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from distlaunch.runs.find import parse_since

        if isinstance(value, float):
            return value
        try:
            return parse_since(str(value))
        except ValueError:
            self.fail(
                f"got {value!r}; expected a date such as 2026-11-27, or an age such as 7d, 12h or 30m", param, ctx
            )


STATUSES = ("running", "pending", "submitted", "cancelled", "done", "failed", "stopped", "interrupted", "killed")
STATUS = click.option(
    "--status", "statuses", multiple=True, metavar="STATUS", type=click.Choice(STATUSES),
    help="Take only runs with this status. May be repeated.",
)  # fmt: skip
SINCE = click.option(
    "--since", type=Since(), metavar="DATE|AGE",
    help="Take only runs that started since a date (2026-11-27, '2026-11-27 14:30') or in the last 7d, 12h or 30m.",
)  # fmt: skip
SORT = click.option(
    "--sort",
    metavar="KEY",
    help="Sort by a metric (the best value first), a setting such as learning_rate, or run, status, strategy, epoch, "
    "step, started, time, examples_per_s, goodput. Default: by start.",
)
REVERSE = click.option("--reverse", is_flag=True, help="Reverse the order.")
QUIET = click.option("--quiet", "-q", is_flag=True, help="Print only errors.")


class Seconds(click.FloatRange):
    """A finite number of seconds. Python also parses `nan` and `inf` as numbers, but nobody can wait that long."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds.", param, ctx)
        return seconds
