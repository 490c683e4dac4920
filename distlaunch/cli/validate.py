"""`distlaunch validate`: checks configs completely, and starts nothing."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from distlaunch.base.errors import ConfigError, ExitCode, Problem, UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, JUNIT
from distlaunch.ui.plain import echo, echo_error

if TYPE_CHECKING:
    from distlaunch.cluster.machine import Machine
    from distlaunch.config.run import RunConfig


@click.command("validate", cls=Command)
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...", type=FILE)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, e.g. --set train.epochs=3."
)
@JUNIT
@click.option("--json", "as_json", is_flag=True, help="Print the results as a JSON list.")
def command(configs: tuple[str, ...], overrides: tuple[str, ...], junit_xml: str | None, as_json: bool) -> None:
    """Check configs: keys, types, names, numbers that must fit together, functions and their arguments.

    Starts nothing, and imports neither your code nor Keras. Exits with 2 if a config is wrong.

    In a GitHub Actions job, each problem becomes an annotation of its line.
    """
    from distlaunch.ui.ci import Case, annotate, write_junit

    results, cases = list[FileResult](), list[Case]()
    for config in configs:
        began = time.monotonic()
        result = _check(config, overrides)
        results.append(result)
        annotate(result.problems)
        annotate(result.warnings, level="warning")
        cases.append(Case(config, time.monotonic() - began, "\n".join(map(str, result.problems))))
    if junit_xml is not None:
        write_junit(junit_xml, "validate", cases)
    if as_json:
        click.echo(json.dumps([result.to_plain() for result in results], indent=2))
    else:
        for result in results:
            result.show()
    if any(result.problems for result in results):
        raise click.exceptions.Exit(ExitCode.USAGE)


@dataclass(frozen=True)
class FileResult:
    """Problems and warnings of one config file."""

    config: str
    summary: str
    problems: list[Problem]
    warnings: list[Problem]

    def show(self) -> None:
        for problem in self.problems:
            echo_error(str(problem))
        for warning in self.warnings:
            echo_error(f"warning: {warning}")
        if not self.problems:
            echo(f"{self.config}: ok ({self.summary})")

    def to_plain(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "ok": not self.problems,
            "summary": self.summary,
            "problems": [_plain(problem) for problem in self.problems],
            "warnings": [_plain(warning) for warning in self.warnings],
        }


def _check(config: str, overrides: tuple[str, ...]) -> FileResult:
    from distlaunch.cluster.machine import Machine
    from distlaunch.config.checks.machine import machine_problems, missing_trackers
    from distlaunch.config.checks.unused import unused_settings
    from distlaunch.config.read.load import load_config

    machine = Machine.here()
    num_gpus = len(machine.gpus)
    try:
        loaded = load_config(config, overrides, num_gpus=num_gpus)
    except ConfigError as error:
        return FileResult(config, "", error.problems, [])
    problems, summary = loaded.located(machine_problems(loaded.config)), _summary(loaded.config, num_gpus)
    # a batch job is submitted from a machine that has none of its hosts
    if reason := loaded.config.engine.why_no_hosts(machine.environ):
        summary += f"; its hosts were not checked: {reason}"
    else:
        problems = problems or _planning_problems(config, overrides, machine)
    warnings = [*unused_settings(loaded.config, machine), *missing_trackers(loaded.config.tracking)]
    return FileResult(config, summary, problems, loaded.located(warnings))


def _planning_problems(config: str, overrides: tuple[str, ...], machine: Machine) -> list[Problem]:
    """Return the problems that `train` reports before it starts a process, such as too few GPUs."""
    from distlaunch.jobs import job
    from distlaunch.jobs.choose_run import JobRequest

    try:
        job.plan(JobRequest(config, (*overrides, "resume=never"), makes_run_dir=False), machine)
    except ConfigError as error:
        return error.problems
    except UsageError as error:
        return [Problem((), str(error), config)]
    return []


def _plain(problem: Problem) -> dict[str, Any]:
    file, _, line = (problem.source or "").rpartition(":")
    is_line = line.isdigit() and not file.startswith("--set")
    return {
        "key": problem.dotted,
        "message": problem.message,
        "source": problem.source,
        "line": int(line) if is_line else None,
    }


def _summary(config: RunConfig, num_gpus: int | None) -> str:
    """Return one line such as `strategy mirrored, 2 replicas, global batch 64`."""
    strategy = config.strategy
    words = strategy.words(config.cluster, num_gpus)
    return ", ".join([f"strategy {strategy.kind}", *words, f"global batch {config.data.global_batch or 'of the data'}"])
