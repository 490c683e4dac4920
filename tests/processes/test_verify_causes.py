"""`distlaunch verify` names a cause only when the trial without it is equal, and otherwise where a deviation begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify import CONFIG, verify

MINE = (Path(__file__).parent / "user_code" / "verify_causes.py").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def reasons(project: Path, *settings: str, kinds: str = "mirrored") -> dict[str, list[str]]:
    """Return the reasons that `verify` gives for each strategy that differs."""
    code, rows = verify(project, *settings, kinds=kinds)
    differing = {kind: row["reasons"] for kind, row in rows.items() if row["verdict"] == "differs"}
    assert code == (1 if differing else 0)
    assert {row["verdict"] for row in rows.values()} <= {"equal", "differs"}, rows
    return differing


@pytest.mark.slow  # in CI tests/unit/test_judgement.py and test_layer_facts.py have its parts
def test_the_layer_is_named_whose_output_leaves_first(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:wrong")["mirrored"]
    assert reason.startswith("unexplained: the loss, log accuracy and the gradients deviate from step 1 on")
    assert "the first to deviate is the output of culprit, in step 1" in reason


@pytest.mark.slow
def test_random_layers_are_not_named_for_what_they_have_not_done(project: Path) -> None:
    settings = ("model.function=mine.py:wrong", "model.args={forwards: false, rate: 0.3}")
    (reason,) = reasons(project, *settings, kinds="mirrored,dtensor")["mirrored"]
    assert reason.startswith("unexplained")
    assert "the first to deviate is the gradient of sequential/a/bias, in step 1" in reason
    assert "random" not in reason


@pytest.mark.slow
def test_random_layers_are_named_for_what_they_have_done(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:gamma")["mirrored"]
    assert reason.startswith("random layer gamma: different random numbers than on one device")


@pytest.mark.slow
def test_a_layer_that_differs_on_jax(project: Path) -> None:
    """JAX and TensorFlow differ even on one device, and no layer of the model is a known cause."""
    pytest.importorskip("jax")
    found = reasons(project, "model.function=mine.py:odd", kinds="mirrored,jax")
    (reason,) = found.pop("jax")
    assert reason.startswith("unexplained")
    assert "the first to deviate is the gradient of" in reason
    assert not found


@pytest.mark.slow
def test_only_what_is_to_blame_is_named(project: Path) -> None:
    pytest.importorskip("jax")
    settings = ("model.function=mine.py:odd", "model.args.norm=true")
    found = reasons(project, *settings, kinds="mirrored,jax")
    (reason,) = found["mirrored"]
    assert reason.startswith("BatchNormalization norm")
    (reason,) = found["jax"]
    assert reason.startswith("unexplained")
    assert "BatchNormalization" not in reason


@pytest.mark.slow
def test_a_normalisation_of_ones_own(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:own_norm")["mirrored"]
    assert reason.startswith("class MyBatchNorm: statistics of each replica's own rows")


@pytest.mark.slow
def test_two_causes_together_without_a_third_that_is_none(project: Path) -> None:
    settings = ("model.function=mine.py:own_norm", "model.args={norm: true, rate: 0.3}")
    first, second = reasons(project, *settings)["mirrored"]
    assert first.startswith("BatchNormalization norm")
    assert second.startswith("class MyBatchNorm")
