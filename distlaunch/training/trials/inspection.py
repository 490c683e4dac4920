"""Finds parts of a model and its data that can make a strategy's numbers differ from those of one device."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from distlaunch.base.run_files.trial_records import ModelFacts
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Source, num_rows, pack, slice_rows
from distlaunch.data.random_ops import RANDOM_OPS, operations
from distlaunch.data.structures import flatten
from distlaunch.patches.keras_overrides import insert_class
from distlaunch.patches.keras_private import has_seed_generators, layers_of, optimized, other_list, other_paths
from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_private import pipeline_graph
from distlaunch.strategies.module_model import layers_and_modules
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import host_value, optimizers_of, overrides_method
from distlaunch.training.batch_norm import replica_batch_norms

_SHARDING_OP = "ShardDataset"
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_CONVOLUTIONS = (
    keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D,
    keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D, keras.layers.SeparableConv2D,
)  # fmt: skip
_HALVES_TOLERANCE = 1e-3
"""Absolute and relative tolerance between a batch and its halves; rounding causes smaller deviations only."""


def facts_of(config: RunConfig, model: keras.Model, source: Source) -> ModelFacts:
    """Return facts about a model on one device, with its initial weights, and about its training data."""
    return ModelFacts(
        batch_norm=replica_batch_norms(model),
        own_batch_norm=sorted({type(part).__name__ for part in layers_and_modules(model) if _seems_batch_norm(part)}),
        embeddings=[layer.name for layer in layers_of(model) if _is_embedding(layer)],
        convolutions=[layer.name for layer in layers_of(model) if isinstance(layer, _CONVOLUTIONS)],
        random=[layer.name for layer in layers_of(model) if draws_random_numbers(layer)],
        own_step=_overridden_step(config, model),
        random_ops=sorted(_pipeline_ops(source) & RANDOM_OPS),
        own_losses=float(sum(float(loss) for loss in model.losses)),
        mixes_rows=depends_on_other_rows(model, source),
    )


def changed_state_variables(model: keras.Model, before: State, after: State) -> list[str]:
    """Return the paths of non-weight variables that a step of training has changed in layers, except BatchNorm."""
    found = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) or _seems_batch_norm(layer):
            continue
        for variable in other_list(layer):
            name = f"model/{variable.path}"
            kept = name not in after or np.array_equal(before[name], after[name])
            if not kept and np.issubdtype(after[name].dtype, np.floating):
                found.append(variable.path)
    return found


def checksum(source: Source, batches: int) -> str:
    """Return a SHA-256 checksum of the first batches."""
    digest = hashlib.sha256()
    if source.on_host:
        for element in itertools.islice(source.elements, batches):
            for leaf in flatten(_load_batch(source, (element,))):
                digest.update(leaf.tobytes())
        return digest.hexdigest()
    for batch in _batches(source).take(batches):
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            digest.update(leaf.numpy().tobytes())
    return digest.hexdigest()


def takes_shards(source: Source) -> bool:
    """Return whether the pipeline itself selects a shard of the examples."""
    return not source.on_host and _SHARDING_OP in _pipeline_ops(source)


def _batches(source: Source) -> Any:
    """Return the global batches that a source loads, or for process-local data, all rows of this process."""
    return source.elements.map(lambda *element: _load_batch(source, element))


def _load_batch(source: Source, element: tuple[Any, ...]) -> Any:
    packed = pack(element)
    return source.load(packed[0] if source.is_process_local else packed)


def stop_training_of(model: keras.Model, names: Sequence[str]) -> None:
    """Make layers compute as if not in training. Call it before a step is traced.

    Args:
        names: names of layers or classes, or paths of variables that a layer holds.
    """
    for part in layers_and_modules(model):
        named = not {type(part).__name__, getattr(part, "name", None), *other_paths(part)}.isdisjoint(names)
        if named and callable(part) and "training" in inspect.signature(getattr(part, "call", part)).parameters:
            insert_class(part, _NotInTraining)


class _NotInTraining:
    """Class inserted between a layer and its class: passes `training=False`."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        compute = getattr(self, "call", super().__call__)  # pyright: ignore[reportAttributeAccessIssue]
        at = list(inspect.signature(compute).parameters).index("training")
        return super().__call__(*args[:at], *args[at + 1 :], **{**kwargs, "training": False})  # pyright: ignore[reportAttributeAccessIssue]


def _is_embedding(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Embedding) and layer.trainable


def _seems_batch_norm(part: Any) -> bool:
    cls = type(part)
    return "batchnorm" in cls.__name__.lower().replace("_", "") and not cls.__module__.startswith("keras.")


def draws_random_numbers(layer: Any) -> bool:
    """Return whether a layer draws random numbers in training; a layer with a rate of 0 does not."""
    own = [value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator)]
    # a layer with a generator and no known rate is assumed to draw
    rates = [getattr(layer, name) for name in _RATES if isinstance(getattr(layer, name, None), int | float)]
    return bool(own or has_seed_generators(layer)) and (any(rates) or not rates)


def depends_on_other_rows(model: keras.Model, source: Source) -> str:
    """Return `model` or `loss` if its result for a batch does not follow from those for the batch's halves, else ""."""
    batch = next(iter(_batches(source)))
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    rows = int(num_rows(x))
    try:
        whole = model(x, training=False)
        halves = [model(slice_rows(x, *bounds), training=False) for bounds in _halves(rows)]
    except Exception:  # a model with its own step may have no forward pass, or take other inputs
        return ""
    for own, *parts in zip(tf.nest.flatten(whole), *map(tf.nest.flatten, halves), strict=True):
        if not np.allclose(own, np.concatenate(parts), rtol=_HALVES_TOLERANCE, atol=_HALVES_TOLERANCE):
            return "model"
    if not model.compiled or y is None or weights is not None:  # weighted losses are divided by the weights' sum
        return ""
    # regularization is added once per batch, so it must not be averaged over the halves
    own = sum(float(loss) for loss in model.losses)

    def loss_of(start: int, stop: int) -> float:
        target, predictions = (slice_rows(each, start, stop) for each in (y, whole))
        loss: Any = model.compute_loss(None, target, predictions, training=False)
        return float(loss) - own

    try:
        parts = [(stop - start, loss_of(start, stop)) for start, stop in _halves(rows)]
        # replicas compute both kinds of losses exactly
        mean, total = sum(number / rows * loss for number, loss in parts), sum(loss for _, loss in parts)
        is_either = np.isclose([mean, total], loss_of(0, rows), rtol=_HALVES_TOLERANCE, atol=_HALVES_TOLERANCE).any()
        return "" if is_either else "loss"
    except Exception:  # a model with its own step may compute losses in another way
        return ""


def _halves(rows: int) -> list[tuple[int, int]]:
    return [(0, rows // 2), (rows // 2, rows)] if rows > 1 else [(0, rows)]


def _overridden_step(config: RunConfig, model: keras.Model) -> str:
    if config.train.step is not None:
        return str(config.train.step)
    own = config.train.loop == "fit" and overrides_method(model, "train_step")
    return f"{type(model).__name__}.train_step" if own else ""


def _pipeline_ops(source: Source) -> set[str]:
    """Return the names of the operations in the pipeline's graph and in the graph that loads its batches."""
    spec = source.elements.element_spec
    # two graphs, because a graph of both would contain the loaded arrays as constants
    loading = tf.function(lambda *element: _load_batch(source, element)).get_concrete_function(*_as_arguments(spec))
    return operations(pipeline_graph(source.elements)) | operations(loading.graph.as_graph_def())


def _as_arguments(spec: Any) -> tuple[Any, ...]:
    """Return the arguments that `tf.data` calls a function with."""
    return spec if isinstance(spec, tuple) else (spec,)


class _RecordsNorms:
    """Class inserted between an optimizer and its class: records norms of gradients, after their sum over replicas."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        self._distlaunch_sparse_given |= any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if self._distlaunch_dense:
            grads = _dense(grads)
        # used twice, and may be an iterator
        trainable_variables = trainable_variables and list(trainable_variables)
        self._distlaunch_norms.assign(_norms(self, grads, trainable_variables or optimized(self)))
        return super().apply(grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Apply gradients and record their norms; a LossScaleOptimizer does not call its own `apply`."""
        trainable, slots = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]
        at = next(index for index, variable in enumerate(self.variables) if variable is self._distlaunch_norms)
        norms = _norms(self, grads, optimized(self))
        return trainable, [norms if index == at else value for index, value in enumerate(slots)]


def _dense(grads: list[Any]) -> list[Any]:
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def _norms(optimizer: Any, grads: Any, variables: Any) -> Any:
    """Return one norm for each variable of the optimizer; zero where there is no gradient."""
    found = {id(variable): gradient for variable, gradient in zip(variables, _dense(list(grads)), strict=True)}
    gradients = [found.get(id(variable)) for variable in optimized(optimizer)]
    squares = [
        ops.zeros((), "float32") if gradient is None else ops.sum(ops.square(ops.cast(gradient, "float32")))
        for gradient in gradients
    ]
    return ops.sqrt(ops.stack(squares)) if squares else ops.zeros((0,), "float32")


def watch_gradients(model: keras.Model) -> None:
    """Add a variable for the gradient norms to each optimizer.

    Call it under the strategy's scope, before its program is made.
    """
    for optimizer in optimizers_of(model):
        shape = (len(optimized(optimizer)),)
        # gradients are summed already, so all replicas hold the same value
        norms = optimizer.add_variable(shape, dtype="float32", aggregation="only_first_replica", name="gradient_norms")
        optimizer._distlaunch_norms = norms
        optimizer._distlaunch_dense = optimizer._distlaunch_sparse_given = False
        insert_class(optimizer, _RecordsNorms)


def had_sparse_gradients(model: keras.Model) -> bool:
    """Return whether a traced step had sparse gradients, such as those of embeddings."""
    return any(optimizer._distlaunch_sparse_given for optimizer in optimizers_of(model))


@contextlib.contextmanager
def dense_gradients(model: keras.Model) -> Iterator[None]:
    """Make all gradients dense, as on a mesh, for steps that are traced in this context."""
    for optimizer in optimizers_of(model):
        optimizer._distlaunch_dense = True
    try:
        yield
    finally:
        for optimizer in optimizers_of(model):
            optimizer._distlaunch_dense = False


def gradient_norms(model: keras.Model) -> list[float]:
    """Return the norm of each optimizer's last gradients."""
    return [float(np.linalg.norm(norms)) for norms in map(_last_norms, optimizers_of(model))]


def norms_by_variable(model: keras.Model) -> dict[str, float]:
    """Return the norm of the last gradient of each variable, by its path."""
    return {
        variable.path: float(norm)
        for optimizer in optimizers_of(model)
        for variable, norm in zip(optimized(optimizer), _last_norms(optimizer), strict=True)
    }


def _last_norms(optimizer: Any) -> np.ndarray:
    return np.asarray(host_value(optimizer._distlaunch_norms), np.float64)
