"""Values of environment variables whose names look secret: logs, events and error.json have `***` in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_NAME = re.compile(
    r"PASSW(OR)?D|PASSPHRASE|(^|_)(SECRETS?|TOKENS?|CREDENTIALS?|((API|ACCESS|PRIVATE|SECRET|ENCRYPTION)_?KEY))(_|$)",
    re.IGNORECASE,
)
_LEAST = 8
"""Shorter values, such as `true`, are in many texts for other reasons."""
_MASK = b"***"


class SecretMask:
    """Replaces the values in texts that come in pieces."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        values = [value for name, value in environ.items() if _NAME.search(name) and _is_secret(value)]
        # as it is, and as it stands in JSON
        forms = {form.encode() for value in values for form in (value, json.dumps(value)[1:-1])}
        self._forms = sorted(forms, key=len, reverse=True)  # of one that begins like another the longer first
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)))
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What can be shown of it. The beginning of a value is kept until more comes."""
        if not self._forms:
            return data
        data = self._pattern.sub(_MASK, self._kept + data)
        length = max(_length_of_start(form, data) for form in self._forms)
        self._kept = data[len(data) - length :]
        return data[: len(data) - length]

    def flush(self) -> bytes:
        """What was kept, as no more comes."""
        kept, self._kept = self._kept, b""
        return kept

    def whole(self, text: str) -> str:
        """A text that has come whole."""
        if not self._forms:
            return text
        how = "surrogatepass"
        return self._pattern.sub(_MASK, text.encode(errors=how)).decode(errors=how)


def _is_secret(value: str) -> bool:
    # a path says where a secret is
    return len(value) >= _LEAST and not value.startswith(("/", "./", "~"))


def _length_of_start(form: bytes, data: bytes) -> int:
    """How many bytes at the end of the data are the beginning of a value."""
    lengths = range(min(len(form) - 1, len(data)), 0, -1)
    return next((length for length in lengths if data.endswith(form[:length])), 0)
