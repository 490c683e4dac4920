"""`data.preprocessing`: a layer before the model, made once for a run, shared by its processes and SavedModels."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.base.file_locks import lock
from distlaunch.base.folders import make_folder
from distlaunch.config.run import Preprocessing as PreprocessingConfig
from distlaunch.data.batches import Batch
from distlaunch.data.function_references import call, load_function

_KEY = ("data", "preprocessing")


class Preprocessing:
    """Turns the inputs of batches, as the data function gave them, into those of the model.

    Attributes:
        layer: the Keras layer that does it.
        path: the file in which it is kept.
        raw: `tf.TensorSpec` of what it takes, in the structure of the inputs; the first dimension is the rows.
    """

    def __init__(self, layer: Any, path: Path, raw: Any) -> None:
        self.layer, self.path, self.raw = layer, path, raw
        # in a graph, where Keras computes with TensorFlow whatever it runs on
        self._compute = tf.function(lambda inputs: layer(inputs), reduce_retracing=True)

    def __call__(self, batch: Batch) -> Batch:
        if not isinstance(batch, tuple):
            return self._compute(batch)
        return (self._compute(batch[0]), *batch[1:])


def prepare(config: PreprocessingConfig, inputs: tf.data.Dataset, path: Path) -> Preprocessing:
    """Return the layer that the config's function adapts to the training inputs; the first process makes it.

    Args:
        inputs: the inputs of the training split in batches, once.
        path: the `.keras` file in which it is kept.

    Raises:
        ConfigError: the function returns no layer, or one that cannot be saved.
    """
    make_folder(path.parent)
    with _locked(path.with_suffix(".lock")), tf.device("CPU:0"):
        if not path.exists():
            layer = call(config.function, config.args, _KEY, inputs)
            if not isinstance(layer, keras.Layer):
                message = f"{config.function} returned {type(layer).__name__}; expected a Keras layer"
                raise ConfigError(Problem((*_KEY, "function"), message))
            _save(layer, path, config.function)
        return restore(config, path, inputs.element_spec)


def restore(config: PreprocessingConfig, path: Path, raw: Any) -> Preprocessing:
    """Return the layer that `prepare` has saved.

    Raises:
        ConfigError: it cannot be loaded.
    """
    load_function(config.function, (*_KEY, "function"))  # its module may register classes that the file needs
    return Preprocessing(_load(path, config.function), path, raw)


def _save(layer: Any, path: Path, function: str) -> None:
    temporary = path.with_name(f".new-{path.name}")
    with warnings.catch_warnings(), _cannot_be_kept(function):
        warnings.simplefilter("ignore", UserWarning)  # "a model that has not yet been built"
        keras.Sequential([layer]).save(temporary)
        _load(temporary, function)  # what cannot be read back must not be found by the other processes
    temporary.replace(path)


def _load(path: Path, function: str) -> Any:
    with _cannot_be_kept(function):
        model: Any = keras.saving.load_model(path)
        layer = model.layers[0]
        if isinstance(layer, keras.utils.FeatureSpace):
            layer.get_inputs()  # ends its building, which asks for the sizes of vocabularies: a graph has none to read
        return layer


@contextlib.contextmanager
def _cannot_be_kept(function: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:  # Keras writes a vocabulary in the locale's encoding
        message = f"the layer that {function} returned holds text that this locale cannot write: {error}"
        raise ConfigError(Problem((*_KEY, "function"), f"{message}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1")) from error
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = reason_of(error)
        message = f"the layer that {function} returned cannot be saved and loaded: {reason}"
        hint = "give its class a get_config, and @keras.saving.register_keras_serializable()"
        raise ConfigError(Problem((*_KEY, "function"), f"{message}; {hint}")) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Admit one process at a time, if the disk has locks; the system releases a lock when its process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock(fd, fcntl.LOCK_EX)  # without one, several make the same layer
        yield
    finally:
        os.close(fd)
