"""Measures the index of many small TFRecord examples: the time to make it and to read it again, and its memory.

    python scripts/benchmark_index.py --examples 10000000 --files 1000

Each measurement is made in a separate process, so that its peak memory is measured separately, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import google_crc32c
import numpy as np

_DATA_BYTES = 40


def masked_crc(data: bytes) -> int:
    """The checksum of TFRecord files."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def write_files(folder: Path, num_examples: int, num_files: int) -> int:
    """Write TFRecord files with numbered records of the same size; return the number of bytes."""
    length = struct.pack("<Q", _DATA_BYTES)
    header = length + struct.pack("<I", masked_crc(length))
    shares = np.diff(np.linspace(0, num_examples, num_files + 1).astype(int))
    number, written = 0, 0
    for file_id, share in enumerate(shares):
        records = []
        for _ in range(share):
            data = b"%0*d" % (_DATA_BYTES, number)
            records.append(header + data + struct.pack("<I", masked_crc(data)))
            number += 1
        written += (folder / f"part-{file_id:05}.tfrecord").write_bytes(b"".join(records))
    return written


def measure(folder: str) -> dict[str, float]:
    """Return the seconds until the source is ready, the seconds for batches in random order, and peak memory."""
    from distlaunch.data import tfrecord  # imports TensorFlow, before the clock starts

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    source = tfrecord(folder)
    ready_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    fingerprint = source.fingerprint()
    fingerprint_s = time.perf_counter() - start
    random = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(100):
        indices = random.integers(0, len(source), 256)
        (records,) = source.read(indices)
        assert [int(record) for record in records] == indices.tolist(), "an example is not the one asked for"
    read_s = time.perf_counter() - start
    return {
        "examples": len(source),
        "ready_s": round(ready_s, 2),
        "peak_mb": after // 1024,
        "peak_growth_mb": (after - before) // 1024,
        "fingerprint_s": round(fingerprint_s, 3),
        "random_reads_per_s": round(25_600 / read_s),
        "fingerprint": int(fingerprint[:8], 16),
    }


def main() -> None:
    """Write the files, index them, and read the index again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary, "data"), Path(temporary, "cache")
        folder.mkdir()
        start = time.perf_counter()
        written = write_files(folder, options.examples, options.files)
        print(f"wrote {written / 1e6:,.0f} MB in {options.files:,} files in {time.perf_counter() - start:.0f} s")
        command = [sys.executable, __file__, "--measure", str(folder)]
        for name in ("index made", "index read"):
            done = subprocess.run(
                command,
                env={**os.environ, "XDG_CACHE_HOME": str(cache), "TF_CPP_MIN_LOG_LEVEL": "3"},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(f"{name}: {done.stdout.strip()}")
        index = sum(path.stat().st_size for path in cache.rglob("*.index"))
        print(f"index: {index / 1e6:,.1f} MB, {index / options.examples:.2f} bytes an example")


if __name__ == "__main__":
    main()
