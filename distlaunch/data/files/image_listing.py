"""Lists the images in a directory with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from distlaunch.data.files.listing import data_function_error

_IMAGES = (b".jpg", b".jpeg", b".png", b".gif", b".bmp", b".webp")
_OTHER_IMAGES = (b".tif", b".tiff", b".heic", b".heif", b".avif", b".jp2", b".jxl")
_NUM_THREADS = 8  # more than one, to hide the latency of network file systems


@dataclass(frozen=True)
class ClassFolder:
    """The images of one class.

    Attributes:
        names: concatenated paths of the images, relative to the directory, sorted.
        lengths: int32 [images], the length of each path in bytes.
    """

    name: str
    names: bytes
    lengths: np.ndarray


def list_classes(root: str, classes: Sequence[str] | None) -> list[ClassFolder]:
    """List the folders of the classes, in the order of their labels.

    Raises:
        ConfigError: the directory or a class does not exist, there are no images, or images have an unsupported type.
    """
    if not os.path.isdir(root):
        raise data_function_error(f"no such directory: {root}")
    there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not there:
        raise data_function_error(
            f"the directory {root} has no subfolders; expected a folder with images for each class"
        )
    if isinstance(classes, str) or (classes is not None and len(set(classes)) != len(classes)):
        raise data_function_error(f"classes: got {classes!r}; expected a list of different names")
    missing = [name for name in classes or () if name not in there]
    if missing:
        raise data_function_error(
            f"classes: {root} has no folder {', '.join(missing)}; its folders are {', '.join(there)}"
        )
    chosen = list(there if classes is None else classes)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        folders = list(pool.map(lambda name: _list_folder(os.fsencode(root), name), chosen))
    if not any(len(folder.lengths) for folder in folders):
        raise data_function_error(f"no images in the folders of {root}; expected JPEG, PNG, GIF, BMP or WebP files")
    return folders


def _list_folder(root: bytes, name: str) -> ClassFolder:
    try:
        # as bytes, so that the order does not depend on the host's locale
        names = sorted(_walk(root, os.fsencode(name), ()))
    except OSError as error:
        raise data_function_error(f"{error.filename!s} cannot be listed: {error.strerror or error}") from None
    return ClassFolder(name, b"".join(names), np.array([len(path) for path in names], np.int32))


def _walk(root: bytes, folder: bytes, above: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    """Yield the paths of images in a folder and its subfolders; links to folders are followed."""
    # follows links
    facts = os.stat(os.path.join(root, folder))
    here = (facts.st_dev, facts.st_ino)
    if here in above:  # a link to a folder that contains the link; following it would never end
        return
    with os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            path, name = os.path.join(folder, entry.name), entry.name.lower()
            if name.startswith(b"."):
                continue
            if entry.is_dir():
                yield from _walk(root, path, (*above, here))
            elif name.endswith(_IMAGES):
                yield path
            elif name.endswith(_OTHER_IMAGES):
                shown = os.fsdecode(os.path.join(root, path))
                raise data_function_error(
                    f"{shown} is an image of an unsupported type; convert it to JPEG or PNG, or remove it"
                )
