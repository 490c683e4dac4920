"""The evaluator task: evaluates each new checkpoint of a run while training continues."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

from distlaunch.base.errors import CheckpointError, ConfigError, Problem
from distlaunch.base.event_files import EventReader, read_events_of
from distlaunch.base.events import Evaluated, Event, RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.config.cluster import Cluster
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import OneDeviceSection
from distlaunch.patches.tensorflow_late import tf
from distlaunch.training.session import Session

_CHECK_INTERVAL_S = 0.5


def evaluator_config(config: RunConfig) -> RunConfig:
    """Return the run's config for one device: an evaluator is not part of the training cluster."""
    return config.model_copy(update={"strategy": OneDeviceSection(kind="one_device"), "cluster": Cluster()})


class Evaluator:
    """Evaluates the checkpoints of a run as they are written.

    Args:
        session: built with `evaluator_config`.
        attempt: the attempt whose end is awaited.
        emit: called with the results.
    """

    def __init__(self, session: Session, run: RunDir, attempt: int, emit: Callable[[Event], None]) -> None:
        if session.validation is None:
            raise ConfigError(Problem(("cluster", "evaluator"), "there is no validation data to evaluate on"))
        self._session, self._run, self._attempt, self._emit = session, run, attempt, emit
        self._events, self._ended = EventReader(run.events), False
        self._evaluated = {step: session.store.values_id(step) for step in self._already_evaluated()}
        """The evaluated steps with the values of their checkpoints.

        A step gets other values if a callback sets other weights at the end, or if a restart trains it again.
        """
        self._failed_once: set[tuple[int, str]] = set()  # what could not be read the first time
        self._summary_writer = _create_summary_writer(run)

    def follow(self, asked_to_stop: threading.Event) -> None:
        """Evaluate checkpoints as they come, until the run has ended and its last one is evaluated."""
        while not asked_to_stop.is_set():
            ended = self._run_has_ended()  # checked first, so that no checkpoint written before the end is missed
            new = self._new_checkpoints()
            for step, values_id in new:
                if asked_to_stop.is_set():
                    return
                self._evaluate(step, values_id)
            if ended and not new:
                return
            asked_to_stop.wait(_CHECK_INTERVAL_S)

    def _new_checkpoints(self) -> list[tuple[int, str]]:
        store = self._session.store
        found = [(step, store.values_id(step)) for step in store.steps()]
        return [(step, values) for step, values in found if values and self._evaluated.get(step) != values]

    def _evaluate(self, step: int, values_id: str) -> None:
        try:
            logs = self._session.evaluate_checkpoint("validation", step)
        except CheckpointError:
            # the checkpoint was deleted (`checkpoint.keep`) or is damaged; it is tried once more
            if (step, values_id) in self._failed_once:
                self._evaluated[step] = values_id
            self._failed_once.add((step, values_id))
            return
        self._evaluated[step] = values_id
        if logs is None:  # asked to stop
            return
        self._emit(Evaluated(step=step, split="validation", logs=logs))
        if self._summary_writer is not None:
            with self._summary_writer.as_default(step=step):
                for name, value in logs.items():
                    tf.summary.scalar(f"evaluation_{name}", value)
            # so that TensorBoard shows the point now
            self._summary_writer.flush()

    def _run_has_ended(self) -> bool:
        new = list(self._events.read())
        self._ended |= any(isinstance(event, RunEnded) and event.attempt == self._attempt for event in new)
        return self._ended

    def _already_evaluated(self) -> set[int]:
        """Return the steps that evaluators have evaluated before this process started."""
        paths = self._run.path.glob("attempts/*/evaluator-*/events.jsonl")
        return {event.step for path in paths for event in read_events_of(path, Evaluated)}


def _create_summary_writer(run: RunDir) -> Any:
    """Return a writer for TensorBoard curves, or None if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return tf.summary.create_file_writer(str(run.tensorboard / "evaluator"))
