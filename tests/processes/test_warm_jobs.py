"""Whole jobs whose tasks are forked: the numbers, the logs and the speed of restarts are not worse for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import final_state, run
from supervised import REPOSITORY

from distlaunch.base.run_dir import RunDir

CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 24}
compile: {optimizer: adam, loss: mse}
train: {epochs: 2}
determinism: true
"""
MINE = """
import keras
import numpy as np

def model():
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3),
                             keras.layers.Dense(1)])

def data():
    x = np.random.default_rng(0).normal(size=(200, 10)).astype("float32")
    return {"train": (x, x.sum(1, keepdims=True)), "validation": (x[:50], x[:50].sum(1, keepdims=True))}
"""
STRATEGIES = {
    "one device": [],
    "two workers": ["strategy.kind=multi_worker_mirrored", "cluster.workers=2"],
    "dtensor": ["strategy={kind: dtensor, mesh: {batch: 2}}"],
    "jax": ["strategy={kind: jax, mesh: {batch: 2}}"],
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.yaml").write_text(CONFIG)
    return tmp_path


# what is imported ahead for JAX is looked at in test_warm_starts.py
IN_CI = ("one device",)
PARAMS = [
    pytest.param(words, marks=() if name in IN_CI else pytest.mark.slow, id=name) for name, words in STRATEGIES.items()
]


@pytest.mark.parametrize("strategy", PARAMS)
def test_warm_and_cold_are_bit_equal(project: Path, strategy: list[str]) -> None:
    words = [word for each in strategy for word in ("--set", each)]
    states = []
    for name, warm in (("warm", "true"), ("cold", "false")):
        given = ["--name", name, "--set", f"engine.warm_start={warm}", *words]
        code, out, err = run("train", "job.yaml", *given, cwd=project)
        assert code == 0, out + err
        states.append(final_state(RunDir(project / "runs" / name)))
        for log in (project / "runs" / name).glob("attempts/0/*/stderr.log"):
            assert "Warning" not in log.read_text()
    warm_state, cold_state = states
    assert warm_state.keys() == cold_state.keys()
    for name, value in cold_state.items():
        np.testing.assert_array_equal(warm_state[name], value, err_msg=name)


CONVERTED = (Path(__file__).parent / "user_code" / "warm_jobs.py").read_text()


ON = ("{kind: one_device}", "{kind: mirrored, replicas: 2}", "{kind: dtensor, mesh: {batch: 2}}")
ONLY_TRAINING, NO_PREDICTION = "'one_pass'", "'call'"
"""Functions of ours, one that only training uses and one that predicting does not."""


@pytest.mark.parametrize(
    ("mode", "strategies", "has", "lacks"),
    [
        pytest.param("train", ON, [ONLY_TRAINING, NO_PREDICTION], [], marks=pytest.mark.slow),
        # what one device lacks then is what the others use as well
        pytest.param("evaluate", ON[:1], [NO_PREDICTION], [ONLY_TRAINING], marks=pytest.mark.slow),
        pytest.param("predict", ON[:1], [], [ONLY_TRAINING, NO_PREDICTION], marks=pytest.mark.slow),
    ],
    ids=["train", "evaluate", "predict"],
)
def test_autograph_has_nothing_of_ours_left_to_convert(
    project: Path, mode: str, strategies: tuple[str, ...], has: list[str], lacks: list[str]
) -> None:
    """The list of what is converted ahead is whole: a change of these functions must not make starts slow again."""
    for number, strategy in enumerate(strategies if mode != "train" else ()):  # what is evaluated
        given = ["--name", f"run-{number}", "--set", "runs_dir=.", "--set", f"strategy={strategy}"]
        code, out, err = run("train", "job.yaml", *given, cwd=project)
        assert code == 0, out + err
    words = [sys.executable, "-c", CONVERTED, mode, *strategies]
    env = {"PYTHONPATH": REPOSITORY, "PATH": "", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(words, cwd=project, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("{kind: ")]
    assert found == [f"{strategy} []" for strategy in strategies]
    ahead = next(line for line in done.stdout.splitlines() if line.startswith("ahead "))
    assert all(function in ahead for function in has)
    assert not any(function in ahead for function in lacks)


def test_a_run_says_why_its_tasks_are_not_forked(project: Path) -> None:
    """Keras imports scikit-learn if it is installed; here it is a package that starts a thread."""
    packages = project / "packages"
    packages.mkdir()
    thread = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nraise ImportError\n"
    )
    (packages / "sklearn.py").write_text(thread)
    code, out, err = run("train", "job.yaml", cwd=project, path=[packages])
    assert code == 0, out + err
    lines = [line for line in (out + err).splitlines() if "fresh processes" in line]
    assert len(lines) == 1
    assert re.search(r"because importing has started \d threads?; engine: {warm_start: false} saves", lines[0])
