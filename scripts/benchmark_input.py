"""Measures how input scales with workers, and what it costs relative to a pipeline written by hand.

    python scripts/benchmark_input.py [--pairs N] [--torch PYTHON]

1. A map that waits 10 ms per example, with one thread per process and a step that costs nothing: the ratios of the
   epoch times with one, two and four workers.
2. Python code that computes for 2 ms per example: the epoch time with a process for each core, relative to threads.
3. JPEG images of 224 x 224 on one device: images per second with `distlaunch.data.image_folder`, relative to the best
   tf.data pipeline that we could write, and to a PyTorch DataLoader with one worker per core. The DataLoader needs
   `--torch`, a Python that has torch, torchvision and Pillow.

The ratios are those of one run on one machine. Run the script on an idle machine.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES, BATCH, EPOCHS = 480, 24, 3
IMAGES, IMAGE_BATCH = 512, 32
MINE = """
import time
import keras, numpy as np, tensorflow as tf


def data():
    x = np.random.default_rng(0).normal(size=(480, 4)).astype("float32")
    return {"train": (x, x.sum(1))}


def wait(x, y):
    def pause(x):
        time.sleep(0.01)
        return x

    return tf.ensure_shape(tf.numpy_function(pause, [x], tf.float32), [4]), y


class Examples:
    def __len__(self):
        return 960

    def __getitem__(self, index):
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return np.full(4, index / 960, "float32"), np.float32(index / 960)


def examples():
    return {"train": Examples()}


def model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
"""
TORCH = """
import sys, time
import torch, torchvision
from torchvision.transforms import v2

folder, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
look = v2.Compose([v2.PILToTensor(), v2.Resize((224, 224)), v2.ToDtype(torch.float32)])
images = torchvision.datasets.ImageFolder(folder, transform=look)
loader = torch.utils.data.DataLoader(images, batch, shuffle=True, num_workers=workers, persistent_workers=True)
for epoch in range(2):  # the workers start in the first
    number, began = 0, None
    for x, _ in loader:
        if began is None:
            began = time.perf_counter()
        else:
            number += len(x)
print(number / (time.perf_counter() - began))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--torch", metavar="PYTHON", help="of an environment that has torch and torchvision")
    parser.add_argument("--only-jpeg", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not words.only_jpeg:
            _waiting(Path(folder))
            _python(Path(folder))
        _decoding(Path(folder), words.pairs, words.torch)


def _waiting(folder: Path) -> None:
    data = {"function": "mine.py:data", "map": "mine.py:wait", "threads": 1}
    seconds = {
        workers: _epoch_s(folder, f"w{workers}", data, strategy={"kind": "multi_worker_mirrored"},
                          cluster={"workers": workers})
        for workers in (1, 2, 4)
    }  # fmt: skip
    for workers in (2, 4):
        print(f"a map that waits: {workers} workers are {seconds[1] / seconds[workers]:.2f} times as fast as one")


def _python(folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    data = {"function": "mine.py:examples"}
    threads = _epoch_s(folder, "threads", data)
    processes = _epoch_s(folder, "processes", {**data, "processes": cores})
    print(f"Python that computes: {cores} processes are {threads / processes:.2f} times as fast as {cores} threads")


def _epoch_s(folder: Path, name: str, data: dict[str, Any], **more: Any) -> float:
    """Train, and return the duration of the fastest epoch."""
    (folder / "mine.py").write_text(MINE)
    config = {
        "name": name,
        "model": {"function": "mine.py:model"},
        "data": {"global_batch": BATCH, **data},
        "compile": {"optimizer": "sgd", "loss": "mse"},
        "train": {"epochs": EPOCHS},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    subprocess.run([sys.executable, "-m", "distlaunch", "train", path.name, "-q"], cwd=folder, check=True)
    events = map(json.loads, (folder / "runs" / name / "events.jsonl").read_text().splitlines())
    epochs = [event["seconds"] for event in events if event["event"] == "EpochEnded"]
    return min(epochs[1:])  # the first compiles


def _decoding(folder: Path, pairs: int, torch: str | None) -> None:
    import tensorflow as tf

    random = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / "images" / str(number % 4) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 255, (28, 28, 3)).astype(np.float32)
        picture = tf.cast(tf.image.resize(small, (500, 375)), tf.uint8)
        path.write_bytes(tf.io.encode_jpeg(picture).numpy())
    images = folder / "images"
    others = {"a pipeline by hand": lambda: _rate(_by_hand(images))}
    if torch is not None:
        (folder / "torch_loader.py").write_text(TORCH)
        call = [
            torch,
            str(folder / "torch_loader.py"),
            str(images),
            str(IMAGE_BATCH),
            str(len(os.sched_getaffinity(0))),
        ]
        others["a PyTorch DataLoader"] = lambda: float(subprocess.run(call, check=True, stdout=subprocess.PIPE).stdout)
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(pairs):
        ours = _rate(_ours(images))
        for name, rate in others.items():
            ratios[name].append(ours / rate())
    for name, found in ratios.items():
        print(f"JPEG on one device: {statistics.median(found):.2f} of {name}, median of {pairs} pairs "
              f"(from {min(found):.2f} to {max(found):.2f})")  # fmt: skip


def _rate(batches: Iterator[Any]) -> float:
    next(batches)
    began, images = time.perf_counter(), 0
    for _ in range(IMAGES // IMAGE_BATCH - 1):
        images += int(next(batches)[0].shape[0])
    return images / (time.perf_counter() - began)


def _by_hand(folder: Path) -> Iterator[Any]:
    import tensorflow as tf

    paths = sorted(map(str, folder.glob("*/*.jpg")))
    labels = [int(Path(path).parent.name) for path in paths]

    def decode(path: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.ensure_shape(tf.image.resize(image, (224, 224)), (224, 224, 3)), label

    files = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths), seed=0).repeat()
    return iter(files.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(IMAGE_BATCH).prefetch(tf.data.AUTOTUNE))


def _ours(folder: Path) -> Iterator[Any]:
    from distlaunch.config.run import Data
    from distlaunch.data import image_folder
    from distlaunch.data.rows import split_rows
    from distlaunch.data.source import make_split

    config = Data.model_validate({"function": "unused:unused", "global_batch": IMAGE_BATCH})
    split = make_split(image_folder(folder, size=(224, 224)), config, seed=0, training=True)
    source = split.training_source(0, 0, ends_visible=False)
    return (batch for batch, *_ in split_rows(source, first_replica=0, num_local=1, num_replicas=1))


if __name__ == "__main__":
    main()
