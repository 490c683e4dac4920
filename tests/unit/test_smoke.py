"""`--smoke` turns a config into a config without mistakes that trains at most a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.base.events import DataResolved, Event, Notice
from distlaunch.config.read.load import load_config
from distlaunch.jobs.smoke import STEPS, _SmokeObserver, prove, smoke_overrides
from distlaunch.supervise.observer import Silent

CONFIG = Path(__file__).parents[2] / "configs" / "linear_regression.yaml"


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("steps", "expected"), [("null", None), ("1", 2), ("2", 2), ("3", 3), ("4", STEPS), ("1000", STEPS)]
)
def test_steps_are_few_and_a_checkpoint_is_due(steps: str, expected: int | None, epochs: int) -> None:
    given = (f"train.steps_per_epoch={steps}", "strategy={kind: one_device}", "cluster={}")
    config = load_config(CONFIG, given, environ={}).config
    smoked = load_config(CONFIG, (*given, *smoke_overrides(config, epochs=epochs)), environ={}).config
    assert smoked.train.steps_per_epoch == expected
    assert smoked.checkpoint.every_steps == 2
    assert smoked.train.epochs == epochs


@pytest.mark.parametrize("own", ["data.streams=2", "data.sharding=function"])
def test_data_that_no_process_has_as_a_whole_is_limited_by_steps(tmp_path: Path, own: str) -> None:
    (tmp_path / "mine.py").write_text("def data(context):\n    pass\n")
    function = f"data={{function: '{tmp_path}/mine.py:data', global_batch: 4}}"
    given = (function, own, "strategy={kind: multi_worker_mirrored}", "cluster={workers: 2}")
    config = load_config(CONFIG, given, environ={}).config
    smoked = load_config(CONFIG, (*given, *smoke_overrides(config, epochs=1)), environ={}).config
    assert (smoked.data.train_examples, smoked.train.steps_per_epoch) == (None, STEPS)


def test_settings_of_the_smoke_run_itself_are_not_warned_about() -> None:
    shown: list[str] = []

    class Shows(Silent):
        def event(self, event: Event) -> None:
            assert isinstance(event, Notice)
            shown.append(event.message)

    with _SmokeObserver(Shows(), ["validation.steps"]) as observer:
        for message in ("validation.steps: it has no effect", "validation.every_epochs: it has no effect", "other"):
            observer.event(Notice(level="warning", message=message))
    assert shown == ["validation.every_epochs: it has no effect", "other"]


@pytest.mark.parametrize(
    ("found", "is_asked"), [({"examples": {"train": 8}}, False), ({"examples": {"train": 8, "validation": 4}}, True)]
)
def test_a_job_without_validation_data_need_not_validate(found: dict, is_asked: bool) -> None:
    config = load_config(CONFIG, environ={}).config
    proofs = prove(config, [DataResolved(name="x", source="x", **found)], ["worker:0"])
    assert ("validation ran" in [proof.statement for proof in proofs]) == is_asked
