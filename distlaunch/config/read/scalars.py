"""Plain YAML scalars by the core rules of YAML 1.2, and the substitution of `${NAME}`.

`1e-3` is a number. `on`, `off`, `yes`, `no`, `12:30` and dates are text. `010` is ten, not eight as in YAML 1.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

Scalar = str | int | float | bool | None

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INT = re.compile(r"[-+]?[0-9]{1,400}\Z")  # 400: Python refuses to convert thousands of digits
_OTHER_BASE = re.compile(r"0o[0-7]{1,100}\Z|0x[0-9a-fA-F]{1,100}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_LARGEST = 2**63

RUN_DIR = "${run_dir}"
"""Placeholder for the run directory in the arguments of callbacks, replaced when a run builds them."""

VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)(\})?")
"""`$${`, or `${NAME}`. The second group is empty if the closing brace is missing, which is a mistake."""
_ESCAPED = re.compile(r"(?<!\$)(\$\{run_dir\})|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class UnsetError(ValueError):
    """A variable is not set and has no default."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the environment variable {name} is not set; set it, or give a default: ${{{name}:default}}; "
            "write $${ for a literal ${"
        )
        self.name = name


def resolve(text: str) -> Scalar:
    """Return the value of a scalar without quotes.

    Raises:
        ValueError: a whole number beyond 64 bits, or another number that a double cannot hold.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.match(text) or _OTHER_BASE.match(text):
        value = int(text) if _INT.match(text) else int(text, 0)
        if not -_LARGEST <= value < _LARGEST:
            raise ValueError(
                f"got {text[:40]}, a number beyond 64 bits; write a smaller one, or quote it if it is text"
            )
        return value
    if _FLOAT.match(text):
        number = float(text)
        # beyond what a double can hold
        if math.isinf(number) or (number == 0 and re.search("[1-9]", re.split("[eE]", text)[0])):
            hint = "write .inf for infinity" if number else "write 0 for zero"
            raise ValueError(
                f"got {text[:40]}, which becomes {number:g} as a number; {hint}, or quote it if it is text"
            )
        return number
    if _SPECIAL.match(text):
        # Python writes inf and nan without the dot
        return float(text.replace(".", ""))
    return text


def is_filled_in_later(key: tuple[str | int, ...]) -> bool:
    """Return True if `${run_dir}` in a value of this key is not an environment variable and is replaced later."""
    return key[:2] == ("train", "callbacks") and key[3:4] == ("args",)


def default_of(found: re.Match[str]) -> str:
    """Return the default in a match of `VARIABLE`. Spaces around a number, or before a minus sign, are left out."""
    default = found[1].partition(":")[2]
    inner = default.strip(" ")
    is_text = isinstance(resolve(inner), str) and not inner.startswith("-")
    return default if is_text or not inner else inner


def substitute(text: str, environ: Mapping[str, str], *, keep_run_dir: bool = False) -> str:
    """Substitute `${NAME}` and `${NAME:default}`; `$${` is a literal `${`.

    Raises:
        UnsetError: a variable is not set and has no default.
        ValueError: the braces are not closed, a name is invalid, or the form is that of a shell or another program.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        if keep_run_dir and match[0] == RUN_DIR:
            return RUN_DIR
        name, colon, default = match[1].partition(":")
        if match[2] is None or not _NAME.match(name):
            raise ValueError(f"got {match[0]!r}; expected ${{NAME}} or ${{NAME:default}}; write $${{ for a literal ${{")
        if default.startswith("-"):
            # a shell would not read the `-` as part of the default
            hint = f"if the default begins with '-', write a space before it: ${{{name}: {default}}}"
            other = "" if default.startswith("--") else f"write ${{{name}:{default[1:]}}}; "
            raise ValueError(f"got {match[0]!r}; {other}{hint}")
        if name == "env" and _NAME.match(default):
            raise ValueError(
                f"got {match[0]!r}; write ${{{default}}} for the environment variable {default}, or "
                f"${{env: {default}}} for a variable `env` with a default"
            )
        if name in environ:
            return environ[name]
        if not colon:
            raise UnsetError(name)
        return default_of(match)

    return VARIABLE.sub(value_of, text)


def escape(text: str, *, keep_run_dir: bool = False) -> str:
    """Escape text so that `substitute` returns it unchanged."""
    if keep_run_dir:
        return _ESCAPED.sub(lambda match: match[0] if match[1] else "$${", text)
    return text.replace("${", "$${")


def unusable(text: str) -> str | None:
    """Return why a text cannot be a value, or None. NUL characters and lone surrogates would break paths and files."""
    if "\0" in text:
        return "the text holds a NUL character; remove it"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "the text is not valid Unicode; write it as UTF-8"
    return None


class Unfilled(Mapping[str, str]):
    """Environment variables in which a variable that is not set has the value `${NAME}`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __getitem__(self, name: str) -> str:
        return self._environ.get(name, f"${{{name}}}")

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)
