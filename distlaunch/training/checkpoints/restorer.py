"""Finds the checkpoint to go on from, and gives it to all tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distlaunch.base.errors import CheckpointError
from distlaunch.base.events import (
    CheckpointFailed,
    Event,
    Notice,
    Restored,
)
from distlaunch.base.run_dir import BestName
from distlaunch.config.differences import OF_THE_MODEL, differences
from distlaunch.config.run import RunConfig
from distlaunch.strategies import state_bytes
from distlaunch.strategies.protocol import Program, State, StateMismatchError, Strategy
from distlaunch.training.checkpoints.files import CheckpointStore, DamagedError, Saved
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checkpoints.saver import CALLBACK


class Restorer:
    """The checkpoints of a run, as one task of it reads them.

    Attributes:
        restored_step: of the checkpoint that was taken last.
    """

    def __init__(
        self, config: RunConfig, strategy: Strategy, store: CheckpointStore, emit: Callable[[Event], None]
    ) -> None:
        self._config, self._strategy, self._store, self._emit = config, strategy, store, emit
        self.restored_step = 0
        self._changed: list[str] = []
        """What has changed in the config since that checkpoint, as far as it makes the model."""

    def newest(self, *, archive: bool = False) -> Saved | None:
        """The newest good checkpoint; damaged ones are told of, and with `archive` moved out of the way."""
        damaged: list[int] = []

        def pass_over(step: int, error: DamagedError) -> None:
            damaged.append(step)
            self._emit(CheckpointFailed(step=step, reason=str(error)))

        saved = self._store.newest_good(pass_over)
        if damaged and saved is not None:
            self._emit(Notice(level="warning", message=f"the checkpoint of step {saved.progress.step} is used instead"))
        for step in damaged if archive else ():
            self._store.archive(step)
        return saved

    def progress_of(self, saved: Saved | None) -> Progress:
        """Where to start, as the chief found it."""
        if saved is not None and saved.config["data"]["global_batch"] != self._config.data.global_batch:
            message = (
                "the global batch size has changed since the checkpoint: the order of examples differs from here on"
            )
            self._emit(Notice(level="warning", message=message))
        told = {
            "progress": saved.progress.to_plain() if saved else None,
            "changed": differences(saved.config, self._config.to_plain(), OF_THE_MODEL) if saved else [],
        }
        received = json.loads(self._strategy.from_chief(json.dumps(told).encode()))
        self._changed = received["changed"]
        progress = Progress() if received["progress"] is None else Progress.from_plain(received["progress"])
        self.restored_step = progress.step
        return progress

    def callback_arrays(self, state: State | None) -> State:
        """What callbacks hold, as the chief's checkpoint has it."""
        mine = {name: value for name, value in (state or {}).items() if name.startswith(CALLBACK)}
        return state_bytes.from_bytes(self._strategy.from_chief(state_bytes.to_bytes(mine)))

    def restore(self, program: Program, step: int | BestName | None) -> None:
        """Gives a program the state of a checkpoint; every task must call it.

        Args:
            step: of the checkpoint; `best`: that of the best epoch; None: the newest good one.
        """
        saved = None
        if self._strategy.is_chief:
            saved = self._store.load(step) if step is not None else self.newest()
            if saved is None:
                raise CheckpointError(f"{self._store.directory}: there is no checkpoint that can be read")
        self.progress_of(saved)
        state: State | None = saved.state if saved else None
        self.with_matching_state(lambda: program.restore(state))
        if saved is not None:
            self._emit(Restored(step=saved.progress.step, epoch=saved.progress.epoch, path=str(saved.path)))

    def with_matching_state(self, action: Callable[[], Any]) -> Any:
        """Says why, if the state does not fit the model. Raises CheckpointError."""
        try:
            return action()
        except StateMismatchError as error:
            message = f"the checkpoint of step {self.restored_step:,} does not fit this model: {error}"
            raise CheckpointError(f"{message}; {self._why_changed()}") from None

    def _why_changed(self) -> str:
        hint = "go back to what it was, or start a new run"
        if self._changed:
            return f"changed in the config since: {', '.join(self._changed)}; {hint}"
        model = self._config.model.function
        return f"the config is what it was, so {model}, or what it reads, makes another model now; {hint}"
