"""TFRecord files, read by offset."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distlaunch.data.files.base import STRING, UnreadableRecordError, as_objects
from distlaunch.data.files.byte_reader import read_fully
from distlaunch.data.files.listing import FileSet, Patterns, compressed_file_error, data_function_error, find_files
from distlaunch.data.files.records import FilesOfByteRanges, Format, ScanError, Scanned
from distlaunch.data.files.samples import why_unreadable
from distlaunch.patches.tensorflow_late import tf

_HEADER = struct.Struct("<QI")  # length of the data in bytes, and a checksum of these eight bytes
_FOOTER = struct.Struct("<I")  # checksum of the data
_FRAME_BYTES = _HEADER.size + _FOOTER.size
# first bytes of compressed files
_GZIP, _ZLIB = b"\x1f\x8b\x08", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_MOST_AT_ONCE, _LEAST_AT_ONCE = 4 << 20, 4 << 10  # bytes of one call while a file is indexed


def tfrecord(files: Patterns, *, features: Mapping[str, Any] | None = None) -> TFRecordFiles:
    """Return the examples in TFRecord files.

    If `google-crc32c` is installed (the extra `tfrecord`), the checksum of each record is checked when it is read.

    Args:
        files: a path, a glob, a directory (its files named `*.tfrecord*` or `*.tfrec`), or a list of them.
        features: argument of `tf.io.parse_single_example`, whose results are the examples. With None, examples are
            serialized bytes, each a scalar string.

    Raises:
        ConfigError: there are no such files, or they are compressed.
        DataError: a file is damaged, or is not a TFRecord file.
    """
    return TFRecordFiles(find_files(files, "a TFRecord file", ("*.tfrecord*", "*.tfrec")), features)


class TFRecordFiles(FilesOfByteRanges):
    """See `tfrecord`."""

    raw_types = (STRING,)

    def __init__(self, files: FileSet, features: Mapping[str, Any] | None = None) -> None:
        self._features = None if features is None else dict(features)
        self._checksum = _find_checksum()
        for path, size in zip(files.paths, files.sizes, strict=True):
            if size:
                _check_not_compressed(path, self._checksum)
        super().__init__(files, Format("tfrecord", 1, self._scan))

    @property
    def decodes_with_tensorflow(self) -> bool:
        return self._features is not None

    def decode(self, *raw: Any) -> Any:
        """Return the parsed features, or the bytes."""
        return raw[0] if self._features is None else tf.io.parse_single_example(raw[0], self._features)

    def _scan(self, descriptor: int, size: int) -> Scanned:
        return Scanned(_find_records(descriptor, size, self._checksum))

    def _parse(self, spans: list[bytes]) -> tuple[np.ndarray, ...]:
        records, checksum = [], self._checksum
        for position, span in enumerate(spans):
            length, _ = _HEADER.unpack_from(span)
            if length + _FRAME_BYTES != len(span):
                raise UnreadableRecordError(position, "its length field has changed since the file was indexed")
            data = span[_HEADER.size : -_FOOTER.size]
            if checksum is not None and checksum(data) != _FOOTER.unpack_from(span, len(span) - _FOOTER.size)[0]:
                raise UnreadableRecordError(position, "its checksum is wrong, so the file is damaged")
            records.append(data)
        return (as_objects(records),)


def _find_records(descriptor: int, size: int, checksum: Callable[[bytes], int] | None) -> np.ndarray:
    """Find the offsets of records from their lengths; the data of large records is skipped."""
    unpack, around = _HEADER.unpack_from, _FRAME_BYTES
    parts: list[np.ndarray] = [np.empty(0, np.uint64)]
    offset, at_once = 0, _LEAST_AT_ONCE
    while offset < size:
        buffer = read_fully(descriptor, offset, at_once)
        starts: list[int] = []
        place, last = 0, len(buffer) - _HEADER.size
        while place <= last:
            length, found = unpack(buffer, place)
            if checksum is not None and checksum(buffer[place : place + 8]) != found:
                raise ScanError(offset + place, _describe_missing_record(offset + place))
            starts.append(place)
            place += length + around
        if not starts:
            raise ScanError(offset, f"the file was truncated; it ends within a record, at byte {size:,}")
        if offset + place > size:
            what = (
                _describe_missing_record(starts[-1])
                if offset + starts[-1] == 0
                else f"the file was truncated to {size:,} bytes"
            )
            raise ScanError(offset + starts[-1], f"{what}; this record ends at byte {offset + place:,}")
        parts.append(np.array(starts, np.uint64) + np.uint64(offset))
        offset += place
        # small records are read in bulk; for large records, only the headers are read
        at_once = min(at_once * 4, _MOST_AT_ONCE) if len(starts) > 16 else max(at_once // 4, _LEAST_AT_ONCE)
    return np.concatenate(parts)


def _describe_missing_record(offset: int) -> str:
    return "this is not a TFRecord file" if offset == 0 else "no record starts here, so the file is damaged"


def _check_not_compressed(path: str, checksum: Callable[[bytes], int] | None) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(_HEADER.size)
    except OSError as error:
        raise data_function_error(f"{path} cannot be read: {why_unreadable(error)}") from None
    # with a correct checksum, this is the header of a record, even if it begins like a compressed file
    if len(start) < _HEADER.size or (checksum is not None and checksum(start[:8]) == _HEADER.unpack(start)[1]):
        return
    if start.startswith(_GZIP):
        raise compressed_file_error(path, "gunzip")
    # a record's length below 2 ** 40 may begin with the same two bytes, but then bytes 5 to 7 are zero
    if start.startswith(_ZLIB) and any(start[5:8]):
        raise compressed_file_error(path, "pigz -dz")


def _find_checksum() -> Callable[[bytes], int] | None:
    """Return a function for the masked CRC32C of TFRecord files. Warn and return None if no fast library exists."""
    try:
        with warnings.catch_warnings():
            # ignored because we warn below: "is using a pure python implementation"
            warnings.simplefilter("ignore", RuntimeWarning)
            import google_crc32c
    except ImportError:
        google_crc32c = None
    if google_crc32c is None or google_crc32c.implementation != "c":
        warnings.warn(
            "only the lengths of TFRecord records are checked, not their checksums; to check both, "
            "pip install 'distlaunch[tfrecord]'",
            stacklevel=4,
        )
        return None
    value = google_crc32c.value

    def masked(data: bytes) -> int:
        crc = value(data)
        # rotated by 15 bits and increased by a constant, as in TensorFlow's `crc32c::Mask`
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    return masked
