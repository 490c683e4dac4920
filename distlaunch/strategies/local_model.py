"""Prediction and evaluation of a model in a single process, as a callback expects, under any training strategy.

Keras's `predict` and `evaluate` would use the model's strategy and wait for the other processes, which do not make the
same call. Metrics use separate variables here, so that the metrics of training do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import UsageError
from distlaunch.patches.keras_alone import Functions, alone
from distlaunch.patches.keras_private import replaced_values
from distlaunch.patches.tensorflow_late import is_a, tf
from distlaunch.strategies.variables import metric_variables

METHODS = ("predict", "evaluate", "predict_on_batch", "test_on_batch")


class LocalModel:
    """Replaces variables of a model while it computes in one process.

    Args:
        weights: variables that a single process may be unable to read; other weights are used as they are.
        copy: returns the whole value of a variable in `weights`, or None if other processes hold parts of it.
        make: returns a process-local value for a Keras variable, from an array.
    """

    def __init__(
        self,
        model: keras.Model,
        weights: Sequence[Any] = (),
        copy: Callable[[Any], np.ndarray | None] = lambda variable: None,
        make: Callable[[np.ndarray], Any] = lambda value: tf.Variable(tf.constant(value)),
    ) -> None:
        self._model, self._make = model, make
        self._weights, self._copy = list(weights), copy
        self._values: dict[int, Any] = {}
        self._functions: Functions = {}
        self._is_active = False
        self._gathered: Mapping[int, np.ndarray] = {}

    @contextmanager
    def with_gathered_weights(self, values: Mapping[int, np.ndarray]) -> Iterator[None]:
        """Use these gathered values of weights in this context.

        Args:
            values: whole values of weights that are split over processes, by the `id` of the variable.
        """
        self._gathered = values
        try:
            yield
        finally:
            self._gathered = {}

    @contextmanager
    def in_one_process(self) -> Iterator[None]:
        """Make the model compute in this process only, in this context."""
        if self._is_active:
            yield
            return
        metrics = metric_variables(self._model)
        replaced = {id(variable): variable for variable in [*self._weights, *metrics]}
        known = {id(variable) for variable in metrics}
        for key, variable in replaced.items():
            # metrics may start with any value, because they are reset before they are used
            value = np.zeros(tuple(variable.shape), variable.dtype) if key in known else self._full_value(variable)
            kept: Any = self._values.get(key)
            if is_a(kept, "Variable"):
                kept.assign(value)  # not replaced, because functions traced earlier refer to it
            else:
                self._values[key] = self._make(value)
        self._is_active = True
        try:
            values = (self._values[key] for key in replaced)
            with replaced_values(replaced.values(), values), alone(self._model, self._functions):
                yield
        finally:
            self._is_active = False

    def _full_value(self, variable: Any) -> np.ndarray:
        value = self._gathered.get(id(variable))
        if value is None:
            value = self._copy(variable)
        if value is None:
            message = f"a callback predicts or evaluates, but other processes hold parts of '{variable.path}'"
            raise UsageError(
                f"{message}; use an epoch hook such as on_epoch_end, before which the processes gather the weights"
            )
        return value
