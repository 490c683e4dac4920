"""A directory of images with a folder for each class."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.data.files.base import STRING, IndexedFiles, RecordError, as_objects
from distlaunch.data.files.image_listing import ClassFolder, list_classes
from distlaunch.data.files.listing import mistake
from distlaunch.data.files.samples import read_sample

_NUM_SAMPLES = 32  # images, of which the first bytes are hashed


def image_folder(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Sequence[str] | None = None,
) -> ImageFolder:
    """Return the images in folders, one for each class, as `keras.utils.image_dataset_from_directory` expects them.

    The names of the folders, sorted, are the classes, and their numbers are the labels. Images are JPEG, PNG, GIF (its
    first picture), BMP and WebP files (TensorFlow reads the last with their own channels only), also those in folders
    within the folder of a class. Hidden files and folders, files that are no images, and images beside the folders are
    left out. A folder without images keeps its number.

    Args:
        path: the directory.
        size: height and width in pixels, or one number for both. Images are resized to it, without keeping their aspect
            ratio, and are float32 from 0 to 255, as Keras does. None leaves their sizes, and uint8.
        channels: 1, 3 or 4.
        classes: the folders to read, in the order of their labels; all by default.

    Returns:
        a source of pairs: an image [height, width, channels] and an int64 label. Its `class_names` are the classes.

    Raises:
        ConfigError: no such directory or classes, no images, or images of other types.
    """
    if channels not in (1, 3, 4):
        raise mistake(f"channels: got {channels!r}; expected 1 (grey), 3 (RGB) or 4 (RGBA)")
    root = os.path.abspath(os.path.expanduser(os.fspath(path)))
    return ImageFolder(list_classes(root, classes), root, _as_size(size), channels)


class ImageFolder(IndexedFiles):
    """See `image_folder`.

    Attributes:
        class_names: in the order of the labels.
    """

    def __init__(self, folders: list[ClassFolder], root: str, size: tuple[int, int] | None, channels: int) -> None:
        self.raw_spec = (STRING, tf.TensorSpec([], tf.int64))
        self.class_names = [folder.name for folder in folders]
        self._root = os.fsencode(root)
        self._size, self._channels = size, channels
        # one text with offsets and not a list: a million paths would be a million objects
        self._names = b"".join(folder.names for folder in folders)
        lengths = np.concatenate([folder.lengths for folder in folders])
        self._ends = np.cumsum(lengths, dtype=np.int64)
        counts = [len(folder.lengths) for folder in folders]
        self._labels = np.repeat(np.arange(len(folders), dtype=np.int32), counts)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the paths and labels; images are read when they are decoded, many at once."""
        indices = np.asarray(indices, np.int64)
        paths = as_objects([self._path(index) for index in indices.tolist()])
        return paths, self._labels[indices].astype(np.int64)

    def decode(self, *raw: Any) -> Any:
        """Return the image and its label."""
        path, label = raw
        # no fourth dimension, so GIFs have the rank of other images
        image = tf.io.decode_image(tf.io.read_file(path), self._channels, expand_animations=False)
        # `decode_image` knows no rank
        image.set_shape([None, None, self._channels])
        if self._size is not None:
            image = tf.image.resize(image, self._size)
        return image, label

    def where(self, index: int) -> str:
        return os.fsdecode(self._path(index))

    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        # the sizes of all would take a look at each file
        hashed = hashlib.sha256(repr((len(self), self.class_names)).encode("utf-8", "surrogateescape"))
        for part in (self._names, self._ends.tobytes(), self._labels.tobytes()):
            hashed.update(part)
        for index in sorted({int(index) for index in np.linspace(0, len(self) - 1, _NUM_SAMPLES)}):
            path = self.where(index)
            try:
                size = os.path.getsize(path)
            except FileNotFoundError:
                raise RecordError(index, path, "the file has vanished") from None
            hashed.update(str(size).encode() + read_sample(path, 0))
        return hashed.hexdigest()

    def _path(self, index: int) -> bytes:
        start = int(self._ends[index - 1]) if index else 0
        return self._root + b"/" + self._names[start : int(self._ends[index])]


def _as_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise mistake(f"size: got {size!r}; expected the height and the width in pixels: (224, 224)")
    return pair[0], pair[1]
