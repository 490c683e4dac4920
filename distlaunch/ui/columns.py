"""Plain tables: columns as wide as what they hold, nothing cut and nothing broken, on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "   "  # wider than the two spaces between metrics in a cell


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of a table, the first of them the head.

    Args:
        right: numbers of the columns that are aligned at their right.
    """
    lines = [head, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(head))]
    return [
        GAP.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
