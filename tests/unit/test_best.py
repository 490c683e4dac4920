"""The checkpoint of the best epoch."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import CheckpointError, ConfigError
from distlaunch.checkpoints.best import BestEpoch, mode_warnings
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.policy import Moment, SaveContext
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import Best

HIGHEST = Best(metric="val_accuracy", mode="max")


def after_epoch(logs: dict[str, float], *, validated: bool = True) -> SaveContext:
    return SaveContext(Moment.EPOCH_END, epoch=1, logs=logs, is_validated=validated)


def rises(best: BestEpoch, metric: str, *values: float) -> list[bool]:
    """Return for each value, in order, whether its epoch is saved as the best one so far."""
    found = []
    for value in values:
        at = after_epoch({metric: value})
        found.append(best.should_save(at))
        if found[-1]:
            best.keep(at)
    return found


def test_only_what_is_better_counts() -> None:
    nan, inf = math.nan, math.inf
    assert rises(BestEpoch(HIGHEST), "val_accuracy", 0.5, 0.5, 0.4, nan, 0.6) == [True, False, False, False, True]
    lowest = BestEpoch(Best(metric="loss", mode="min"))
    assert rises(lowest, "loss", nan, inf, 2, 3, 1, -1) == [False, False, True, False, True, True]
    assert not BestEpoch(None).should_save(after_epoch({"loss": 1}))
    assert not lowest.should_save(SaveContext(Moment.STEP, logs={"loss": -9}))


@pytest.mark.parametrize(
    ("metric", "mode", "told"),
    [
        ("val_loss", "max", "the epoch with the highest val_loss; for the best one, set `mode: min`"),
        ("mean_absolute_error", "max", "highest mean_absolute_error; for the best one, set `mode: min`"),
        ("val_accuracy", "min", "lowest val_accuracy; for the best one, set `mode: max`"),
        ("sparse_top_k_categorical_accuracy", "min", "`mode: max`"),
        ("loss", "min", ""),
        ("val_acc", "max", ""),
        ("accuracy_loss", "max", "highest accuracy_loss; for the best one, set `mode: min`"),
        ("loss/recon", "max", "`mode: min`"),
        ("false_positives_1", "max", "`mode: min`"),
        ("val_cosine_similarity", "min", "`mode: max`"),
        ("steps", "min", ""),
    ],
)
def test_a_mode_that_keeps_the_worst_is_told(metric: str, mode: Any, told: str) -> None:
    warnings = mode_warnings(Best(metric=metric, mode=mode))
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)
    assert mode_warnings(None) == []


def test_what_could_not_be_written_is_not_the_best() -> None:
    best = BestEpoch(HIGHEST)
    assert rises(best, "val_accuracy", 0.5, 0.7, 0.8) == [True, True, True]
    records = [{"metric": "val_accuracy", "mode": "max", "value": value} for value in (0.7, 0.8)]
    best.forget(records[0])  # an epoch may end before the failure of an earlier one is known
    assert rises(best, "val_accuracy", 0.75) == [False]
    best.forget(records[1])
    assert rises(best, "val_accuracy", 0.5, 0.6) == [False, True]


def test_a_run_goes_on_with_its_best_value_unless_another_is_asked_for() -> None:
    first = BestEpoch(HIGHEST)
    rises(first, "val_accuracy", 0.5)
    progress = Progress.from_plain(Progress(best=first.record).to_plain())
    for section, better in ((HIGHEST, False), (Best(metric="val_accuracy", mode="min"), True), (None, False)):
        again = BestEpoch(section)
        again.restore(progress.best)
        assert again.should_save(after_epoch({"val_accuracy": 0.4})) is better


def test_a_value_that_nobody_tells_is_named_with_those_there_are() -> None:
    best = BestEpoch(Best(metric="val_acc", mode="max"))
    assert not best.should_save(after_epoch({"loss": 1.0}, validated=False))
    with pytest.raises(ConfigError, match="got 'val_acc', which this run does not have; it has loss, val_accuracy"):
        best.should_save(after_epoch({"val_accuracy": 1, "loss": 2}))
    with pytest.raises(ConfigError, match="there is no validation"):
        best.check(has_validation=False)
    best.check(has_validation=True)


def test_a_name_that_no_epoch_will_have_is_found_after_the_first_steps() -> None:
    logs = {"loss": 1.0, "accuracy": 0.5}
    for metric in ("loss", "val_accuracy"):
        BestEpoch(Best(metric=metric, mode="min")).check_names(logs, is_alike=True)
    wrong = BestEpoch(Best(metric="val_acc", mode="max"))
    wrong.check_names({}, is_alike=True)  # nothing is reported yet
    wrong.check_names(logs, is_alike=False)  # validation of a model's own may report it
    with pytest.raises(ConfigError, match="it has accuracy, loss, val_accuracy, val_loss"):
        wrong.check_names(logs, is_alike=True)
    with pytest.raises(ConfigError, match=r"got 'acc', .* it has accuracy, loss$"):
        BestEpoch(Best(metric="acc", mode="max")).check_names(logs, is_alike=False)


@pytest.mark.parametrize(
    ("mode", "values", "epochs", "found"),
    [
        ("max", [0.1, 0.4, math.nan, 0.4], 4, (2, 0.4)),
        ("min", [0.3, 0.1, 0.2], 3, (2, 0.1)),
        ("max", [0.1, 0.4], 4, (None, 0.4)),  # validation after every second epoch
        ("max", [math.nan], 1, None),
        ("max", [], 0, None),
    ],
)
def test_the_best_of_what_was_trained_before(
    mode: str, values: list[float], epochs: int, found: tuple[int | None, float] | None
) -> None:
    best = BestEpoch(Best(metric="val_accuracy", mode=mode))  # type: ignore[arg-type]
    assert best.in_history({"val_accuracy": values}, epochs) == found


def test_the_checkpoint_of_an_earlier_epoch_becomes_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step, epoch, within in ((10, 1, 0), (15, 1, 5), (20, 2, 0)):
        store.save(state(step), Progress(step=step, epoch=epoch, step_in_epoch=within), {}, best=step == 20)
    assert store.find_as_best(1)
    assert store.load("best").progress.step == 10
    assert not store.find_as_best(3)
    assert store.load("best").progress.step == 10


def state(value: float) -> dict[str, Any]:
    return {"model/a": np.full(3, value, np.float32)}


def test_it_stays_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="there is no best checkpoint"):
        store.load("best")
    store.save(state(1), Progress(step=1), {}, best=True)
    for step in (2, 3):
        store.save(state(step), Progress(step=step), {})
    assert store.steps() == [3]
    assert store.load("best").progress.step == 1
    store.save(state(4), Progress(step=4), {}, best=True)
    # such as the last one, after EarlyStopping has put other weights back
    store.save(state(7), Progress(step=4), {})
    assert store.load(4).state["model/a"][0] == 7
    assert store.load("best").state["model/a"][0] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000004"]


def test_it_is_copied_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    store = CheckpointStore(tmp_path)
    store.save(state(1), Progress(step=1), {}, best=True)
    shutil.rmtree(tmp_path / "step-00000001")
    assert store.load("best").state["model/a"][0] == 1


@pytest.mark.parametrize("place", [".best", ".step"])
def test_it_is_no_worse_than_the_newest_checkpoint_says(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rename = CheckpointStore(tmp_path), Path.rename
    store.save(state(1), Progress(step=1), {}, best=True)

    class Killed(BaseException):
        pass

    def killed(path: Path, target: Path) -> None:
        if path.name.startswith(place):
            raise Killed
        rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        store.save(state(2), Progress(step=2), {}, best=True)
    monkeypatch.undo()
    saved = CheckpointStore(tmp_path).newest_good()
    assert saved is not None
    assert saved.progress.step == 1
    assert store.load("best").progress.step == (1 if place == ".best" else 2)
