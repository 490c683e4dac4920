"""TFRecord files by offset: the same records as TensorFlow reads, and files that are not what they should be."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import RecordError, tfrecord
from distlaunch.data.files import byte_reader

pytestmark = pytest.mark.usefixtures("virtual_devices", "index_cache")


def write(path: Path, records: Sequence[bytes], compression: str | None = None) -> Path:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return path


def write_many(folder: Path, num_files: int, each: int) -> list[bytes]:
    records = [b"%d" % number * (1 + number % 3) for number in range(num_files * each)]
    for file_id in range(num_files):
        write(folder / f"part-{file_id:03}.tfrecord", records[file_id * each : (file_id + 1) * each])
    return records


@settings(max_examples=25)
@given(st.lists(st.lists(st.binary(max_size=40) | st.just(bytes(70_000)), max_size=30), min_size=1, max_size=3))
def test_all_records_as_tensorflow_reads_them(files: list[list[bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write(Path(folder, f"{number}.tfrecord"), records) for number, records in enumerate(files)]
        expected = list(tf.data.TFRecordDataset([str(path) for path in paths]).as_numpy_iterator())
        if not expected:
            with pytest.raises(ConfigError, match="without a record"):
                tfrecord(folder)
            return
        source = tfrecord(folder)
        assert [source[index] for index in range(len(source))] == expected
        order = np.random.default_rng(0).permutation(len(source)).repeat(2)
        assert source.read(order)[0].tolist() == [expected[index] for index in order]


def test_features_are_parsed_in_a_pipeline(tmp_path: Path) -> None:
    def example(number: int) -> bytes:
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
        return tf.train.Example(features=tf.train.Features(feature={"a": feature})).SerializeToString()

    path = write(tmp_path / "a", [example(number) for number in range(5)])
    source = tfrecord(path, features={"a": tf.io.FixedLenFeature([], tf.int64)})
    types = [spec.dtype for spec in source.raw_spec]
    pipeline = tf.data.Dataset.range(5).batch(2).map(lambda rows: tf.numpy_function(source.read, [rows], types))
    pipeline = pipeline.unbatch().map(lambda *raw: source.decode(*map(tf.ensure_shape, raw, [[]])))
    assert [int(part["a"]) for part in pipeline] == list(range(5))
    assert source[-1] == {"a": 4}
    with pytest.raises(IndexError, match="got example 5; there are 5"):
        source[5]
    wrong = tfrecord(path, features={"b": tf.io.FixedLenFeature([], tf.int64)})
    with pytest.raises(RecordError, match=r"record 3 at byte") as failure:
        wrong[3]
    assert "Feature: b" in failure.value.reason


def test_more_files_than_may_be_open_and_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_reader, "MOST_OPEN", 3)
    records = write_many(tmp_path, 12, 20)
    source = tfrecord(tmp_path)

    def read(seed: int) -> bool:
        order = np.random.default_rng(seed).integers(0, len(records), 60)
        return source.read(order)[0].tolist() == [records[index] for index in order]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    assert len([path for path in opened if path.startswith(str(tmp_path))]) <= 3


def test_a_forked_process_reads_while_the_parent_does(tmp_path: Path) -> None:
    records = write_many(tmp_path, 3, 50)
    source = tfrecord(tmp_path)
    order = np.arange(len(records))[::-1]
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            source.read(order)

    reader = threading.Thread(target=keep_reading)
    reader.start()
    child = os.fork()
    if child == 0:  # pytest must not go on in it
        os._exit(0 if source.read(order)[0].tolist() == records[::-1] else 1)
    _, status = os.waitpid(child, 0)
    stop.set()
    reader.join()
    assert status == 0


def test_the_fingerprint_is_of_content_and_names_alone(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_many(tmp_path / name, 2, 30)
    os.utime(tmp_path / "there" / "part-000.tfrecord", (1, 1))
    here = tfrecord(tmp_path / "here").fingerprint()
    assert tfrecord(f"{tmp_path}/there/*").fingerprint() == here
    write(tmp_path / "there" / "part-001.tfrecord", [b"x" * 3] * 30)
    assert tfrecord(tmp_path / "there").fingerprint() != here


def test_a_file_that_vanishes_is_truncated_or_grows(tmp_path: Path) -> None:
    write_many(tmp_path, 3, 10)
    source = tfrecord(tmp_path)
    first, second, third = sorted(tmp_path.iterdir())
    first.unlink()
    with second.open("r+b") as file:
        file.truncate(100)
    with third.open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        RecordError, match=r"example 3 cannot be read \(.*part-000.tfrecord, record 3 at byte 54\): .*van"
    ):
        source.read(np.array([3]))
    with pytest.raises(RecordError, match=r"example 17 .*part-001.tfrecord, record 7 .*was truncated: .*, 100 now"):
        source.read(np.array([19, 18, 17]))
    with pytest.raises(RecordError, match="has changed since it was indexed") as caught:
        source.read(np.array([25]))
    assert (caught.value.index, caught.value.where.split(" at ")[0]) == (25, f"{third}, record 5")
    with pytest.raises(DataError, match="vanished"):
        source.fingerprint()


def test_a_file_that_is_truncated_while_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [bytes(100)] * 10)
    source = tfrecord(path)
    source.read(np.array([9]))
    with path.open("r+b") as file:
        file.truncate(500)
    with pytest.raises(RecordError, match=r"example 9 .*the file was truncated: 1,160 bytes when indexed, 500 now"):
        source.read(np.array([9]))


def test_damaged_data_and_lengths_are_found_when_they_are_read(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    path = write(tmp_path / "a", [b"good", b"good", b"good"])
    source = tfrecord(path)
    data = bytearray(path.read_bytes())
    data[20 + 13] ^= 1
    data[40] ^= 1
    path.write_bytes(data)
    assert source[0] == b"good"
    with pytest.raises(RecordError, match=r"record 1 at byte 20.*checksum"):
        source.read(np.array([0, 1]))
    with pytest.raises(RecordError, match=r"record 2 at byte 40.*length"):
        source.read(np.array([2]))


@pytest.mark.parametrize("end", [-1, -5, 45, 30, 2])
def test_truncated_files_cannot_be_indexed(tmp_path: Path, end: int) -> None:
    path = write(tmp_path / "a", [b"good", b"good", b"good"])
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError, match=r"/a, at byte \d+: the file was truncated"):
        tfrecord(path)


def test_what_is_no_tfrecord_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text\n" * 10)
    with pytest.raises(DataError, match="/text, at byte 0: this is not a TFRecord file"):
        tfrecord(tmp_path / "text")
    for compression in ("GZIP", "ZLIB"):
        path = write(tmp_path / compression, [b"good"] * 9, compression)
        with pytest.raises(ConfigError, match=r"is compressed.*decompress it"):
            tfrecord(path)


def test_without_a_library_for_checksums_lengths_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    path = write(tmp_path / "a", [b"good", b"bad"])
    with pytest.warns(UserWarning, match=r"pip install 'distlaunch\[tfrecord\]'"):
        source = tfrecord(path)
    assert source.read(np.array([1, 0]))[0].tolist() == [b"bad", b"good"]
    (tmp_path / "b").write_bytes(struct.pack("<Q", 1 << 40) + bytes(50))
    with pytest.warns(UserWarning, match="checksums"), pytest.raises(DataError, match="not a TFRecord file"):
        tfrecord(tmp_path / "b")
