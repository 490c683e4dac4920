"""Tests of the facts that follow from events, for an attempt and for a run."""

from __future__ import annotations

from distlaunch.base.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    Restored,
    RunEnded,
    StepsDone,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts


def start(attempt: int, first_step: int = 0) -> TrainingStarted:
    return TrainingStarted(
        attempt=attempt, strategy="one_device", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=4,
        first_epoch=first_step // 10, first_step=first_step, steps_per_epoch=10, parameters=1,
    )  # fmt: skip


def steps(attempt: int, step: int, loss: float) -> StepsDone:
    epoch, within = divmod(step, 10)
    logs = {"loss": loss}
    return StepsDone(attempt=attempt, epoch=epoch, step=step, step_in_epoch=within, steps=2, seconds=1.0, logs=logs)


def epoch(attempt: int, number: int) -> EpochEnded:
    return EpochEnded(attempt=attempt, epoch=number, step=10 * number + 10, seconds=5.0, logs={"loss": 0.5})


def place(facts: AttemptFacts) -> tuple[int, int, int]:
    return facts.step, facts.epochs_done, facts.step_in_epoch


FAILED = TaskFailed(failed_task="worker:0", host="a", reason="bug", log="")


def test_how_far_an_attempt_is() -> None:
    facts = AttemptFacts()
    expected: list[tuple[Event, tuple[int, int, int]]] = [
        (Restored(step=10, epoch=1, path="x"), (10, 1, 0)),
        (start(0, 10), (10, 1, 0)),
        (steps(0, 14, 1.0), (14, 1, 4)),
        (epoch(0, 1), (20, 2, 0)),
        (steps(0, 22, 0.25), (22, 2, 2)),
        (RunEnded(status="stopped", step=23, epochs_done=2, seconds=9.0), (23, 2, 2)),
    ]
    for event, where in expected:
        facts.add(event)
        assert place(facts) == where
    assert facts.logs == {"loss": 0.25}


def test_a_task_that_is_started_again_keeps_its_host_until_it_reports() -> None:
    facts = AttemptFacts()
    facts.add(TaskStarted(task="worker:1", host="a", pid=1))
    facts.add(TaskRestarted(restarted_task="worker:1", host="a", reason="was killed"))
    assert (facts.hosts, facts.up, facts.restarts) == ({"worker:1": "a"}, set(), {"worker:1": 1})
    facts.add(TaskStarted(task="worker:1", host="b", pid=2))
    assert (facts.hosts, facts.up) == ({"worker:1": "b"}, {"worker:1"})


def test_an_end_counts_as_asked_for_only_after_a_failure() -> None:
    stopped = RunEnded(status="stopped", step=1, epochs_done=0, seconds=1.0)
    before = RunFacts.of([stopped, FAILED]).now
    after = RunFacts.of([FAILED, stopped]).now
    assert (before.stopped_after_failure, after.stopped_after_failure) == (False, True)


def test_a_finished_run_stays_so_until_it_is_taken_on() -> None:
    done = RunEnded(attempt=0, status="done", step=40, epochs_done=4, seconds=9.0)
    events = [start(0), epoch(0, 3), done]
    assert RunFacts.of(events).finished
    on = RunFacts.of([*events, start(1, 40)])
    assert (on.finished, on.start) == (False, start(1, 40))
    again = RunFacts.of([*events, start(1, 40), FAILED, done])
    assert (again.finished, again.start, again.ended) == (True, start(0), done)


def test_a_task_that_reports_its_start_late_discards_nothing() -> None:
    facts = RunFacts.of([start(0), epoch(0, 0), start(0)])
    assert len(facts.epochs) == 1


def test_epochs_that_a_resume_has_discarded_are_left_out() -> None:
    saved = CheckpointSaved(attempt=1, step=10, path="x", num_bytes=1, seconds=0.1)
    facts = RunFacts.of([start(0), epoch(0, 0), epoch(0, 1), epoch(0, 2), start(1, 10), epoch(1, 1), saved])
    assert [(event.attempt, event.epoch) for event in facts.epochs] == [(0, 0), (1, 1)]
    assert facts.checkpoints == [saved]
    assert place(facts.now) == place(facts.attempts[1]) == (20, 2, 0)
