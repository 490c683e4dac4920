"""The tested versions of TensorFlow, Keras and JAX, and the installed ones, read without importing them.

distlaunch patches private parts of these frameworks (see `distlaunch.patches`), which any release may change. A version
outside its tested range is used with a warning. A version that lacks a needed part is refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """Versions from one release series to another.

    Attributes:
        first: the first series, as (major, minor).
        end: the first series after the range.
    """

    first: tuple[int, int]
    end: tuple[int, int]

    def includes(self, version: str) -> bool:
        # compare only the series, so that a release candidate such as `2.21.0rc1` belongs to it
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self.first <= (int(found[1]), int(found[2])) < self.end

    def __str__(self) -> str:
        """Return the requirement in the form of pip."""
        return f">={_text(self.first)},<{_text(self.end)}"


TESTED = {
    "tensorflow": Range((2, 21), (2, 22)),
    "keras": Range((3, 15), (3, 16)),
    "jax": Range((0, 10), (0, 13)),
}
"""The tested versions, with the same bounds as in pyproject.toml."""


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed; `tensorflow-cpu` counts as `tensorflow`."""
    return _installed(package) or _installed(f"{package}-cpu")


def _installed(package: str) -> str | None:
    # search like `importlib.metadata`, whose import would cost every command and agent 20 ms
    metadata = re.compile(re.sub(r"[-_.]+", "[-_.]+", package) + r"-(\d.*)\.dist-info", re.IGNORECASE)
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # the entry is an archive or does not exist
            continue
        if found := next(filter(None, map(metadata.fullmatch, names)), None):
            return found[1]
    import importlib.metadata  # also searches other places

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(package: str) -> str:
    """Return the command that installs a tested version of a framework."""
    return f"pip install '{package}{TESTED[package]}'"


def frameworks(backend: str) -> tuple[str, ...]:
    """Return the frameworks that a run may use for a backend of Keras.

    On JAX, TensorFlow is used only for data that needs it, and for some exports.
    """
    return tuple(dict.fromkeys(("tensorflow", "keras", backend)))


def untested(packages: Iterable[str]) -> list[str]:
    """Return a warning for each of these frameworks whose version is outside its tested range."""
    found = ((package, installed(package)) for package in packages)
    return [
        f"{package} {version} is installed; this distlaunch is tested with {package}{TESTED[package]}; "
        f"in case of problems, install a tested version: {install_command(package)}"
        for package, version in found
        if version is not None and not TESTED[package].includes(version)
    ]


def _text(series: tuple[int, int]) -> str:
    return f"{series[0]}.{series[1]}"
