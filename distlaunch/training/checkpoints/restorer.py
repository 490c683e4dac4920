"""Finds the checkpoint to continue from, and gives it to all tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distlaunch.base.errors import CheckpointError
from distlaunch.base.events import (
    CheckpointFailed,
    Event,
    Notice,
    Restored,
)
from distlaunch.base.run_dir import BEST, BestName, RunDir
from distlaunch.config.differences import OF_THE_MODEL, differences
from distlaunch.config.references.moved import is_moved
from distlaunch.config.run import RunConfig
from distlaunch.strategies.final_weights import judged_by_averages
from distlaunch.strategies.protocol import Program, State, StateMismatchError, Strategy
from distlaunch.training.checkpoints.file_copy import FileCopy, this_host
from distlaunch.training.checkpoints.files import CheckpointStore, DamagedError, Saved
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checkpoints.shared_memory import SharedMemory


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
        self._memory: SharedMemory | None = None
        """The chief's, until all others have it from there."""
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
        hosts = self._strategy.gather(this_host())
        saved = None
        if self._strategy.is_chief:
            memory = self._new_memory if list(hosts.values()).count(this_host()) > 1 else lambda: None
            saved = self._store.load(step, memory()) if step is not None else self._newest(memory, archive=archive)
        # only training goes on from there, and archives
        progress = None if saved is None else self._continued(saved) if archive else saved.progress
        return self._share(saved, progress), saved.path if saved else None

    def _new_memory(self) -> SharedMemory | None:
        """For a state that processes of this host are to share, instead of the last one."""
        self._close_memory()
        if SharedMemory.is_possible():
            self._memory = SharedMemory()
        return self._memory

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _newest(self, memory: Callable[[], SharedMemory | None], *, archive: bool) -> Saved | None:
        """The newest good checkpoint; damaged ones are reported."""
        damaged: list[int] = []

        def pass_over(step: int, error: DamagedError) -> None:
            damaged.append(step)
            self._emit(CheckpointFailed(step=step, reason=str(error)))

        saved = self._store.newest_good(pass_over, memory, repairs=archive)
        if damaged and saved is not None:
            self._emit(Notice(level="warning", message=f"the checkpoint of step {saved.progress.step} is used instead"))
        # only training renames them: others may read beside a run
        for step in damaged if archive else ():
            self._store.archive(step)
        return saved

    def _share(self, saved: Saved | None, progress: Progress | None) -> Progress:
        """Tells every task what the chief has found."""
        self._saved = saved
        if saved is not None and saved.config["data"]["global_batch"] != self._config.data.global_batch:
            message = (
                "the global batch size has changed since the checkpoint: the order of examples differs from here on"
            )
            self._emit(Notice(level="warning", message=message))
        facts = {
            "progress": None if progress is None else progress.to_plain(),
            "changed": self._differences(saved) if saved else [],
            "copy": saved.copy.to_plain() if saved else None,
        }
        # also on the chief: all go on from what was read back from the same text
        received = json.loads(self._strategy.from_chief(json.dumps(facts).encode()))
        self._changed = received["changed"]
        self._copy = FileCopy.from_plain(received["copy"]) if received["copy"] else None
        progress = Progress() if received["progress"] is None else Progress.from_plain(received["progress"])
        self.restored_step = progress.step
        return progress

    def _differences(self, saved: Saved) -> list[str]:
        run = RunDir(self._store.directory.parent)
        now = self._config.to_public()
        return differences(saved.config, now, OF_THE_MODEL, lambda old, new: is_moved(old, new, run))

    def _continued(self, saved: Saved) -> Progress:
        """Return how far a checkpoint has come; if more epochs follow an early end, without what ended training."""
        progress = saved.progress
        if not progress.finished or self._config.train.epochs <= saved.config["train"]["epochs"]:
            return progress
        message = f"a callback ended training early, after epoch {progress.epoch}; with more epochs it continues as if "
        self._emit(Notice(level="info", message=f"{message}`fit` was called again: callbacks begin anew"))
        return replace(progress, finished=False, stop_training=False, callbacks=[])

    def take_state(self) -> State:
        """The state of the checkpoint that was found, in every task; every task must call it, and only once.

        Who can maps the chief's memory or reads its files; the others have it from the chief.
        """
        assert self._copy is not None, "a checkpoint was found"
        saved, self._saved = self._saved, None  # nothing keeps it while training goes on
        try:
            return self._strategy.state_from_chief(self._read_copy() if saved is None else saved.state)
        finally:
            self._close_memory()

    def _read_copy(self) -> State | None:
        assert self._copy is not None
        parts = self._strategy.parts()
        return self._copy.read(None if parts is None else parts.needed_blocks())

    def restore(self, program: Program, step: int | BestName | None) -> None:
        """Gives a program the state of a checkpoint; every task must call it.

        Args:
            step: as of `find`.
        """
        progress, path = self.find(step)
        if self._copy is None:
            raise CheckpointError(f"{self._store.directory}: there is no checkpoint that can be read")
        self.with_matching_state(lambda: program.restore(self.take_state()))
        if _shows_final_weights(progress, step):
            program.finalize()
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


def _shows_final_weights(progress: Progress, step: int | BestName | None) -> bool:
    """True if the checkpoint is used with the weights that its optimizer makes at the end of training.

    The best epoch, and any step before the end, have what validation judged.
    """
    if step == BEST or progress.final_weights is None:
        return judged_by_averages(progress.callbacks)
    return progress.final_weights
