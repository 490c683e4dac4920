"""`distlaunch report --checkpoint`: what a checkpoint holds, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from distlaunch.base.plural import count
from distlaunch.runs.paths import shown
from distlaunch.ui import words
from distlaunch.ui.columns import columns


def print_checkpoint(console: Console, listing: dict[str, Any]) -> None:
    """A line for each variable, and one for all.

    Args:
        listing: as `jobs.list_checkpoint` has it.
    """
    variables = listing["variables"]
    rows = [
        (
            variable["name"],
            words.shape(variable["shape"]),
            variable["dtype"],
            words.size(variable["bytes"]),
            "" if variable["norm"] is None else words.value(variable["norm"]),
        )
        for variable in variables
    ]
    total = words.size(sum(variable["bytes"] for variable in variables))
    after = f"step {listing['step']:,}, in epoch {listing['epoch'] + 1}"
    head = f"{shown(listing['path'])}: {after}; {count(len(variables), 'variable')}, {total}"
    for line in (head, "", *columns(("variable", "shape", "type", "size", "norm"), rows, right={3, 4})):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
