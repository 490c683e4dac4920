"""Explains YAML syntax errors for users who do not know YAML's grammar."""

from __future__ import annotations

import yaml

MAX_DEPTH = 60
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels; expected a handful. Is a bracket left open?"
_HINTS = (
    (
        "mapping values are not allowed",
        "is the indentation right, and the line above complete? A value that contains ': ' needs quotes",
    ),
    ("could not find expected ':'", "expected `key: value`; is the ':' missing, or the space after it?"),
    ("did not find expected key", "check the indentation: keys of one section start in the same column"),
    (
        "did not find expected '-' indicator",
        "check the indentation: items of one list start with '-' in the same column",
    ),
    ("did not find expected ',' or ']'", "a ',' or the closing ']' is missing"),
    ("did not find expected ',' or '}'", "a ',' or the closing '}' is missing"),
    ("expected ',' or ']'", "a ',' or the closing ']' is missing"),
    ("expected ',' or '}'", "a ',' or the closing '}' is missing"),
    ("unknown escape character", "a backslash in double quotes begins an escape; use single quotes"),
    ("sequence entries are not allowed", "a list begins on its own line, below its key"),
    ("did not find expected node content", "a value is missing, or there is a ',' or a bracket too many"),
    ("did not find expected <document start>", "text before or beside the keys; check the indentation of this line"),
)


def explain(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line and the message for a parser's error."""
    mark = getattr(error, "problem_mark", None)
    context = getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    lines = text.splitlines() or [""]
    number = min(mark.line if mark else 0, len(lines) - 1)
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent:
        return number + 1, "a tab in the indentation; YAML allows spaces only, so replace it by spaces"
    if "unexpected end of stream" in problem and context:
        return context.line + 1, "the quote that opens in this line is not closed; add the closing quote"
    if "maximum nesting depth" in problem:  # libyaml's own limit, since PyYAML 6.0.4
        return number + 1, TOO_DEEP
    if "cannot start any token" in problem and mark:
        character = line[mark.column : mark.column + 1]
        return number + 1, f"a value cannot begin with {character!r}; put it in quotes"
    if ("',' or ']'" in problem or "',' or '}'" in problem) and context and context.line != number:
        bracket = "]" if "]" in problem else "}"
        return (
            context.line + 1,
            f"the bracket that opens in this line is not closed; add a ',' or '{bracket}' by line {number + 1}",
        )
    hint = next((hint for words, hint in _HINTS if words in problem), "check this line and the one above it")
    return number + 1, f"not valid YAML: {problem}; {hint}"
