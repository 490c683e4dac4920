"""Calls of a model before training leave no trace, and have as many rows as the model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch import notebook
from distlaunch.base.errors import ConfigError
from tests.parity import probe_models

pytestmark = pytest.mark.usefixtures("virtual_devices")

ONE: dict[str, Any] = {"kind": "one_device"}
TWO: dict[str, Any] = {"kind": "mirrored", "replicas": 2}
SEED = 3


def by_fit(name: str, batch: int, epochs: int = 2) -> dict[str, list[float]]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    splits = probe_models.data()
    model = getattr(probe_models, name)()
    kept = {"validation_data": splits["validation"], "validation_batch_size": batch}
    return model.fit(*splits["train"], batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **kept).history


def train(folder: Path, name: str, strategy: dict[str, Any], batch: int, epochs: int = 2, **more: Any) -> Any:
    home = "tests.parity.probe_models"
    config = {
        "name": "probe",
        "seed": SEED,
        "model": {"function": f"{home}:{name}"},
        "data": {"function": f"{home}:data", "global_batch": batch, "shuffle": False, **more},
        "train": {"epochs": epochs},
        "strategy": strategy,
    }
    return notebook.train(config, runs_dir=folder)


def _check(result: notebook.Result, expected: dict[str, list[float]]) -> None:
    assert result.history.keys() == expected.keys()
    for key, values in expected.items():
        assert result.history[key] == pytest.approx(values, rel=1e-5), key


@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["one device", "two replicas"])
@pytest.mark.parametrize("name", ["sampling", "fading"])
def test_what_a_layer_changes_when_it_is_called_begins_with_the_first_step(
    tmp_path: Path, name: str, strategy: dict[str, Any]
) -> None:
    if name == "fading" and strategy is TWO:
        pytest.skip("Keras itself cannot assign a count in replicas")
    _check(train(tmp_path, name, strategy, 8), by_fit(name, 8))


def test_a_loss_over_a_batch_is_probed_with_enough_rows(tmp_path: Path) -> None:
    _check(train(tmp_path, "compared", ONE, 8), by_fit("compared", 8))


def test_a_loss_that_no_batch_suits_is_named_without_the_rows_of_the_probe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the loss cannot be computed from labels of shape"):
        train(tmp_path, "compared", ONE, 2)


@pytest.mark.slow  # test_held_state.py has state over a resume in CI
def test_the_state_of_a_recurrent_layer_goes_from_batch_to_batch_and_over_a_resume(tmp_path: Path) -> None:
    expected = by_fit("recurrent", 8)
    _check(train(tmp_path / "whole", "recurrent", ONE, 8), expected)
    train(tmp_path / "parts", "recurrent", ONE, 8, epochs=1)
    rest = notebook.train(tmp_path / "parts" / "probe", ["train.epochs=2"]).history
    assert rest["loss"][-1] == pytest.approx(expected["loss"][-1], rel=1e-5)


@pytest.mark.parametrize("name", ["recurrent", "recurrent_sequence"])
def test_replicas_refuse_a_layer_that_keeps_the_state_of_rows(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"layer 'memory' \(stateful=True\).* each of 2 replicas .*one_device"):
        train(tmp_path, name, TWO, 16)


def test_a_fixed_number_of_rows_is_that_of_each_replica(tmp_path: Path) -> None:
    _check(train(tmp_path / "one", "reshaped", ONE, 8), by_fit("reshaped", 8))
    with pytest.raises(ConfigError, match=r"exactly 8 rows, .* each of 2 replicas would get 4 .* global_batch: 16"):
        train(tmp_path / "refused", "reshaped", TWO, 8)
    # 32 examples and 16: whole batches only
    two = train(tmp_path / "two", "reshaped", TWO, 16, args={"rows": 80})
    assert np.isfinite(two.history["loss"]).all()


def test_a_last_batch_that_a_model_cannot_take_is_found_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the last batch of a pass has 4 .*multiple of 8"):
        train(tmp_path, "reshaped", ONE, 8, args={"rows": 60})
