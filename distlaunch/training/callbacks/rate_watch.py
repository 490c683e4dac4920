"""Notices a callback that overwrites a learning rate which was changed for a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from distlaunch.patches.keras_private import learning_rate_of
from distlaunch.strategies.variables import host_value


class _Probe(keras.callbacks.Callback):
    """Looks at the learning rates after one callback was called."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def on_train_begin(self, logs: Any = None) -> None:
        self._look()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._look()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._look()


class RateWatch:
    """Reports the first callback that sets another learning rate before a step uses the new one.

    Args:
        rates: optimizers, each with the learning rate that it was given.
        report: called with what to tell the user.
    """

    def __init__(self, rates: Sequence[tuple[Any, float]], report: Callable[[str], None]) -> None:
        self._rates, self._report = list(rates), report

    def among(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[keras.callbacks.Callback]:
        """Return the callbacks in their order, each followed by a look at the learning rates."""
        for callback in callbacks:
            yield callback
            if self._rates:
                yield _Probe(lambda callback=callback: self._look(callback))

    def _look(self, callback: keras.callbacks.Callback) -> None:
        for index, (optimizer, rate) in reversed(list(enumerate(self._rates))):
            variable = learning_rate_of(optimizer)
            now = float(host_value(variable)) if isinstance(variable, keras.Variable) else None
            if now != rate:
                del self._rates[index]
                self._report(self._message(callback, rate, now))

    def step_done(self) -> None:
        """End the watch: what is set from now on follows training, and is no surprise."""
        self._rates.clear()

    def _message(self, callback: keras.callbacks.Callback, rate: float, now: float | None) -> str:
        other = "a schedule" if now is None else f"{now:g}"
        name = type(callback).__name__
        return f"{name} has overwritten the new learning rate {rate:g} with {other}; change the callback's settings"
