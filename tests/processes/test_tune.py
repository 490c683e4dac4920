"""`distlaunch tune` on real processes: measures, proves the losses, writes the winner, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
from real import finish, run, start

MINE = """
import os
import keras
import numpy as np


def mlp(fails_in_processes=False):
    if fails_in_processes and "TF_CONFIG" in os.environ:
        raise ValueError("not for several processes")
    return keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])


def norm():
    layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    return keras.Sequential([keras.layers.Input((12,)), *layers])


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(480, 12)).astype("float32"), random.integers(0, 3, 480)
"""
CONFIG = """
# mine
model: {function: "mine.py:mlp"}  # small
data: {function: "mine.py:data", global_batch: 24}
compile:
  optimizer: {name: SGD, args: {learning_rate: 0.1}}
  loss: {name: SparseCategoricalCrossentropy, args: {from_logits: true}}
  metrics: [accuracy]
strategy: {kind: mirrored, replicas: 2}  # slower than one device
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def tune(project: Path, *words: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the result and its rows by name."""
    code, out, err = run("tune", "mine.yaml", "--json", *words, cwd=project, limit_s=600)
    assert code == 0, err
    assert "Traceback" not in out + err
    assert {path.name for path in project.iterdir()} <= {"mine.py", "mine.yaml", "tuned.yaml", "__pycache__"}
    found = json.loads(out)
    return found, {row["candidate"]: row for row in found["rows"]}


def test_a_short_search_proves_its_winner(project: Path) -> None:
    found, rows = tune(project, "--seconds", "3", "--only", "one_device", "--write", "tuned.yaml")
    assert rows.keys() == {"untuned", "one_device"}, "at least one candidate is measured in any budget"
    assert all(row["equal"] and len(row["rounds_ms"]) >= 3 and row["memory_bytes"] > 10**7 for row in rows.values())
    assert rows[found["winner"]]["step_ms"] <= rows["untuned"]["step_ms"]
    assert rows["untuned"]["ratio"] == 1
    assert rows["one_device"]["ratio"] == pytest.approx(statistics.median(rows["one_device"]["round_ratios"]), abs=1e-4)
    assert len(rows["one_device"]["round_ratios"]) == len(rows["one_device"]["rounds_ms"])
    assert rows["one_device"]["examples_per_s"] == pytest.approx(24_000 / rows["one_device"]["step_ms"], rel=1e-2)
    text = (project / "tuned.yaml").read_text()
    kind = "one_device" if found["winner"] == "one_device" else "mirrored, replicas: 2"
    assert f"strategy: {{kind: {kind}}}  # slower than one device" in text
    assert "# small" in text
    code, _, err = run("validate", "tuned.yaml", cwd=project)
    assert code == 0, err
    assert {each["candidate"] for each in found["not_tried"]} >= {"parameter_server", "jax, batch 1"}


@pytest.mark.slow  # in CI test_a_short_search_proves_its_winner, and the judgement in tests/unit/test_tune.py
def test_settings_and_other_backends_have_the_same_losses(project: Path) -> None:
    found, rows = tune(project, "--seconds", "150")
    compared = {name: row["losses"] for name, row in rows.items() if not row["is_16_bit"] and name != "untuned"}
    assert len(compared) >= 5
    assert set(compared.values()) == {"equal"}
    assert rows[found["winner"]]["step_ms"] <= rows["untuned"]["step_ms"]


@pytest.mark.slow
def test_longer_calls_and_16_bits_on_the_strategy_of_the_config(project: Path) -> None:
    """Losses after calls of several steps are compared, too; 16 bits are a row of their own."""
    words = ("--only", "steps_per_call", "--only", "16 bits", "--set", "strategy={kind: one_device}")
    found, rows = tune(project, "--seconds", "40", *words)
    assert rows.keys() >= {"untuned", "untuned, steps_per_call 1", "untuned, steps_per_call 16"}
    assert rows["untuned, steps_per_call 16"]["keys"] == {"train.steps_per_call": 16}
    assert all(row["losses"] == "equal" for name, row in rows.items() if "call" in name and not row["is_16_bit"])
    assert "untuned" not in {each["candidate"] for each in found["not_tried"]}
    sixteen = [row for row in rows.values() if row["is_16_bit"]]
    assert all(row["losses"].startswith("16 bits, off by ") for row in sixteen)
    assert found["winner"] not in {row["candidate"] for row in sixteen}, "only with --allow-16-bit"


@pytest.mark.slow  # in CI test_candidates_with_other_losses_are_dropped_first and the judgement
def test_a_winner_does_not_change_batch_norm_of_replicas(project: Path) -> None:
    found, rows = tune(project, "--set", "model.function=mine.py:norm", "--seconds", "10", "--only", "one_device")
    assert not rows["one_device"]["equal"]
    assert rows["one_device"]["losses"].startswith("differ from step 1")
    assert found["winner"] == "untuned"


@pytest.mark.slow  # in CI test_a_candidate_that_fails_leaves_the_race
def test_a_candidate_that_fails_is_dropped_with_its_reason(project: Path) -> None:
    words = ("--set", "model.args.fails_in_processes=true", "--seconds", "10", "--only", "multi_worker")
    found, rows = tune(project, *words)
    (failed,) = (row for name, row in rows.items() if name != "untuned")
    assert "not for several processes" in failed["failed"]
    assert found["winner"] == "untuned"


@pytest.mark.slow
def test_a_start_ends_with_the_budget_if_something_else_was_measured(project: Path) -> None:
    stand_still(project)
    found, rows = tune(project, "--seconds", "40", "--only", "multi_worker", "--only", "one_device")
    assert rows["one_device"]["step_ms"]
    (still,) = (row for name, row in rows.items() if "multi_worker" in name)
    assert (still["step_ms"], still["failed"]) == (None, None)
    reason = "it was still starting after the budget of 40 s"
    assert {"candidate": still["candidate"], "reason": reason} in found["not_tried"]


@pytest.mark.slow  # the limit is a minute
def test_a_candidate_that_stands_still_is_dropped_even_if_nothing_else_was_measured(project: Path) -> None:
    stand_still(project)
    found, rows = tune(project, "--seconds", "10", "--only", "multi_worker")
    (failed,) = (row for name, row in rows.items() if name != "untuned")
    assert "it was not ready after 60 s" in failed["failed"]
    assert found["winner"] == "untuned"


def stand_still(project: Path) -> None:
    """Let the tasks of strategies with several processes stand still while they build the model."""
    code = "def still():\n    import os, threading\n    'TF_CONFIG' in os.environ and threading.Event().wait()\n"
    (project / "mine.py").write_text(f"{MINE}\n{code}    return mlp()\n")
    config = project / "mine.yaml"
    config.write_text(config.read_text().replace("mine.py:mlp", "mine.py:still"))


@pytest.mark.slow  # in CI the same for train and verify
def test_errors_of_the_config_have_their_lines(project: Path) -> None:
    code, out, err = run("tune", "mine.yaml", "--set", "data.global_batch=no", cwd=project)
    assert (code, out) == (2, "")
    assert "--set data.global_batch=no: data.global_batch: " in err
    (project / "mine.py").write_text(MINE.replace("(480, 12)", "(480, 11)"))
    code, out, err = run("tune", "mine.yaml", cwd=project, limit_s=300)
    assert (code, out) == (3, "")
    assert "Traceback" not in err
    assert "verify failed: ValueError" in err
    code, out, _ = run("tune", "mine.yaml", "--json", cwd=project, limit_s=300)
    assert (code, json.loads(out)["failed"].startswith("worker:0 ValueError")) == (3, True)
    assert "this log has been deleted" in err


@pytest.mark.slow  # in CI the same for verify
def test_ctrl_c_shows_the_table_so_far_and_leaves_nothing(project: Path) -> None:
    process = start("tune", "mine.yaml", "--seconds", "300", "--write", "tuned.yaml", cwd=project)
    assert process.stderr is not None
    for line in process.stderr:
        # the untuned config has been measured, and others have begun
        if line.startswith("starting ") and "untuned" not in line:
            break
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, 60)
    assert code == 130, err
    assert "Traceback" not in out + err
    assert "one_device" in out
    assert "the search was interrupted" in out
    assert "--write: tuned.yaml was not written, since the search did not reach its end" in err
    assert {path.name for path in project.iterdir()} <= {"mine.py", "mine.yaml", "__pycache__"}
