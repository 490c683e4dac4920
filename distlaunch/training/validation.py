"""Validation while training: after which epochs, on what, and with which callbacks around its batches."""

from __future__ import annotations

from collections.abc import Callable

import keras

from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Source
from distlaunch.data.examples.example_times import left_out
from distlaunch.data.source import Split
from distlaunch.strategies.protocol import BatchHooks, Logs, Program, Vote
from distlaunch.training.callbacks.keras_callbacks import watch_test_batches


class Validation:
    """The evaluations of one training run.

    Args:
        split: None: there is none.
        callbacks: those of this task.
        should_stop: whether this process was asked to stop.
        hook: calls the callbacks: the name of a hook without `on_`, and its arguments.
    """

    def __init__(self, config: RunConfig, program: Program, split: Split | None,
                 callbacks: list[keras.callbacks.Callback], should_stop: Callable[[], bool],
                 hook: Callable[..., None]) -> None:  # fmt: skip
        self._config, self._program, self._split = config, program, split
        self._callbacks, self._should_stop, self._hook = callbacks, should_stop, hook
        self._source: Source | None = None

    @property
    def has_data(self) -> bool:
        return self._split is not None

    def after_epoch(self, epoch: int) -> Logs | None:
        """Its logs, {} if none is due after this epoch (from 0), None if asked to stop."""
        section = self._config.validation
        last = epoch + 1 == self._config.train.epochs
        if self._split is None or section is None or not ((epoch + 1) % section.every_epochs == 0 or last):
            return {}
        self._hook("test_begin")
        self._source = self._source or self._split.evaluation_source()
        # reading the validation data must not count among the times of the training data's examples
        with left_out():
            logs = self._program.evaluate(self._source, section.steps, self._should_stop, self._batch_hooks())
        if logs is not None:
            self._hook("test_end", logs)
        return logs

    def _batch_hooks(self) -> BatchHooks | None:
        """For callbacks of any task that want to be called around the batches of validation."""
        # of all tasks alike, so none of them waits in `agree`
        if not self._config.train.callbacks:
            return None
        mine = watch_test_batches(self._callbacks)
        # with hooks each batch is a call of its own, which all tasks must make
        if not self._program.agree(Vote(finish=mine)).finish:
            return None
        return BatchHooks(
            begin=lambda batch: self._hook("test_batch_begin", batch),
            end=lambda batch, logs: self._hook("test_batch_end", batch, logs),
        )
