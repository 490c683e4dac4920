"""Messages between a controller and an agent: a header in JSON, perhaps followed by bytes.

Lengths come first and are checked before anything else is read, so an invalid message costs no memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from distlaunch.base.plain_types import is_dict

PROTOCOL = 1
GREETING = b"\n\x02distlaunch-agent\x03\n"
"""Comes before the first message of an agent. What is printed before it, by shell start-up files, is no message."""
MAX_NOISE_BYTES = 256 * 1024
MAX_HEADER_BYTES = 1024 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024
"""Bytes of a file in one message: small enough that heartbeats can be sent in between."""

_LENGTHS = struct.Struct("!II")


class FrameError(Exception):
    """The received bytes are no message."""


class Frame(NamedTuple):
    """A message.

    Attributes:
        kind: what it is about.
        fields: the rest of its header.
    """

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def text(self, name: str) -> str:
        """Return a required text field. Raise FrameError if it is missing or no text."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise FrameError(f"{self.kind}: {name}: got {value!r:.80}; expected text")
        return value

    def number(self, name: str, least: int = -(2**63), most: int = 2**63) -> int:
        """Return a required integer field within a range. Raise FrameError if it is not."""
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
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Return the messages that are complete. After FrameError nothing more can be read."""
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
    """Passes over what comes before the greeting.

    Attributes:
        noise: the first of what was passed over.
    """

    def __init__(self) -> None:
        self.noise = b""
        self._data = b""
        self._size = 0

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes after the greeting, or None before it. Raise FrameError if something else comes."""
        self._data += data
        before, found, rest = self._data.partition(GREETING)
        if found:
            self.noise = (self.noise + before)[:4000]
            return rest
        # the greeting may be cut in two
        keep = len(GREETING) - 1
        passed, self._data = self._data[:-keep], self._data[-keep:]
        self._size += len(passed)
        self.noise = (self.noise + passed)[:4000]
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
