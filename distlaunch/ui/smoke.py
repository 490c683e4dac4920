"""What a smoke run has proven, as a check list."""

from __future__ import annotations

import contextlib

from rich.text import Text

from distlaunch.base.errors import about_run
from distlaunch.jobs.smoke import SmokeResult
from distlaunch.runs.paths import shown
from distlaunch.ui.console import JobConsole


def print_proofs(result: SmokeResult, config: str, *, to_stderr: bool) -> None:
    """Print a line for each proof, below the config."""
    console = JobConsole(stderr=to_stderr)
    lines = [Text(f"smoke test of {config}:")]
    for proof in result.proofs:
        word = ("  ok  ", "green bold") if proof.holds else (" no   ", "red bold")
        lines.append(Text.assemble(word, proof.what if proof.holds else f"{proof.what}: not reached"))
    with contextlib.suppress(OSError):
        console.print()
        console.print(Text("\n").join(lines), soft_wrap=True, highlight=False)


def print_missing(result: SmokeResult) -> None:
    """Print on standard error what a smoke run should have shown, and has not."""
    with contextlib.suppress(OSError):
        for line in missing_proofs(result):
            JobConsole(stderr=True).print(Text(f"error: {line}"), soft_wrap=True, highlight=False)


def missing_proofs(result: SmokeResult) -> list[str]:
    """Return what a smoke run should have shown, and has not, with the name of the run."""
    run = shown(result.last.plan.run_dir)
    return [about_run(run, f"not reached: {proof.what}") for proof in result.proofs if not proof.holds]
