"""Finds the checkpoint to continue from, and restores it in all tasks."""

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
from distlaunch.checkpoints.distribution import CheckpointLocation, ChiefState, share_state, this_host
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.state_files import FileDamagedError
from distlaunch.checkpoints.store import CheckpointStore, DamagedError, Saved
from distlaunch.config.differences import OF_THE_MODEL, OF_THE_ORDER, differences
from distlaunch.config.references.moved import is_moved
from distlaunch.config.run import RunConfig
from distlaunch.strategies.final_weights import validated_with_averages
from distlaunch.strategies.protocol import Program, Strategy
from distlaunch.strategies.state import State, StateMismatchError


class Restorer:
    """Reads the checkpoints of a run in one of its tasks.

    Call `find` first, and then `take_state` if a checkpoint was found.

    Attributes:
        restored_step: step of the checkpoint that was found last.
    """

    def __init__(
        self, config: RunConfig, strategy: Strategy, store: CheckpointStore, emit: Callable[[Event], None]
    ) -> None:
        self._config, self._strategy, self._store, self._emit = config, strategy, store, emit
        self.restored_step = 0
        self._location: CheckpointLocation | None = None
        self._chief: ChiefState | None = None
        """State in the chief, until `take_state` returns it."""
        self._changed: list[str] = []
        """Changes of the config that affect the model and were made since the checkpoint."""

    def find(self, step: int | BestName | None = None, *, archive: bool = False) -> tuple[Progress, Path | None]:
        """Return the progress of the checkpoint that the chief chooses. Every task must call this.

        Args:
            step: step of the checkpoint, `best` for the best epoch, or None for the newest good one.
            archive: whether to continue training from the checkpoint, and to rename damaged ones.

        Returns:
            The progress, and on the chief the path. Without a checkpoint, the progress is that of a new run.
        """
        hosts = list(self._strategy.gather(this_host()).values())
        self._close()
        saved = None
        if self._strategy.is_chief:
            self._chief = ChiefState(on_this_host=hosts.count(this_host()) > 1)
            try:
                if step is not None:
                    saved = self._store.load(step, self._chief.read)
                else:
                    saved = self._newest(self._chief, archive=archive)
            except BaseException:
                self._close()
                raise
        # `archive` is set only if training continues from the checkpoint
        progress = None if saved is None else self._continued(saved) if archive else saved.progress
        return self._share(saved, progress), saved.path if saved else None

    def _close(self) -> None:
        chief, self._chief = self._chief, None
        if chief is not None:
            chief.close()

    def _newest(self, chief: ChiefState, *, archive: bool) -> Saved | None:
        """Return the newest good checkpoint, or None. Report damaged ones, and rename them if `archive` is set."""
        damaged: list[int] = []

        def pass_over(step: int, error: DamagedError) -> None:
            damaged.append(step)
            self._emit(CheckpointFailed(step=step, reason=str(error)))

        saved = self._store.newest_good(pass_over, chief.read, repairs=archive)
        if damaged and saved is not None:
            self._emit(Notice(level="warning", message=f"the checkpoint of step {saved.progress.step} is used instead"))
        # only training renames checkpoints, because other commands may be reading them while a run is active
        for step in damaged if archive else ():
            self._store.archive(step)
        return saved

    def _share(self, saved: Saved | None, progress: Progress | None) -> Progress:
        """Send the chief's findings to all tasks, and return the progress in each of them."""
        location = None if saved is None or self._chief is None else self._chief.location
        facts = {
            "progress": None if progress is None else progress.to_plain(),
            "changed": self._differences(saved, OF_THE_MODEL) if saved else [],
            "location": location.to_plain() if location else None,
        }
        # the chief uses the text too, so that all tasks have the same values
        received = json.loads(self._strategy.from_chief(json.dumps(facts).encode()))
        self._changed = received["changed"]
        self._location = CheckpointLocation.from_plain(received["location"]) if received["location"] else None
        progress = Progress() if received["progress"] is None else Progress.from_plain(received["progress"])
        self.restored_step = progress.step
        return progress

    def _differences(self, saved: Saved, keys: tuple[str, ...]) -> list[str]:
        run = RunDir(self._store.directory.parent)
        now = self._config.to_public()
        return differences(saved.config, now, keys, lambda old, new: is_moved(old, new, run))

    def _continued(self, saved: Saved) -> Progress:
        """Return the progress of a checkpoint from which training continues, and warn of another order of the data.

        If a callback has ended training early and the config now asks for more epochs, leave out the callbacks' state.
        """
        progress = saved.progress
        if changed := self._differences(saved, OF_THE_ORDER):
            message = f"the order of the following examples differs, because of changed settings: {', '.join(changed)}"
            self._emit(Notice(level="warning", message=message))
        if not progress.finished or self._config.train.epochs <= saved.config["train"]["epochs"]:
            return progress
        message = f"a callback ended training early, after epoch {progress.epoch}; training continues like "
        self._emit(Notice(level="info", message=f"{message}a second call of `fit`, with new callbacks"))
        return replace(progress, finished=False, stop_training=False, callbacks=[])

    def take_state(self) -> State:
        """Return the state of the checkpoint that was found. Every task must call this, and only once."""
        assert self._location is not None, "a checkpoint was found"
        parts = self._strategy.parts()
        needed = None if parts is None or self._chief is not None else parts.needed_blocks()
        try:
            return share_state(self._strategy, self._location, self._chief, needed)
        except FileDamagedError as error:
            raise DamagedError(f"{self._location.folder}: damaged while it was sent by the chief: {error}") from None
        finally:
            self._close()  # frees the memory

    def restore(self, program: Program, step: int | BestName | None) -> None:
        """Restore the state of a checkpoint in a program. Every task must call this.

        Args:
            step: see `find`.
        """
        progress, path = self.find(step)
        if self._location is None:
            raise CheckpointError(f"{self._store.directory}: there is no checkpoint that can be read")
        self.with_matching_state(lambda: program.restore(self.take_state()))
        if _shows_final_weights(progress, step):
            program.finalize()
        if path is not None:
            self._emit(Restored(step=progress.step, epoch=progress.epoch, path=str(path)))

    def with_matching_state(self, action: Callable[[], Any]) -> Any:
        """Run an action, and raise CheckpointError with the reason if the state does not match the model."""
        try:
            return action()
        except StateMismatchError as error:
            message = f"the checkpoint of step {self.restored_step:,} does not fit this model: {error}"
            raise CheckpointError(f"{message}; {self._why_changed()}") from None

    def _why_changed(self) -> str:
        hint = "undo the change, or start a new run"
        if self._changed:
            return f"the config has changed since in {', '.join(self._changed)}; {hint}"
        model = self._config.model.function
        return f"the config has not changed, so {model}, or a file that it reads, must have changed; {hint}"


def _shows_final_weights(progress: Progress, step: int | BestName | None) -> bool:
    """Return whether to use the checkpoint with the final weights that its optimizer computes.

    For the best epoch, and for any step before the end, use the weights with which the checkpoint was validated.
    """
    if step == BEST or progress.final_weights is None:
        return validated_with_averages(progress.callbacks)
    return progress.final_weights
