"""Messages between the launcher and an agent: a JSON header, perhaps followed by bytes.

A message begins with its lengths. They are checked before anything else is read, so an invalid message costs no memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from distlaunch.base.plain_types import is_dict

PROTOCOL = 1
GREETING = b"\n\x02distlaunch-agent\x03\n"
"""Marks the beginning of an agent's messages. Start-up files of a shell may print text before it."""
MAX_NOISE_BYTES = 256 * 1024
MAX_HEADER_BYTES = 1024 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024
"""Bytes of a file in one message, so few that heartbeats can be sent between messages."""

_LENGTHS = struct.Struct("!II")


class FrameError(Exception):
    """The received bytes are not a valid message."""


class Frame(NamedTuple):
    """A message.

    Attributes:
        kind: the kind of the message.
        fields: the other fields of its header.
    """

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def text(self, name: str) -> str:
        """Return a required text field. Raise FrameError if it is missing or not text."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise FrameError(f"{self.kind}: {name}: got {value!r:.80}; expected text")
        return value

    def number(self, name: str, least: int = -(2**63), most: int = 2**63) -> int:
        """Return a required integer field. Raise FrameError if it is missing, not an integer, or out of range."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise FrameError(f"{self.kind}: {name}: got {value!r:.80}; expected a whole number")
        if not least <= value <= most:
            raise FrameError(f"{self.kind}: {name}: got {value!r:.80}; expected {least:,} to {most:,}")
        return value


def encode(kind: str, payload: bytes = b"", **fields: Any) -> bytes:
    """Encode a message. Raise FrameError if it is too long."""
    header = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    _check(len(header), len(payload))
    return _LENGTHS.pack(len(header), len(payload)) + header + payload


class FrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the complete messages. After FrameError, nothing more can be read."""
        self._data += data
        while len(self._data) >= _LENGTHS.size:
            header, payload = _LENGTHS.unpack_from(self._data)
            _check(header, payload)
            end = _LENGTHS.size + header + payload
            if len(self._data) < end:
                return
            text = bytes(self._data[_LENGTHS.size : _LENGTHS.size + header])
            rest = bytes(self._data[_LENGTHS.size + header : end])
            del self._data[:end]
            yield _parse(text, rest)


class GreetingReader:
    """Skips the text before the greeting.

    Attributes:
        noise: the beginning of the skipped text.
    """

    def __init__(self) -> None:
        self.noise = b""
        self._data = b""
        self._size = 0

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes after the greeting, or None before it. Raise FrameError after too much other text."""
        self._data += data
        before, found, rest = self._data.partition(GREETING)
        if found:
            self.noise = (self.noise + before)[:4000]
            return rest
        # the greeting may be split between two reads
        keep = len(GREETING) - 1
        skipped, self._data = self._data[:-keep], self._data[-keep:]
        self._size += len(skipped)
        self.noise = (self.noise + skipped)[:4000]
        if self._size > MAX_NOISE_BYTES:
            raise FrameError(f"{MAX_NOISE_BYTES:,} bytes were printed before the agent began")
        return None


def _check(header: int, payload: int) -> None:
    if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        most = f"at most {MAX_HEADER_BYTES:,} and {MAX_PAYLOAD_BYTES:,}"
        raise FrameError(f"got a message of {header:,} and {payload:,} bytes; expected {most}")


def _parse(text: bytes, payload: bytes) -> Frame:
    try:
        header = json.loads(text)
    # deeply nested JSON exceeds the recursion limit
    except (ValueError, RecursionError):
        raise FrameError(f"got a message whose header is not JSON: {text[:80]!r}") from None
    if not is_dict(header) or not isinstance(kind := header.pop("kind", None), str):
        raise FrameError(f"got a message without a kind: {text[:80]!r}")
    return Frame(kind, header, payload)
