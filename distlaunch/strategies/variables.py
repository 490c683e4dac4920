"""Names of all variables of a model and its optimizers, the same under every strategy and in every process."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from distlaunch.patches.keras_global_seed import GENERATOR
from distlaunch.patches.keras_private import compiled_loss, compiled_metrics, optimized, value_of
from distlaunch.patches.tensorflow_late import is_a, tf
from distlaunch.strategies.adapted_layers import adapted_state, restore_adapted, restore_constants
from distlaunch.strategies.parameter_server.partition import is_split, join_shards
from distlaunch.strategies.state import Logs, State, StateMismatchError

WEIGHTS, SLOTS, UNTRACKED = "model", "optimizer", "attribute"
"""First part of the names of layers' variables, optimizers' variables, and variables that Keras does not track."""
_NON_NUMERIC = ("string", "resource", "variant")
_LEAF_TYPES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic)
_OTHER_LIBRARIES = frozenset({*sys.stdlib_module_names, "keras", "tensorflow", "jax", "jaxlib", "numpy"})
"""Packages whose objects are not searched for parts of the model, except layers, modules and containers."""

NamedPart = tuple[str, Any]
"""Path of attributes that leads to an object, joined by `/`, and the object."""


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the compiled optimizer, then others that the model holds at any depth, such as a GAN's second one."""
    found = [part for _, part in _find_parts(model) if isinstance(part, keras.optimizers.Optimizer)]
    compiled = getattr(model, "optimizer", None)
    if isinstance(compiled, keras.optimizers.Optimizer):
        found.insert(0, compiled)
    # each optimizer once, by identity, without those that another one wraps
    wrapped = {id(part) for optimizer in found for part in list(with_wrapped_optimizers(optimizer))[1:]}
    return list({id(optimizer): optimizer for optimizer in found if id(optimizer) not in wrapped}.values())


def with_wrapped_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and those it wraps (LossScaleOptimizer, MultiOptimizer)."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", ())]:
        yield from with_wrapped_optimizers(part)


def slot_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all optimizers of a model, those of the compiled one first."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the variables of the model's metrics, including the loss tracker."""
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


def loss_trackers(model: keras.Model) -> list[Any]:
    """Return the variables of Keras's mean losses of each output, which are not weighted by rows."""
    compiled = compiled_loss(model)
    return [] if compiled is None else list(compiled.variables)


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of the model's metrics, without compiled metrics that the model's step never updates."""
    compiled = compiled_metrics(model)
    if compiled is None or compiled.built:
        return flat_logs(model.get_metrics_result())
    results = ((metric.name, metric.result()) for metric in model.metrics if metric is not compiled)
    return flat_logs(dict(results))


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs as Keras reports them: a nested mapping is replaced by its entries."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, Mapping) else {name: value})
    return flat


def state_variables(model: keras.Model) -> dict[str, Any]:
    """Return weights, random seeds and optimizer variables by name; metrics differ by replica and are not included."""
    metrics = {id(variable) for variable in metric_variables(model)}
    named = dict(_named(WEIGHTS, (v for v in model.variables if id(v) not in metrics)))
    numbers = _numbers_of_equal_paths(model)
    for prefix, optimizer in named_optimizers(model).items():
        named.update(_named_slots(prefix, optimizer, numbers))
    return named


def named_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return all optimizers, by the first part of the names of their variables."""
    return {(SLOTS if not index else f"{SLOTS}_{index}"): one for index, one in enumerate(optimizers_of(model))}


def untracked_variables(model: keras.Model) -> dict[str, Any]:
    """Return variables by name that Keras does not track: TensorFlow variables, and those in the user's objects."""
    listed = [*model.variables, *slot_variables(model), *metric_variables(model)]
    known = {id(one) for one in listed} | {id(value_of(one)) for one in listed if isinstance(one, keras.Variable)}
    named: dict[str, Any] = {}
    for path, variable in _find_parts(model):
        if (
            isinstance(variable, keras.optimizers.Optimizer)
            or id(variable) in known
            or _dtype_name(variable) in _NON_NUMERIC
        ):
            continue
        # the shards of this variable are found separately
        if isinstance(variable, keras.Variable) and is_split(variable):
            continue
        known.add(id(variable))
        named[_unique(f"{UNTRACKED}/{path}", named)] = variable
    return named


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Return metric variables by name."""
    return dict(_named("metric", metric_variables(model)))


def _named(prefix: str, variables: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for path, variable in join_shards(list(variables)):
        # two layers may have the same name, and so the same path
        name = _unique(f"{prefix}/{path}", seen)
        seen.add(name)
        yield name, variable


def _numbers_of_equal_paths(model: keras.Model) -> dict[int, int]:
    """Return the numbers of weights that share their path in the names of slots, by `id`; see `slot_stem`."""
    found: dict[str, list[int]] = {}
    for weight in model.weights:
        found.setdefault(slot_stem(weight.path), []).append(id(weight))
    return {weight: number for same in found.values() if len(same) > 1 for number, weight in enumerate(same, 1)}


def slot_stem(path: str) -> str:
    """Return the text that the names of slots have for a weight: `adam/dense_kernel_momentum` for `dense/kernel`."""
    return path.replace("/", "_")


def _named_slots(prefix: str, optimizer: Any, numbers: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of an optimizer by name. Slots have the numbers of their weights.

    Numbers that are counted among the slots would change if one of the weights were frozen.
    """
    stems: dict[str, list[int]] = {}
    for part in with_wrapped_optimizers(optimizer):
        for weight in optimized(part) if part.built and numbers else ():
            if id(weight) in numbers:
                stems.setdefault(f"{part.name}/{slot_stem(weight.path)}_", []).append(numbers[id(weight)])
    if not stems:
        yield from _named(prefix, optimizer.variables)
        return
    slots: dict[str, list[Any]] = {}
    for path, variable in join_shards(list(optimizer.variables)):
        slots.setdefault(path, []).append(variable)
    for path, same in slots.items():
        # the longest, since `b_a_kernel_` also begins with `b_a_`
        stem = max((stem for stem in stems if path.startswith(stem)), key=len, default="")
        own = stems.get(stem, [])
        # an optimizer keeps slots in the order of its weights, and for all weights of a shape or for none
        counted = own if len(own) == len(same) else range(1, len(same) + 1)
        for number, variable in zip(counted, same, strict=True):
            yield (f"{prefix}/{path}" if number == 1 else f"{prefix}/{path}#{number}"), variable


def _unique(name: str, taken: Collection[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found


def host_value(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value in host memory, which no later step changes."""
    if is_a(variable, "Variable"):
        return np.array(tf.convert_to_tensor(variable))
    value = variable.value
    # `np.array(variable)` would copy twice
    value = value.read_value() if hasattr(value, "read_value") else value
    return np.array(value)


def untracked_state(model: keras.Model) -> State:
    """Return copies of the values of `untracked_variables`, and `adapted_state`."""
    values = {name: host_value(variable) for name, variable in untracked_variables(model).items()}
    return {**values, **adapted_state(model)}


def placed_variables(model: keras.Model) -> dict[str, Any]:
    """Return `state_variables` without Keras's global generator, which every model has, whether it draws or not."""
    return {name: each for name, each in state_variables(model).items() if name != f"{WEIGHTS}/{GENERATOR}"}


@contextmanager
def preserve_untracked(model: keras.Model) -> Iterator[None]:
    """Restore the values of `untracked_variables` after the context, in which a trial step may assign them."""
    before = [(variable, host_value(variable)) for variable in untracked_variables(model).values()]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def restore_variables(
    model: keras.Model, state: State, assign: Callable[[Any, np.ndarray], None] = lambda one, value: one.assign(value)
) -> None:
    """Restore the variables of a snapshot, except metrics, and the values of adapted layers.

    Call this before a step is traced, because adapted layers compute with constants.

    Args:
        assign: sets the value of a variable that Keras tracks.

    Raises:
        StateMismatchError: see `saved_values` and `restore_adapted`, or a value of `untracked_state` is missing.
    """
    restore_adapted(model, state)
    restored: dict[int, np.ndarray] = {}
    for variable, value in saved_values(model, state):
        assign(variable, value)
        restored[id(variable)] = value
    for name, variable in untracked_variables(model).items():
        variable.assign(checked_value(name, variable, state))
    restore_constants(model, restored)


def saved_values(model: keras.Model, state: State) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield each variable of `state_variables` with its value in a snapshot.

    Variables of optimizers and random seeds that the snapshot does not contain are skipped, and keep their initial
    values.

    Raises:
        StateMismatchError: the snapshot and the model differ in a weight, or in a variable that Keras does not track.
    """
    variables = state_variables(model)
    known = {*variables, *untracked_variables(model)}
    for name in state:
        # seeds may be missing on either side, so that random layers such as Dropout can be added and removed
        if name.startswith((f"{WEIGHTS}/", f"{UNTRACKED}/")) and name not in known and not is_seed(name):
            raise StateMismatchError(f"it has the variable '{name}', which the model does not have")
    for name, variable in variables.items():
        if name in state or not (is_slot(name) or is_seed(name)):
            yield variable, checked_value(name, variable, state)


def is_slot(name: str) -> bool:
    """Return whether a name in `state_variables` belongs to a variable of an optimizer."""
    return name.startswith(SLOTS)


def is_seed(name: str) -> bool:
    """Return whether a name in `state_variables` belongs to the state of a random number generator."""
    return name.rpartition("/")[2].startswith("seed_generator_state")


def checked_value(name: str, variable: Any, state: State) -> np.ndarray:
    """Return the value of a variable in a snapshot.

    Raises:
        StateMismatchError: the snapshot has no such variable, or its shape differs.
    """
    if name not in state:
        raise StateMismatchError(f"it does not have the variable '{name}'")
    if tuple(state[name].shape) != tuple(variable.shape):
        raise StateMismatchError(
            f"'{name}' was saved with shape {tuple(state[name].shape)}, but now has {tuple(variable.shape)}"
        )
    return state[name]


def logs_to_host(values: Mapping[str, Any]) -> Logs:
    """Return values as floats, or as arrays if they have several elements; the loss first, because JAX sorts names."""
    logs: dict[str, Any] = {name: np.asarray(values[name]) for name in sorted(values, key=lambda name: name != "loss")}
    # `item`, since the result of a metric such as F1Score may have the shape [1]
    return {name: float(value.item()) if value.size == 1 else value for name, value in logs.items()}


def overrides_method(model: keras.Model, name: str) -> bool:
    """Return whether a model's class overrides a method of Keras, such as `train_step`, or whether one is set on it."""
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def may_return_more(model: keras.Model, step: str) -> bool:
    """Return whether a step of a model, by the method's name, may return anything other than the model's metrics."""
    return overrides_method(model, step) or overrides_method(model, "compute_metrics")


def _dtype_name(variable: Any) -> str:
    """Return the name of a variable's dtype, which is a string on Keras's variables."""
    return getattr(variable.dtype, "name", variable.dtype)


def _find_parts(model: keras.Model) -> Iterator[NamedPart]:
    """Yield each optimizer and variable that a model holds, once, in the order of its attributes, at any depth.

    Keras itself finds only the compiled optimizer, and no TensorFlow variables. A model may keep them as attributes, in
    lists and dicts, in nested layers and models, or in objects of the user's classes.

    Paths within a layer start with the layer's name, because the same layer can be in several places of a model.
    """
    seen: set[int] = set()
    # a stack instead of recursion, because models may be nested deeply
    waiting: list[NamedPart] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _LEAF_TYPES) or is_a(value, "Tensor", "DType") or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.random.SeedGenerator):
            value = value.state
        if isinstance(value, (keras.optimizers.Optimizer, keras.Variable)) or is_a(value, "Variable"):
            yield path, value
        waiting.extend(reversed(list(_children(path, value))))


def _children(path: str, value: Any) -> Iterator[NamedPart]:
    if isinstance(value, (keras.Variable, keras.metrics.Metric)) or is_a(value, "Variable"):
        return
    if isinstance(value, dict):
        yield from ((_join_path(path, str(key)), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((_join_path(path, str(index)), inner) for index, inner in enumerate(value))
    elif _may_hold_parts(value):
        start = value.name if isinstance(value, keras.Layer) and path else path
        # public attributes first, so that paths do not contain Keras's private lists
        for name, inner in sorted(vars(value).items(), key=lambda item: item[0].startswith("_")):
            if not name.startswith(("_self_", "_tracker", "_distlaunch")):
                yield _join_path(start, name), inner


def _may_hold_parts(value: Any) -> bool:
    """Return whether the attributes of an object may hold parts of the model."""
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, types.SimpleNamespace)) or is_a(value, "Module"):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    root = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and root not in _OTHER_LIBRARIES


def _join_path(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
