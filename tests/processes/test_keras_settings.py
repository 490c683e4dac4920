"""Settings of Keras in the environment and in `keras.json`: the strategy decides on the backend, the rest counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_job import LOSSES, environment, losses, run_command, write_job

_JAX = {"strategy": {"kind": "jax", "mesh": {"batch": 1}}}
_SERVERS = {"strategy": {"kind": "parameter_server"}, "cluster": {"workers": 1, "ps": 1}}
_FIT = """
import json, sys
import mine
history = mine.model().fit(*mine.data(), epochs=2, batch_size=16, shuffle=False, verbose=0).history
print(json.dumps(history["loss"]))
"""
_FILTERED = """
import keras
import numpy as np


def model():
    pooled = keras.layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((2, 3, 4)), pooled, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.set_weights([np.full(each.shape, 0.1) for each in model.weights])
    model.compile("adam", "mse")
    return model


def data():
    x = (np.arange(768).reshape(32, 2, 3, 4) % 7) / 7
    return x, x.sum((1, 2, 3))[:, None]
"""


@pytest.mark.parametrize(
    ("given", "sections"),
    [
        pytest.param("jax", {}, marks=pytest.mark.slow),  # in CI test_hardware.py
        pytest.param("torch", {}, marks=pytest.mark.slow),
        pytest.param("no such", {}, marks=pytest.mark.slow),
        pytest.param("tensorflow", _JAX, marks=pytest.mark.slow),
        pytest.param("torch", _JAX, marks=pytest.mark.slow),
        pytest.param("jax", _SERVERS, marks=pytest.mark.slow),
    ],
)
def test_the_strategy_decides_on_the_backend(tmp_path: Path, given: str, sections: dict[str, Any]) -> None:
    write_job(tmp_path, **sections)
    done = run_command("train", "job.yaml", cwd=tmp_path, env={"KERAS_BACKEND": given})
    assert done.code == 0, done.text
    kind, backend = ("jax", "jax") if sections == _JAX else (sections.get("strategy", {}).get("kind"), "tensorflow")
    line = f"KERAS_BACKEND={given} is ignored: strategy {kind or 'one_device'} runs Keras on {backend}\n"
    assert done.text.count(line) == 1
    assert losses(tmp_path) == LOSSES


@pytest.mark.slow
@pytest.mark.parametrize("words", [("evaluate", "runs/job", "--split", "train"), ("plan", "job.yaml", "--variables")])
def test_other_commands(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_job(tmp_path)
    assert run_command("train", "job.yaml", cwd=tmp_path).code == 0
    done = run_command(*words, cwd=tmp_path, env={"KERAS_BACKEND": "jax"})
    assert done.code == 0, done.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one_device", "jax", "dtensor"])
@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "torch", "floatx": "float64"},
        {"backend": "jax", "image_data_format": "channels_first", "epsilon": 0.01},
    ],
    ids=["floatx", "image_data_format"],
)
def test_a_keras_json_counts_as_in_keras(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    strategy = {"kind": kind} if kind == "one_device" else {"kind": kind, "mesh": {"batch": 2}}
    write_job(tmp_path, _FILTERED, strategy=strategy)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/keras.json").write_text(json.dumps(settings))
    env = {"KERAS_HOME": str(tmp_path / "home")}
    done = run_command("train", "job.yaml", cwd=tmp_path, env=env)
    assert done.code == 0, done.text
    backend = {"KERAS_BACKEND": "jax" if kind == "jax" else "tensorflow"}
    fit = subprocess.run([sys.executable, "-c", _FIT], cwd=tmp_path, env=environment(**env, **backend),
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert losses(tmp_path) == pytest.approx(json.loads(fit.stdout.splitlines()[-1]), rel=1e-6, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"floatx": "float8"}, "floatx: got 'float8'; expected one of float16, float32, float64; correct the file"),
        pytest.param({"image_data_format": 3}, "image_data_format: got 3", marks=pytest.mark.slow),
        pytest.param({"epsilon": "small"}, "epsilon: got 'small'; expected a number", marks=pytest.mark.slow),
        pytest.param([], "expected an object", marks=pytest.mark.slow),
    ],
)
def test_a_keras_json_that_keras_cannot_read(tmp_path: Path, settings: Any, said: str) -> None:
    write_job(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/keras.json").write_text(json.dumps(settings))
    done = run_command("train", "job.yaml", cwd=tmp_path, env={"KERAS_HOME": str(tmp_path / "home")})
    assert done.code in (2, 3)
    assert f"{tmp_path}/home/keras.json: {said}" in done.err
    assert "Traceback" not in done.text
    assert "File " not in done.text
