"""The DTensor tutorial from its first to its last line: three meshes over one run, then text in and scores out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import CONFIGS, run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Restored
from distlaunch.base.run_dir import RunDir
from distlaunch.workloads.sentiment import reviews

PREDICT = """
import json, sys
import numpy as np
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
texts = json.loads(sys.stdin.read())
scores = served(tf.constant(texts))
print(json.dumps(np.argmax(next(iter(scores.values())), -1).tolist()))
"""


@pytest.mark.slow  # in CI one of the configs passes its smoke test
def test_three_meshes_one_run_and_a_saved_model_of_text(tmp_path: Path) -> None:
    shorter = ("--set", "data.train_examples=500")
    for name in ("sentiment", "sentiment_model_parallel", "sentiment_spatial_parallel"):
        lite = ("--set", "export=[saved_model, tflite]") if name == "sentiment_spatial_parallel" else ()
        code, out, err = run("train", str(CONFIGS / f"{name}.yaml"), *shorter, *lite, cwd=tmp_path)
        assert code == 0, err
    found = RunDir(tmp_path / "runs" / "sentiment")
    assert "serve(inputs: string[?]) -> float32[?,2]" in out
    assert "serve(inputs: float32[?,1200]) -> float32[?,2]" in out
    assert "warning: model.tflite takes the output of data.preprocessing: TFLite does not support text" in out
    assert [event.step for event in read_events(found.events) if isinstance(event, Restored)] == [16, 32]
    assert len(list(found.preprocessing("*").parent.glob("*.keras"))) == 1

    code, out, err = run("evaluate", str(found.path), "--json", cwd=tmp_path)
    assert code == 0, err
    evaluated = next(json.loads(line) for line in out.splitlines() if '"Evaluated"' in line)

    x, y = reviews()["validation"]
    command = [sys.executable, "-c", PREDICT, str(found.export / "saved_model")]
    done = subprocess.run(command, input=json.dumps(list(x)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy = float(np.mean(np.array(json.loads(done.stdout)) == y))
    assert accuracy == np.float32(evaluated["logs"]["accuracy"])
    texts_in_scores_out(found, list(x), accuracy, y)
    a_module_has_no_weights_file(found)


def texts_in_scores_out(found: RunDir, texts: list[str], accuracy: float, y: np.ndarray) -> None:
    """`distlaunch predict` from a copy of the SavedModel, far from the run."""
    elsewhere = found.path.parent.parent / "elsewhere"
    elsewhere.mkdir()
    found.exported("saved_model").rename(elsewhere / "reviews_model")
    (elsewhere / "reviews.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    code, out, err = run("predict", "reviews_model", "--input", "reviews.txt", "--output", "-", cwd=elsewhere)
    assert (code, err) == (0, "")
    scores = np.array([json.loads(line)["predictions"] for line in out.splitlines()])
    assert float(np.mean(scores.argmax(-1) == y)) == accuracy


def a_module_has_no_weights_file(found: RunDir) -> None:
    code, _, err = run("export", str(found.path), "--format", "tflite", "--format", "weights", cwd=found.path)
    assert code == 2
    assert "got 'weights', but the model is a tf.Module, which has no load_weights; use saved_model or tflite" in err
