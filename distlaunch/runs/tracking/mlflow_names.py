"""Names of values and settings in MLflow, which refuses many names of metrics and keys of configs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping

_REFUSED = re.compile(r"[^/\w.\- :]")
_MAX_LENGTH = 250


class MLflowNames:
    """Turns any names into names that MLflow accepts. Different names stay different."""

    def __init__(self) -> None:
        self._accepted: dict[str, str] = {}
        self._taken: set[str] = set()

    def accept(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the accepted name of each name that was ever passed, including these.

        A name that MLflow accepts stays the same. In other names, `_` replaces the characters that it refuses. If the
        result is taken, a checksum of the name is appended.
        """
        new = dict.fromkeys(name for name in names if name not in self._accepted)
        # first those that stay the same, so that no changed name takes theirs
        for name in sorted(new, key=lambda name: _replace_refused(name) != name):
            accepted = _replace_refused(name)
            if accepted in self._taken:
                checksum = f"_{zlib.crc32(name.encode()):08x}"
                accepted = accepted[: _MAX_LENGTH - len(checksum)] + checksum
            self._taken.add(accepted)
            self._accepted[name] = accepted
        return self._accepted


def _replace_refused(name: str) -> str:
    # MLflow also refuses names that are no normal relative paths
    parts = [f"{part}_" if part in ("", ".", "..") else part for part in _REFUSED.sub("_", name).split("/")]
    return "/".join(parts)[:_MAX_LENGTH]
