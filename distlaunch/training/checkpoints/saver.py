"""Writes checkpoints of a training run, with what its callbacks keep; puts that back."""

from __future__ import annotations

from dataclasses import replace

import keras

from distlaunch.base.errors import CheckpointWriteError
from distlaunch.base.events import CheckpointFailed, CheckpointSaved
from distlaunch.config.run import RunConfig
from distlaunch.strategies.protocol import State
from distlaunch.training.callbacks.keras_callbacks import (
    array_state,
    place_of,
    plain_state,
    restore_arrays,
    restore_state,
)
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checks.nonfinite import NonFinite, trained_names
from distlaunch.training.surroundings import Surroundings

CALLBACK = "callback/"
"""Names in checkpoints of arrays that callbacks hold begin so."""


class Saver:
    """What of a run is saved beside the program's state."""

    def __init__(
        self,
        config: RunConfig,
        model: keras.Model,
        callbacks: list[keras.callbacks.Callback],
        around: Surroundings,
        nonfinite: NonFinite,
    ) -> None:
        self._config, self._model, self._callbacks = config, model, callbacks
        self._around, self._nonfinite = around, nonfinite
        self._saved_step: int | None = None

    def save(self, state: State, progress: Progress, otherwise: str | None) -> None:
        """Writes a checkpoint.

        Args:
            otherwise: what then happens if it cannot be written; None: the run fails.

        Raises:
            CheckpointWriteError: it cannot be written, and nothing happens otherwise.
        """
        progress = replace(
            progress,
            callbacks=[plain_state(callback) for callback in self._callbacks],
            stop_training=bool(self._model.stop_training),
        )
        for index, callback in enumerate(self._callbacks):
            state.update({f"{CALLBACK}{index}/{name}": array for name, array in array_state(callback).items()})
        self._nonfinite.state(state, trained_names(self._model), progress.step)
        began = self._around.clock()
        try:
            path, num_bytes = self._around.store.save(state, progress, self._config.to_plain())
        except OSError as error:
            why = error.strerror or str(error)
            if otherwise is None:
                message = f"the last checkpoint, of step {progress.step}, cannot be written: {why}"
                raise CheckpointWriteError(f"{message}; make room, and resume the run") from None
            reason = f"not written: {why}; {otherwise}"
            self._around.emit(CheckpointFailed(step=progress.step, reason=reason))
            return
        seconds = self._around.clock() - began
        if progress.step == self._saved_step:
            return  # written anew with what callbacks or the end of an epoch have changed: no news to anyone
        self._saved_step = progress.step
        self._around.emit(CheckpointSaved(step=progress.step, path=str(path), num_bytes=num_bytes, seconds=seconds))

    def restore_callbacks(self, start: Progress, arrays: State) -> None:
        """Puts back what a checkpoint holds of the callbacks, and the history."""
        for index, callback in enumerate(self._callbacks):
            place = place_of(callback, index)
            if place >= len(start.callbacks) or start.callbacks[place]["class"] != type(callback).__name__:
                continue  # the config has another there by now
            restore_state(callback, start.callbacks[place])
            prefix = f"{CALLBACK}{place}/"
            own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            restore_arrays(callback, own)
        history = self._model.history
        history.history = {name: list(values) for name, values in start.history.items()}
        history.epoch = list(range(start.epoch))
