"""Finds the checkpoint to go on from, and gives it to all tasks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
from distlaunch.strategies.protocol import Program, State, StateMismatchError, Strategy
from distlaunch.training.checkpoints.file_copy import Ahead, FileCopy, read_ahead
from distlaunch.training.checkpoints.files import CheckpointStore, DamagedError, Saved
from distlaunch.training.checkpoints.meta import Progress


class Restorer:
    """The checkpoints of a run, as one task of it reads them.

    First `find`, then `take_state` if that is not the beginning.

    Attributes:
        restored_step: of the checkpoint that was found last.
    """

    def __init__(
        self, config: RunConfig, strategy: Strategy, store: CheckpointStore, emit: Callable[[Event], None]
    ) -> None:
        self._config, self._strategy, self._store, self._emit = config, strategy, store, emit
        self.restored_step = 0
        self._saved: Saved | None = None
        """The chief's, until its state is taken."""
        self._copy: FileCopy | None = None
        self._ahead: Future[Ahead | None] | None = None
        self._changed: list[str] = []
        """What has changed in the config since that checkpoint, as far as it makes the model."""

    def find(self, step: int | BestName | None = None, *, archive: bool = False) -> tuple[Progress, Path | None]:
        """The checkpoint that the chief chooses, in every task; every task must call it.

        Args:
            step: of the checkpoint; `best`: that of the best epoch; None: the newest good one.
            archive: move damaged ones out of the way.

        Returns:
            How far it has come, and, on the chief, where it is; the beginning and None if there is no checkpoint.
        """
        saved = None
        if self._strategy.is_chief:
            saved = self._store.load(step) if step is not None else self._newest(archive=archive)
        else:
            self._read_ahead(step)
        return self._share(saved), saved.path if saved else None

    def _read_ahead(self, step: int | BestName | None) -> None:
        """While the chief verifies what it takes, this task reads what that will most likely be."""
        steps: list[int | BestName] = []
        with contextlib.suppress(OSError):  # a folder of the chief's host
            steps = [*self._store.steps()] if step is None else [step]
        if steps:
            thread = ThreadPoolExecutor(1, "read-ahead")
            self._ahead = thread.submit(read_ahead, self._store.state_path(steps[-1]))
            # returns at once; the thread ends when it has read
            thread.shutdown(wait=False)

    def _newest(self, *, archive: bool) -> Saved | None:
        """The newest good checkpoint; damaged ones are told of."""
        damaged: list[int] = []

        def pass_over(step: int, error: DamagedError) -> None:
            damaged.append(step)
            self._emit(CheckpointFailed(step=step, reason=str(error)))

        saved = self._store.newest_good(pass_over)
        if damaged and saved is not None:
            self._emit(Notice(level="warning", message=f"the checkpoint of step {saved.progress.step} is used instead"))
        # only training renames them: others may read beside a run
        for step in damaged if archive else ():
            self._store.archive(step)
        return saved

    def _share(self, saved: Saved | None) -> Progress:
        """Tells every task what the chief has found."""
        self._saved = saved
        if saved is not None and saved.config["data"]["global_batch"] != self._config.data.global_batch:
            message = (
                "the global batch size has changed since the checkpoint: the order of examples differs from here on"
            )
            self._emit(Notice(level="warning", message=message))
        told = {
            "progress": saved.progress.to_plain() if saved else None,
            "changed": differences(saved.config, self._config.to_plain(), OF_THE_MODEL) if saved else [],
            "copy": saved.copy.to_plain() if saved else None,
        }
        # also on the chief: all go on from what was read back from the same text
        received = json.loads(self._strategy.from_chief(json.dumps(told).encode()))
        self._changed = received["changed"]
        self._copy = FileCopy.from_plain(received["copy"]) if received["copy"] else None
        progress = Progress() if received["progress"] is None else Progress.from_plain(received["progress"])
        self.restored_step = progress.step
        return progress

    def take_state(self) -> State:
        """The state of the checkpoint that was found, in every task; every task must call it, and only once.

        Who can reads the chief's file; the others have it from the chief.
        """
        assert self._copy is not None, "a checkpoint was found"
        # nothing keeps them while training goes on
        (saved, self._saved), (ahead, self._ahead) = (self._saved, None), (self._ahead, None)
        return self._strategy.state_from_chief(
            saved.state if saved is not None else self._copy.read(None if ahead is None else ahead.result())
        )

    def restore(self, program: Program, step: int | BestName | None) -> None:
        """Gives a program the state of a checkpoint; every task must call it.

        Args:
            step: as of `find`.
        """
        progress, path = self.find(step)
        if self._copy is None:
            raise CheckpointError(f"{self._store.directory}: there is no checkpoint that can be read")
        self.with_matching_state(lambda: program.restore(self.take_state()))
        if path is not None:
            self._emit(Restored(step=progress.step, epoch=progress.epoch, path=str(path)))

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
