"""Names for all variables of a model and its optimizers, the same under every strategy and in every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, and others that the model holds as attributes (a GAN's second one)."""
    candidates = [getattr(model, "optimizer", None), *vars(model).values()]
    found = {id(item): item for item in candidates if isinstance(item, keras.optimizers.Optimizer)}
    return list(found.values())


def metric_variables(model: keras.Model) -> list[Any]:
    """Variables of the model's metrics, the loss tracker included."""
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


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
    for variable in variables:
        name = f"{prefix}/{variable.path}"
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), variable
