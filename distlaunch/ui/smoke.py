"""What a smoke run has proven, as a check list."""

from __future__ import annotations

import contextlib

from rich.text import Text

from distlaunch.jobs.smoke import SmokeResult
from distlaunch.ui.console import JobConsole


def print_proofs(result: SmokeResult, *, to_stderr: bool, only_failures: bool) -> None:
    """One line a proof."""
    console = JobConsole(stderr=to_stderr)
    with contextlib.suppress(OSError):
        if not only_failures:
            console.print()
        for proof in result.proofs:
            if proof.holds and not only_failures:
                console.print(Text.assemble(("  ok  ", "green bold"), proof.what))
            elif not proof.holds:
                console.print(Text.assemble((" no   ", "red bold"), proof.what, ": not seen"))
