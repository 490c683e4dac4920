"""Images in a directory with a folder for each class."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from distlaunch.data.files.base import STRING, IndexedFiles, RecordError, as_objects
from distlaunch.data.files.image_listing import ClassFolder, list_classes
from distlaunch.data.files.listing import data_function_error
from distlaunch.data.files.samples import read_sample
from distlaunch.data.structures import ArraySpec
from distlaunch.patches.tensorflow_late import tf

_NUM_SAMPLES = 32  # number of images whose first bytes are hashed


def image_folder(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Sequence[str] | None = None,
) -> ImageFolder:
    """Return the images in folders, one for each class, as `keras.utils.image_dataset_from_directory` expects them.

    The sorted names of the folders are the classes, and their indices are the labels. Images are JPEG, PNG, GIF (the
    first frame), BMP and WebP files, also in subfolders of a class's folder. For WebP, `channels` must be the number of
    channels in the file. Hidden files and folders, other files, and images outside the folders are ignored. A folder
    without images counts as a class.

    Args:
        path: the directory.
        size: height and width in pixels, or one number for both. Images are resized to this size, without keeping their
            aspect ratio, and are float32 from 0 to 255, as in Keras. With None, images keep their sizes and are uint8.
        channels: 1, 3 or 4.
        classes: the folders to read, in the order of their labels; all by default.

    Returns:
        A source of pairs of an image [height, width, channels] and an int64 label. Its `class_names` are the classes.

    Raises:
        ConfigError: the directory or a class does not exist, there are no images, or images have an unsupported type.
    """
    if channels not in (1, 3, 4):
        raise data_function_error(f"channels: got {channels!r}; expected 1 (grey), 3 (RGB) or 4 (RGBA)")
    root = os.path.abspath(os.path.expanduser(os.fspath(path)))
    return ImageFolder(list_classes(root, classes), root, _as_size(size), channels)


class ImageFolder(IndexedFiles):
    """See `image_folder`.

    Attributes:
        class_names: in the order of the labels.
    """

    def __init__(self, folders: list[ClassFolder], root: str, size: tuple[int, int] | None, channels: int) -> None:
        self.raw_types = (STRING, ArraySpec((), "int64"))
        self.class_names = [folder.name for folder in folders]
        self._root = os.fsencode(root)
        self._size, self._channels = size, channels
        # one text with offsets, because a list of a million paths would be a million objects
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
        # without `expand_animations`, GIFs have the same rank as other images
        image = tf.io.decode_image(tf.io.read_file(path), self._channels, expand_animations=False)
        # `decode_image` does not set a rank
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
        # reading the sizes of all files would take too long
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
        raise data_function_error(f"size: got {size!r}; expected the height and the width in pixels: (224, 224)")
    return pair[0], pair[1]
