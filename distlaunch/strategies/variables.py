"""Names for all variables of a model and its optimizers, the same under every strategy and in every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from distlaunch.strategies.parameter_server.partition import joined
from distlaunch.strategies.patches.keras_private import compiled_loss, compiled_metrics
from distlaunch.strategies.protocol import Logs, State, StateMismatchError


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, and others that the model holds as attributes (a GAN's second one)."""
    candidates = [getattr(model, "optimizer", None), *vars(model).values()]
    # by identity: the compiled optimizer may be an attribute, too
    found = {id(item): item for item in candidates if isinstance(item, keras.optimizers.Optimizer)}
    return list(found.values())


def chain(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those it wraps (LossScaleOptimizer)."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def slot_variables(model: keras.Model) -> list[Any]:
    """Variables of all its optimizers, those of the compiled one first."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def metric_variables(model: keras.Model) -> list[Any]:
    """Variables of the model's metrics, the loss tracker included."""
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


def loss_trackers(model: keras.Model) -> list[Any]:
    """Variables of the means that Keras keeps of the losses of single outputs; they do not weight by rows."""
    compiled = compiled_loss(model)
    return [] if compiled is None else list(compiled.variables)


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Results of the model's metrics, without compiled ones that no step has updated (a GAN's step may not)."""
    compiled = compiled_metrics(model)
    if compiled is None or compiled.built:
        return flat_logs(model.get_metrics_result())
    results = ((metric.name, metric.result()) for metric in model.metrics if metric is not compiled)
    return flat_logs(dict(results))


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs as Keras reports them: the entries of a mapping among the values stand in its place."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, Mapping) else {name: value})
    return flat


def state_variables(model: keras.Model) -> dict[str, Any]:
    """Weights, random seeds and optimizer variables by name; metrics are apart, since each replica has its own."""
    metrics = {id(variable) for variable in metric_variables(model)}
    named = dict(_named("model", (v for v in model.variables if id(v) not in metrics)))
    for index, optimizer in enumerate(optimizers_of(model)):
        prefix = "optimizer" if index == 0 else f"optimizer_{index}"
        named.update(_named(prefix, optimizer.variables))
    return named


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Metric variables by name."""
    return dict(_named("metric", metric_variables(model)))


def _named(prefix: str, variables: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    seen: dict[str, int] = {}
    for path, variable in joined(list(variables)):
        name = f"{prefix}/{path}"
        # paths may repeat: layers made by hand can share a name
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), variable


def host_value(variable: Any) -> np.ndarray:
    """A copy of a variable's value in this process's memory: no later step changes it."""
    value = variable.value
    # of a variable, `np.array` would make a copy of the copy that it asks for
    value = value.read_value() if hasattr(value, "read_value") else value
    return np.array(value)


def checked_value(name: str, variable: Any, state: State) -> np.ndarray:
    """The value that a snapshot has for a variable; raises StateMismatchError if it does not fit."""
    if name not in state:
        raise StateMismatchError(f"it has no variable '{name}'")
    if tuple(state[name].shape) != tuple(variable.shape):
        raise StateMismatchError(
            f"'{name}' was saved with shape {tuple(state[name].shape)}, and has {tuple(variable.shape)}"
        )
    return state[name]


def plain_logs(values: Mapping[str, Any]) -> Logs:
    """Values on the host: numbers as floats, others as arrays; the loss first, since JAX sorts by name."""
    logs: dict[str, Any] = {name: np.asarray(values[name]) for name in sorted(values, key=lambda name: name != "loss")}
    return {name: float(value) if value.size == 1 else value for name, value in logs.items()}


def has_own(model: keras.Model, name: str) -> bool:
    """Return True if the model's class has a method, such as `train_step`, other than Keras's."""
    return getattr(type(model), name) is not getattr(keras.Model, name)
