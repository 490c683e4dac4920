"""Names for all variables of a model and its optimizers, the same under every strategy and in every process."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.patches.keras_private import compiled_loss, compiled_metrics, value_of
from distlaunch.strategies.parameter_server.partition import is_split, join_shards
from distlaunch.strategies.protocol import Logs
from distlaunch.strategies.state import State, StateMismatchError

WEIGHTS, SLOTS, PLAIN = "model", "optimizer", "attribute"
"""First words of variables' names: those of layers, of optimizers, and plain variables."""
_NO_NUMBERS = (tf.string, tf.resource, tf.variant, "string")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, tf.Tensor, tf.DType)
_CLOSED = frozenset({*sys.stdlib_module_names, "keras", "tensorflow", "jax", "jaxlib", "numpy"})
"""Packages whose objects contain no parts of the model, except layers, modules and containers."""

Found = tuple[str, Any]
"""The attributes that lead to an object, joined by `/`, and the object."""


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the compiled optimizer, then the others that the model holds at any depth (a GAN's second one)."""
    found = [part for _, part in _found_in(model) if isinstance(part, keras.optimizers.Optimizer)]
    compiled = getattr(model, "optimizer", None)
    if isinstance(compiled, keras.optimizers.Optimizer):
        found.insert(0, compiled)
    # by identity: the compiled optimizer is an attribute, too, and wrapped optimizers are left out
    wrapped = {id(part) for optimizer in found for part in list(chain(optimizer))[1:]}
    return list({id(optimizer): optimizer for optimizer in found if id(optimizer) not in wrapped}.values())


def chain(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and those it wraps (LossScaleOptimizer, MultiOptimizer)."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", ())]:
        yield from chain(part)


def slot_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all its optimizers, those of the compiled one first."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the variables of the model's metrics, including the loss tracker."""
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


def loss_trackers(model: keras.Model) -> list[Any]:
    """Return the variables of Keras's mean losses of single outputs, which are not weighted by rows."""
    compiled = compiled_loss(model)
    return [] if compiled is None else list(compiled.variables)


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of the model's metrics, except compiled ones that no step has updated (a GAN's may not)."""
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
    """Return weights, random seeds and optimizer variables by name, without metrics, which each replica has."""
    metrics = {id(variable) for variable in metric_variables(model)}
    named = dict(_named(WEIGHTS, (v for v in model.variables if id(v) not in metrics)))
    for prefix, optimizer in named_optimizers(model).items():
        named.update(_named(prefix, optimizer.variables))
    return named


def named_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return all optimizers, by the first word of the names of their variables."""
    return {(SLOTS if not index else f"{SLOTS}_{index}"): one for index, one in enumerate(optimizers_of(model))}


def plain_variables(model: keras.Model) -> dict[str, Any]:
    """Return variables by name that Keras does not list: TensorFlow's own, and those in the user's objects."""
    listed = [*model.variables, *slot_variables(model), *metric_variables(model)]
    known = {id(one) for one in listed} | {id(value_of(one)) for one in listed if isinstance(one, keras.Variable)}
    named: dict[str, Any] = {}
    for path, variable in _found_in(model):
        if isinstance(variable, keras.optimizers.Optimizer) or id(variable) in known or variable.dtype in _NO_NUMBERS:
            continue
        # its shards are listed instead
        if isinstance(variable, keras.Variable) and is_split(variable):
            continue
        known.add(id(variable))
        named[_unique(f"{PLAIN}/{path}", named)] = variable
    return named


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Return metric variables by name."""
    return dict(_named("metric", metric_variables(model)))


def _named(prefix: str, variables: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for path, variable in join_shards(list(variables)):
        # paths may repeat: layers made by hand can share a name
        name = _unique(f"{prefix}/{path}", seen)
        seen.add(name)
        yield name, variable


def _unique(name: str, taken: Collection[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    return found


def host_value(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value in host memory, which no later step changes."""
    if isinstance(variable, tf.Variable):
        return np.array(tf.convert_to_tensor(variable))
    value = variable.value
    # `np.array(variable)` would copy twice
    value = value.read_value() if hasattr(value, "read_value") else value
    return np.array(value)


def plain_state(model: keras.Model) -> State:
    """Return copies of the values of `plain_variables`."""
    return {name: host_value(variable) for name, variable in plain_variables(model).items()}


def restore_plain(model: keras.Model, state: State) -> None:
    """Restore the values of `plain_state`.

    Raises:
        StateMismatchError: a value is missing.
    """
    for name, variable in plain_variables(model).items():
        variable.assign(checked_value(name, variable, state))


@contextmanager
def keep_plain_values(model: keras.Model) -> Iterator[None]:
    """Restore the values of `plain_variables` afterwards: a trial step really assigns them."""
    before = [(variable, host_value(variable)) for variable in plain_variables(model).values()]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def saved_values(model: keras.Model, state: State) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield each variable of `state_variables` with its value in a snapshot.

    An optimizer's variable that the snapshot does not contain keeps its initial value.

    Raises:
        StateMismatchError: the snapshot and the model differ in a weight, or in a plain variable.
    """
    variables = state_variables(model)
    known = {*variables, *plain_variables(model)}
    for name in state:
        # layers that draw random numbers may be removed; their seeds are not weights
        if name.startswith((f"{WEIGHTS}/", f"{PLAIN}/")) and name not in known and not is_seed(name):
            raise StateMismatchError(f"it has the variable '{name}', which the model does not have")
    for name, variable in variables.items():
        if name in state or not is_slot(name):
            yield variable, checked_value(name, variable, state)


def is_slot(name: str) -> bool:
    """Return whether a name of `state_variables` is that of an optimizer's variable."""
    return name.startswith(SLOTS)


def is_seed(name: str) -> bool:
    """Return whether a name of `state_variables` is that of the state of a random number generator."""
    return name.rpartition("/")[2].startswith("seed_generator_state")


def checked_value(name: str, variable: Any, state: State) -> np.ndarray:
    """Return the value of a variable in a snapshot.

    Raises:
        StateMismatchError: the snapshot has no such variable, or its shape differs.
    """
    if name not in state:
        raise StateMismatchError(f"it has no variable '{name}'")
    if tuple(state[name].shape) != tuple(variable.shape):
        raise StateMismatchError(
            f"'{name}' was saved with shape {tuple(state[name].shape)}, but now has {tuple(variable.shape)}"
        )
    return state[name]


def plain_logs(values: Mapping[str, Any]) -> Logs:
    """Return values on the host: numbers as floats, others as arrays; the loss first, since JAX sorts by name."""
    logs: dict[str, Any] = {name: np.asarray(values[name]) for name in sorted(values, key=lambda name: name != "loss")}
    return {name: float(value) if value.size == 1 else value for name, value in logs.items()}


def overrides_method(model: keras.Model, name: str) -> bool:
    """Return whether the model's class overrides a method of Keras, such as `train_step`."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def _found_in(model: keras.Model) -> Iterator[Found]:
    """Yield each optimizer and variable that a model holds, once, in the order of its attributes, at any depth.

    Keras finds neither optimizers other than the compiled one nor plain TensorFlow variables, which a model may keep as
    attributes, in lists and dicts, in nested layers and models, or in objects of the user's classes.

    A layer's path starts with its name, since the same layer can have several places in a model.
    """
    seen: set[int] = set()
    # a stack instead of recursion: models may be deep
    waiting: list[Found] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.random.SeedGenerator):
            value = value.state
        if isinstance(value, (keras.optimizers.Optimizer, keras.Variable, tf.Variable)):
            yield path, value
        waiting.extend(reversed(list(_within(path, value))))


def _within(path: str, value: Any) -> Iterator[Found]:
    if isinstance(value, (keras.Variable, tf.Variable, keras.metrics.Metric)):
        return
    if isinstance(value, dict):
        yield from ((_joined(path, str(key)), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((_joined(path, str(index)), inner) for index, inner in enumerate(value))
    elif _is_open(value):
        start = value.name if isinstance(value, keras.Layer) and path else path
        # public attributes come first, so that paths do not go through Keras's own lists
        for name, inner in sorted(vars(value).items(), key=lambda item: item[0].startswith("_")):
            if not name.startswith(("_self_", "_tracker", "_distlaunch")):
                yield _joined(start, name), inner


def _is_open(value: Any) -> bool:
    """Return whether the attributes of an object may hold parts of the model."""
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, tf.Module, types.SimpleNamespace)):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    root = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and root not in _CLOSED


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
