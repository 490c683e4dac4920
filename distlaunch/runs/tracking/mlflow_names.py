"""Names of values and settings in MLflow, which refuses many names of metrics and keys of configs."""

from __future__ import annotations

import re
import zlib

_REFUSED = re.compile(r"[^/\w.\- :]")
_MAX_LENGTH = 250


def accepted_name(name: str) -> str:
    """Return a name that MLflow accepts, always the same one for a name.

    A name that MLflow accepts stays the same. In other names, `_` replaces what it refuses, and a checksum of the name
    is appended, so that different names stay different.
    """
    # MLflow also refuses names that are no normal relative paths
    parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in _REFUSED.sub("_", name).split("/")]
    accepted = re.sub(r"^\.\.", "__", "/".join(parts))
    if accepted == name and len(name) <= _MAX_LENGTH:
        return name
    checksum = f"_{zlib.crc32(name.encode()):08x}"
    return accepted[: _MAX_LENGTH - len(checksum)].rstrip("/") + checksum
