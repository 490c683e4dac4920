"""Images in a folder for each class: as Keras reads them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import RecordError, image_folder

pytestmark = pytest.mark.usefixtures("virtual_devices")

WRITERS = {".jpg": tf.io.encode_jpeg, ".png": tf.io.encode_png}


def draw(path: Path, seed: int, height: int = 9, width: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    tf.io.write_file(str(path), WRITERS[path.suffix.lower()](image))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(["cat/1.jpg", "cat/0.png", "dog/b/2.JPG", "dog/a.png", "dog/ü.png"]):
        draw(tmp_path / "images" / name, seed)
    return tmp_path / "images"


def test_as_keras_reads_them(folder: Path) -> None:
    source = image_folder(folder, size=(6, 5))
    reference = keras.utils.image_dataset_from_directory(
        folder, image_size=(6, 5), shuffle=False, batch_size=None, verbose=False
    )
    expected = {image.numpy().tobytes(): int(label) for image, label in reference}
    found = [source[index] for index in range(len(source))]
    assert {image.tobytes(): int(label) for image, label in found} == expected
    assert {image.dtype.name for image, _ in found} == {"float32"}
    assert [os.path.relpath(source.where(index), folder) for index in range(5)] == [
        "cat/0.png", "cat/1.jpg", "dog/a.png", "dog/b/2.JPG", "dog/ü.png"
    ]  # fmt: skip
    assert source.class_names == ["cat", "dog"]


def test_in_a_pipeline_with_their_own_sizes(folder: Path) -> None:
    draw(folder / "cat" / "2.png", 9, height=3)
    source = image_folder(folder, channels=1)
    types = [spec.dtype for spec in source.raw_spec]

    def read(rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
        raw = tf.numpy_function(source.read, [rows], types)
        return tuple(
            tf.ensure_shape(part, [None, *spec.shape]) for part, spec in zip(raw, source.raw_spec, strict=True)
        )

    pipeline = tf.data.Dataset.range(6).batch(4).map(read).unbatch().map(source.decode)
    spec: Any = pipeline.element_spec
    assert spec[0].shape.as_list() == [None, None, 1]
    images = list(pipeline)
    assert [image.shape.as_list() for image, _ in images][:3] == [[9, 7, 1], [9, 7, 1], [3, 7, 1]]
    assert [int(label) for _, label in images] == [0, 0, 0, 1, 1, 1]
    assert {image.dtype.name for image, _ in images} == {"uint8"}


def test_classes(folder: Path) -> None:
    (folder / "ant").mkdir()
    (folder / ".cache").mkdir()
    assert image_folder(folder).class_names == ["ant", "cat", "dog"]
    chosen = image_folder(folder, classes=["dog", "cat"])
    assert [int(chosen[index][1]) for index in range(5)] == [0, 0, 0, 1, 1]
    assert len(image_folder(folder, classes=["dog"])) == 3
    with pytest.raises(ConfigError, match="has no folder cow; its folders are ant, cat, dog"):
        image_folder(folder, classes=["cow"])
    with pytest.raises(ConfigError, match="no images in the folders"):
        image_folder(folder, classes=["ant"])


def test_what_is_left_out_and_what_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("Thumbs.db", ".hidden.png", "notes.txt"):
        (folder / "cat" / name).write_bytes(b"")
    (folder / "cat" / "loop").symlink_to(folder / "cat")
    draw(tmp_path / "elsewhere" / "x.png", 7)
    (folder / "cat" / "linked").symlink_to(tmp_path / "elsewhere")
    assert len(image_folder(folder)) == 6
    (folder / "cat" / "x.tiff").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cat/x.tiff is an image of an unsupported type"):
        image_folder(folder)
    (folder / "cat" / "x.tiff").unlink()
    with pytest.raises(ConfigError, match="no such directory"):
        image_folder(folder / "none")
    with pytest.raises(ConfigError, match="has no subfolders"):
        image_folder(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"size: got \(0, 1\)"):
        image_folder(folder, size=(0, 1))
    with pytest.raises(ConfigError, match="channels: got 2"):
        image_folder(folder, channels=2)


def test_images_that_cannot_be_decoded_are_named(folder: Path) -> None:
    source = image_folder(folder)
    assert len([source[index] for index in range(5)]) == 5
    (folder / "dog" / "a.png").write_bytes(b"no image")
    path = folder / "cat" / "1.jpg"
    path.write_bytes(path.read_bytes()[:200])
    (folder / "dog" / "ü.png").unlink()
    failures = {}
    for index in range(5):
        try:
            source[index]
        except RecordError as error:
            failures[index] = str(error)
    assert sorted(failures) == [1, 2, 4]
    assert failures[2].startswith(f"example 2 cannot be read ({folder}/dog/a.png): Unknown image file format")
    assert "No such file" in failures[4]


def test_the_fingerprint_is_of_names_and_content(folder: Path) -> None:
    first = image_folder(folder).fingerprint()
    moved = folder.rename(folder.with_name("moved"))
    os.utime(moved / "cat" / "1.jpg", (1, 1))
    assert image_folder(moved).fingerprint() == first
    source = image_folder(moved)
    draw(moved / "cat" / "1.jpg", 9)
    assert source.fingerprint() != first
    source = image_folder(moved)
    (moved / "cat" / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"1.jpg.*vanished"):
        source.fingerprint()
    assert image_folder(moved).fingerprint() != first
