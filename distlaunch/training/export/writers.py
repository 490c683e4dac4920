"""Writes a trained model as SavedModel, Keras file or weights file, independent of any strategy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from distlaunch.base.code_origins import user_line
from distlaunch.base.errors import explanation_of
from distlaunch.base.file_locks import lock
from distlaunch.base.folders import make_folder
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.structures import ArraySpec
from distlaunch.patches.keras_private import layers_of
from distlaunch.patches.tensorflow_late import tf
from distlaunch.serving.exported_model import is_nested, named_outputs
from distlaunch.strategies.protocol import Program, Steps, Strategy
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import restore_variables
from distlaunch.training.build import build_model

_STAGING = ".new_"
_OLD = f"{_STAGING}old_"


def rebuild(config: RunConfig, state: State, rows: Batch) -> keras.Model:
    """Return the model on one device with the values of a snapshot; models built earlier remain usable."""
    backend = export_backend()
    with backend.building():
        model = build_model(config, backend.one_device(), rows)
    restore_variables(model, state)
    return model


@contextlib.contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Create a temporary folder next to the exports, and remove it afterwards.

    Folders that killed processes have left behind are removed first. A folder in use is locked by its process.
    """
    make_folder(directory)
    for left in directory.glob(f"{_STAGING}*"):
        if not left.name.startswith(_OLD):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(left):
                remove(left)
    # next to the exports, because a rename must not cross file systems
    with tempfile.TemporaryDirectory(dir=directory, prefix=_STAGING) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    Raises:
        BlockingIOError: another process holds it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # does nothing on file systems without locks
        lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def put_in_place(new: Path, final: Path) -> None:
    """Replace an export by one that is complete and checked."""
    old = final.with_name(f"{_OLD}{final.name}")
    remove(old)
    if final.exists():
        final.rename(old)  # a folder cannot be replaced in one step
    new.rename(final)
    remove(old)


def save_keras(model: keras.Model, path: Path) -> None:
    model.save(path)


def save_weights(model: keras.Model, path: Path) -> None:
    model.save_weights(path)


@dataclass(frozen=True)
class WantedModel:
    """A SavedModel to be written; see `save_saved_model`.

    Attributes:
        layer: the preprocessing that is part of it, or None.
    """

    layer: Preprocessing | None
    sizes: Any = None


@dataclass(frozen=True)
class SavedModels:
    """The result of `save_saved_models`, which can be written as JSON.

    Attributes:
        fixed: names of the SavedModels for which `save_saved_model` returned True.
        failures: why the other SavedModels could not be written, by name.
    """

    fixed: list[str]
    failures: dict[str, str]


def save_saved_models(model: Any, folder: Path, rows: Batch, wanted: Mapping[str, WantedModel]) -> SavedModels:
    """Write SavedModels into a folder, by name."""
    made = SavedModels([], {})
    for name, each in wanted.items():
        with recorded(made.failures, name):
            if save_saved_model(model, folder / name, rows, each.layer, each.sizes):
                made.fixed.append(name)
    return made


@contextlib.contextmanager
def recorded(failures: dict[str, str], name: str) -> Iterator[None]:
    """Record any error as the reason of a failure, and continue after the context."""
    try:
        yield
    # the model's own code writes its config and is traced, and may raise any error
    except Exception as error:
        failures[name] = f"{explanation_of(error)}{user_line(error)}"


def save_saved_model(
    model: Any, path: Path, rows: Batch, preprocessing: Preprocessing | None, sizes: Any = None
) -> bool:
    """Write a SavedModel with the signature `serve`.

    Args:
        rows: a few examples in the form that the model takes.
        preprocessing: applied to the inputs before the model, as part of the SavedModel; None to leave it out.
        sizes: an `ArraySpec` for each input of the model. Sizes that are None may be any size in the signature. None
            for the sizes of `rows`. Models that declare their inputs do not need it.

    Returns:
        True if the model can be traced only with the sizes of `rows`, although `sizes` has other ones.
    """
    if preprocessing is not None:
        _export(model, path, _named_specs(preprocessing.input_spec), preprocessing)
    elif getattr(model, "inputs", None):
        if not isinstance(model, keras.Sequential) and is_nested(model.output):
            _export(model, path, model.input)
        else:
            model.export(path, verbose=False)
    else:
        # for other models, Keras remembers shapes but not dtypes: integers would become floats
        x = keras.utils.unpack_x_y_sample_weight(rows)[0]
        fixed = _input_specs(x)
        if has_open_sizes(sizes):
            # any error: the code of the model may need numbers where a size is unknown
            with contextlib.suppress(Exception):
                _export(model, path, _input_specs(x, sizes))
                return False
            remove(path)
        _export(model, path, fixed)
        return has_open_sizes(sizes)
    return False


def has_open_sizes(sizes: Any) -> bool:
    """Return whether sizes other than the number of rows are open; see `save_saved_model`."""
    return sizes is not None and any(
        leaf.shape is not None and None in leaf.shape[1:] for leaf in keras.tree.flatten(sizes)
    )


def takes_text(preprocessing: Preprocessing) -> bool:
    return any(spec.dtype == tf.string for spec in tf.nest.flatten(preprocessing.input_spec))


def _input_specs(x: Any, given_sizes: Any = None) -> Any:
    """Return tensor specs in the structure of the model's inputs, for any number of rows; see `save_saved_model`."""

    def spec(path: tuple[Any, ...], leaf: Any, given: Any) -> tf.TensorSpec:
        sizes = given.shape if isinstance(given, ArraySpec) else None
        shape, dtype = list(leaf.shape), tf.as_dtype(leaf.dtype)
        if sizes is not None and len(sizes) == len(shape):
            shape = list(sizes)
        name = "_".join(map(str, path)) or "inputs"
        # the model takes floats in Keras's default type, also from float64 data, as in training
        return tf.TensorSpec([None, *shape[1:]], keras.config.floatx() if dtype.is_floating else dtype, name=name)

    return keras.tree.map_structure_up_to(x, spec, _paths(x), x, x if given_sizes is None else given_sizes)


def _paths(x: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return the structure with each leaf replaced by the keys and indices that lead to it."""
    if isinstance(x, dict):
        return {key: _paths(value, (*path, key)) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_paths(value, (*path, index)) for index, value in enumerate(x))
    return path


def _named_specs(raw: Any) -> Any:
    """Return the specs, named like the columns of the data."""
    if not isinstance(raw, dict):
        return raw

    def named(path: tuple[Any, ...], spec: Any) -> Any:
        is_plain = isinstance(spec, tf.TensorSpec)
        return tf.TensorSpec(spec.shape, spec.dtype, name="_".join(map(str, path))) if is_plain else spec

    return keras.tree.map_structure_up_to(raw, named, _paths(raw), raw)


def _export(model: Any, path: Path, signature: Any, preprocessing: Preprocessing | None = None) -> None:
    archive = keras.export.ExportArchive()
    archive.track(model)
    if preprocessing is not None:
        # tracked here, because Keras does not find objects in the closure of an endpoint's function
        archive.track(preprocessing.layer)
        for layer in layers_of(preprocessing.layer):
            for value in vars(layer).values():  # Keras tracks lookup tables, but not plain TensorFlow variables
                if isinstance(value, tf.Variable):
                    archive.track(value)

    def serve(inputs: Any) -> Any:
        outputs = model(inputs if preprocessing is None else preprocessing.compute(inputs), training=False)
        # the outputs of a SavedModel cannot be nested
        return named_outputs(outputs, lambda tensor: tensor) if is_nested(outputs) else outputs

    archive.add_endpoint("serve", serve, input_signature=[signature])
    archive.write_out(path, verbose=False)  # pyright: ignore[reportAttributeAccessIssue] (of other backends)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def on_host(values: Any) -> Any:
    """Return the tensors of a structure as NumPy arrays."""
    return keras.tree.map_structure(lambda value: np.asarray(keras.ops.convert_to_numpy(value)), values)


class ExportBackend(Protocol):
    """Parts of an export that depend on the Keras backend."""

    makes_saved_models: bool
    """True if this process can write SavedModels that run on every platform."""

    def building(self) -> AbstractContextManager[None]:
        """Return a context in which a model is built again from its function."""
        ...

    def one_device(self) -> Strategy:
        """Return a strategy under which the model is built."""
        ...

    def exact_products(self) -> AbstractContextManager[None]:
        """Return a context in which GPUs multiply in full float32 precision, as CPUs do."""
        ...


class _OnTensorFlow:
    makes_saved_models = True

    def building(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def one_device(self) -> Strategy:
        # imported here: a process on JAX may never need TensorFlow
        from distlaunch.strategies.replica.one_device import OneDevice

        return OneDevice()

    @contextlib.contextmanager
    def exact_products(self) -> Iterator[None]:
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        # TensorFloat-32 has 10 bits of precision, so its error exceeds `TOLERANCE`
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)


class _OnJax:
    makes_saved_models = False

    def building(self) -> AbstractContextManager[None]:
        # imported here: a process on TensorFlow does not import JAX
        from distlaunch.strategies.jax.keras_backend import building

        return building()

    def one_device(self) -> Strategy:
        return _PlainJax()

    def exact_products(self) -> AbstractContextManager[None]:
        import jax

        return jax.default_matmul_precision("highest")


class _PlainJax(Strategy):
    """Builds models where JAX puts them by default."""

    num_replicas = 1

    def scope(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def program(self, steps: Steps) -> Program:
        raise NotImplementedError


_BACKENDS: dict[str, ExportBackend] = {"tensorflow": _OnTensorFlow(), "jax": _OnJax()}


def export_backend() -> ExportBackend:
    """Return the export backend of this process."""
    return _BACKENDS[keras.backend.backend()]
