"""Tables and grids of text, with box-drawing characters if the output can encode them, else with ASCII."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_MAX_CELLS = 8  # maximum number of rows and of columns; if there are more, the first ones and the last are drawn
_Corners = tuple[str, str, str]
_GAP = "   "  # wider than the two spaces between metrics in a cell


@dataclass(frozen=True)
class LineStyle:
    """The characters for the lines of a grid. `top`, `middle` and `bottom` have a left end, crossing and right end."""

    horizontal: str
    vertical: str
    top: _Corners
    middle: _Corners
    bottom: _Corners
    ellipsis: str


UNICODE = LineStyle("─", "│", ("┌", "┬", "┐"), ("├", "┼", "┤"), ("└", "┴", "┘"), "…")
ASCII = LineStyle("-", "|", ("+", "+", "+"), ("+", "+", "+"), ("+", "+", "+"), "...")


def line_style_for(encoding: str | None) -> LineStyle:
    """Return box-drawing characters if an output of this encoding can show them, else ASCII characters."""
    try:
        # the text of the dataclass has all of its characters
        f"{UNICODE}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def grid(cells: Sequence[Sequence[str]], rows: Sequence[str], columns: Sequence[str], style: LineStyle) -> list[str]:
    """Return the lines of a grid.

    Args:
        cells: text of each cell, by row.
        rows: a label for each row; empty for none.
        columns: a label for each column; empty for none.
    """
    kept_rows, kept_columns = kept(len(cells), _MAX_CELLS), kept(len(cells[0]), _MAX_CELLS)
    texts = [
        [style.ellipsis if row is None or column is None else cells[row][column] for column in kept_columns]
        for row in kept_rows
    ]
    row_labels = ["" if row is None or not rows else rows[row] for row in kept_rows]
    heads = ["" if column is None or not columns else columns[column] for column in kept_columns]
    widths = [max(map(len, column)) + 2 for column in zip(heads, *texts, strict=True)]
    margin = max(map(len, row_labels)) + 1 if rows else 0

    def rule(ends: _Corners) -> str:
        return " " * margin + ends[0] + ends[1].join(style.horizontal * width for width in widths) + ends[2]

    def line(label: str, texts: Sequence[str], bar: str) -> str:
        middle = bar.join(text.center(width) for text, width in zip(texts, widths, strict=True))
        return f"{label.ljust(margin)}{bar}{middle}{bar}".rstrip()

    body: list[str] = []
    for number, (label, row) in enumerate(zip(row_labels, texts, strict=True)):
        body += [rule(style.middle if number else style.top), line(label, row, style.vertical)]
    return [*([line("", heads, " ")] if columns else []), *body, rule(style.bottom)]


def kept(number: int, most: int) -> list[int | None]:
    """Return the indices of the items to show out of `number`: all, or the first ones, None for a gap, and the last."""
    return list(range(number)) if number <= most else [*range(most - 2), None, number - 1]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table, the first of them the head.

    Args:
        right: indices of right-aligned columns.
    """
    lines = [head, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(head))]
    return [
        _GAP.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def fitting_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, order: Sequence[int], *, right: Collection[int] = ()
) -> tuple[list[str], list[str]]:
    """Return the lines of a table that is at most `width` wide, as in `columns`, and the heads of the columns left out.

    Args:
        order: indices of the columns, the most important first. A column is left out if it does not fit beside the
            columns before it. Cells of the first one are shortened if it does not fit alone.
    """
    widths = [max(len(line[number]) for line in (head, *rows)) for number in range(len(head))]
    shown, used = [order[0]], widths[order[0]]
    for number in order[1:]:
        if used + len(_GAP) + widths[number] <= width:
            shown.append(number)
            used += len(_GAP) + widths[number]
    kept_columns = sorted(shown)
    cells = [[shortened(line[number], width) for number in kept_columns] for line in (head, *rows)]
    lines = columns(cells[0], cells[1:], right=[at for at, number in enumerate(kept_columns) if number in right])
    return lines, [head[number] for number in range(len(head)) if number not in shown]


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters, with `...` in place of its middle if it is longer."""
    if len(text) <= width:
        return text
    left = max(0, width - 3)
    return f"{text[: left - left // 2]}...{text[len(text) - left // 2 :]}"[:width]
