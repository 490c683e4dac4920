"""`data.preprocessing`: a layer before the model, made once for a run and used by all processes and SavedModels."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.base.file_locks import lock
from distlaunch.base.folders import make_folder
from distlaunch.config.run import Preprocessing as PreprocessingConfig
from distlaunch.data.batches import Batch
from distlaunch.data.function_references import call, load_function
from distlaunch.patches.keras_private import layers_of
from distlaunch.patches.tensorflow_late import tf

_KEY = ("data", "preprocessing")


class Preprocessing:
    """Applies a layer to the inputs of batches from the data function, before the model gets them.

    Attributes:
        layer: the Keras layer.
        path: the file of the layer.
        input_spec: `tf.TensorSpec` of each of the layer's inputs, in their structure; the first dimension is the rows.
    """

    def __init__(self, layer: Any, path: Path, raw: Any) -> None:
        self.layer, self.path, self.input_spec = layer, path, raw
        # in a graph, because Keras then computes with TensorFlow even if its backend is JAX
        self._compute = tf.function(self.compute, reduce_retracing=True)

    def compute(self, inputs: Any) -> Any:
        """Return the layer's outputs, in the same way for training, validation, predictions and exports."""
        # Keras's random layers would draw by default
        trains = {"training": False} if _takes_training(self.layer) else {}
        return self.layer(inputs, **trains)

    def random_layers(self) -> list[str]:
        """Return the names of layers that draw random numbers in training only, and so never here."""
        return [
            layer.name
            for layer in layers_of(self.layer)
            if _takes_training(layer) and any(isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values())
        ]

    def __call__(self, batch: Batch) -> Batch:
        if not isinstance(batch, tuple):
            return self._compute(batch)
        return (self._compute(batch[0]), *batch[1:])


def prepare(config: PreprocessingConfig, inputs: tf.data.Dataset, path: Path) -> Preprocessing:
    """Return the layer that the config's function adapts to the training inputs; the first process calls the function.

    Args:
        inputs: the inputs of the training split, in batches, for one pass.
        path: the `.keras` file in which the layer is saved.

    Raises:
        ConfigError: the function returns no layer, or one that cannot be saved.
    """
    make_folder(path.parent)
    # the file is complete as soon as it exists, and the run may be on a disk that can only be read
    with nullcontext() if path.exists() else _locked(path.with_suffix(".lock")), tf.device("CPU:0"):
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
        ConfigError: the layer cannot be loaded.
    """
    load_function(config.function, (*_KEY, "function"))  # its module may register classes that the file needs
    return Preprocessing(_load(path, config.function), path, raw)


def _takes_training(layer: Any) -> bool:
    return "training" in inspect.signature(layer.call).parameters


def _save(layer: Any, path: Path, function: str) -> None:
    temporary = path.with_name(f".new-{path.name}")
    with warnings.catch_warnings(), _explain_save_errors(function):
        warnings.simplefilter("ignore", UserWarning)  # "a model that has not yet been built"
        keras.Sequential([layer]).save(temporary)
        _load(temporary, function)  # checked before other processes can find the file
    temporary.replace(path)


def _load(path: Path, function: str) -> Any:
    with _explain_save_errors(function):
        model: Any = keras.saving.load_model(path)
        layer = model.layers[0]
        if isinstance(layer, keras.utils.FeatureSpace):
            # builds the layer now, because building reads the sizes of vocabularies, and a graph cannot read them
            layer.get_inputs()
        return layer


@contextlib.contextmanager
def _explain_save_errors(function: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:  # Keras writes a vocabulary in the locale's encoding
        message = f"the layer that {function} returned contains text that this locale cannot encode: {error}"
        raise ConfigError(Problem((*_KEY, "function"), f"{message}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1")) from error
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = reason_of(error)
        message = f"the layer that {function} returned cannot be saved and loaded: {reason}"
        hint = "give its class a get_config, and @keras.saving.register_keras_serializable()"
        raise ConfigError(Problem((*_KEY, "function"), f"{message}; {hint}")) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, which the system releases if the process dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock(fd, fcntl.LOCK_EX)  # on file systems without locks, several processes make the same layer
        yield
    finally:
        os.close(fd)
