"""Datasets in files of three common kinds: folders of images, TFRecord shards, and a table.

The files are made in the user's cache on first use, from the data that ships with distlaunch, so the configs run
offline.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from csv import writer as csv_writer
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.cache_dir import cache_directory
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data import csv, image_folder, tfrecord
from distlaunch.workloads.datasets import find_fashion_mnist

_SIZES = {"train": 2_000, "validation": 500}
_SHARDS = 4
_WEATHER = ("clear", "cloud, thin", 'rain "light"', "storm")  # with a comma and quotes, which CSV must escape
_FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def images(folder: str | None = None) -> dict[str, Any]:
    """Return Fashion-MNIST as PNG files, `SPLIT/CLASS/NUMBER.png`.

    Args:
        folder: folder of the files, which are made if it does not exist; None for one in the user's cache.
    """
    root = _example_files("images", folder, _write_images)
    return {split: image_folder(root / split, channels=1, size=(28, 28)) for split in _SIZES}


def records(folder: str | None = None) -> dict[str, Any]:
    """Return Fashion-MNIST as TFRecord shards, `SPLIT-SHARD.tfrecord`; see `decode` and `flip`."""
    root = _example_files("records", folder, _write_records)
    return {split: tfrecord(root / f"{split}-*.tfrecord", features=_FEATURES) for split in _SIZES}


def table(folder: str | None = None) -> dict[str, Any]:
    """Return a CSV table of invented data: bicycle rentals by hour, temperature, weather and working day."""
    root = _example_files("table", folder, _write_table)
    return {split: csv(root / f"{split}.csv", label="rides") for split in _SIZES}


def decode(example: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a record as (image, label)."""
    image = tf.ensure_shape(tf.io.decode_png(example["image"], channels=1), (28, 28, 1))
    return tf.cast(image, tf.float32), example["label"]


def flip(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Mirror an image at random, with the same result in every process for the same seed, epoch and example."""
    return tf.image.stateless_random_flip_left_right(image, seed), label


def columns(features: dict[str, tf.Tensor], rides: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a row of the table as (8 numbers, rides in hundreds)."""
    angle = 2 * np.pi * tf.cast(features["hour"], tf.float32) / 24
    numbers = [tf.sin(angle), tf.cos(angle), features["temperature"] / 30, tf.cast(features["working"], tf.float32)]
    weather = [tf.cast(features["weather"] == name, tf.float32) for name in _WEATHER]
    return tf.stack([*numbers, *weather]), tf.cast(rides, tf.float32) / 100


def regressor(units: int = 32) -> keras.Model:
    """Return a small network for the rows of the table."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(units, activation="relu"),
            layers.Dense(units, activation="relu"),
            layers.Dense(1),
        ],
        name="regressor",
    )


def _example_files(name: str, folder: str | None, write: Callable[[Path], None]) -> Path:
    """Return the folder with the files, and make it if it does not exist.

    Several processes may do this at the same time: the folder appears only when all of its files are complete.
    """
    if folder is not None:
        root = Path(folder)
    elif (cache := cache_directory("examples")) is not None:
        root = cache / name
    else:
        message = "there is no home directory to create the files in; set the argument `folder`"
        raise ConfigError(Problem(("data", "args"), message))
    if root.is_dir():
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        # in the same parent folder, because a rename must not cross file systems
        unfinished = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
        try:
            write(unfinished)
            # this fails if another process has already put its files there
            os.rename(unfinished, root)
        except OSError:
            if not root.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        message = f"{root}: the files cannot be created: {error.strerror or error}; set another `folder`"
        raise ConfigError(Problem(("data", "args", "folder"), message)) from None
    return root


def _image_arrays() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    arrays, _ = find_fashion_mnist("shipped", None)
    names = {"train": "train", "validation": "test"}
    return {split: (arrays[f"x_{names[split]}"][:n], arrays[f"y_{names[split]}"][:n]) for split, n in _SIZES.items()}


def _png(picture: np.ndarray) -> bytes:
    with tf.device("CPU:0"):
        return tf.io.encode_png(picture[..., np.newaxis]).numpy()


def _write_images(root: Path) -> None:
    for split, (pictures, labels) in _image_arrays().items():
        for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            folder = root / split / f"class-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05}.png").write_bytes(_png(picture))


def _write_records(root: Path) -> None:
    for split, (pictures, labels) in _image_arrays().items():
        for shard in range(_SHARDS):
            with tf.io.TFRecordWriter(str(root / f"{split}-{shard}.tfrecord")) as writer:
                for picture, label in zip(pictures[shard::_SHARDS], labels[shard::_SHARDS], strict=True):
                    png, number = tf.train.BytesList(value=[_png(picture)]), tf.train.Int64List(value=[int(label)])
                    features = {
                        "image": tf.train.Feature(bytes_list=png),
                        "label": tf.train.Feature(int64_list=number),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())


def _write_table(root: Path) -> None:
    random = np.random.default_rng(0)
    for split, number in _SIZES.items():
        with (root / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv_writer(file)
            rows.writerow(["hour", "temperature", "weather", "working", "rides"])
            for _ in range(number):
                hour, weather, working = random.integers(24), random.integers(len(_WEATHER)), random.integers(2)
                warm = round(float(random.normal(15, 8)), 1)
                rush = 200 * working * (hour in (8, 17, 18)) + 80 * np.sin(np.pi * hour / 24)
                rides = max(0, int(rush + 6 * warm - 60 * weather + random.normal(0, 15)))
                rows.writerow([hour, warm, _WEATHER[weather], working, rides])
