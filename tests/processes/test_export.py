"""Exports of all strategies in all formats, loaded in a process without distlaunch, and `predict` from them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import json_lines, run

from tests.strategies import IN_ONE_PROCESS, settings

MINE = (Path(__file__).parent / "user_code" / "export.py").read_text()
CONFIG = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32}
compile: {optimizer: sgd, loss: {rating: mse, kind: mse}}
export: [saved_model, keras, weights, tflite]
"""
SIGNATURE = "serve(item: float32[?,3], user: int32[?]) -> (kind: float32[?,2], rating: float32[?,1])"

LOAD = """
import json, sys
import numpy as np
import keras, tensorflow as tf
folder, out = sys.argv[1:]
with np.load("rows.npz") as rows:
    x = {"user": rows["user"].astype("int32"), "item": rows["item"].astype("float32")}
plain = lambda outputs: {name: np.asarray(value) for name, value in outputs.items()}
served = tf.saved_model.load(f"{folder}/saved_model").signatures["serving_default"]
found = {"saved_model": plain(served(**{name: tf.constant(part) for name, part in x.items()}))}
model = keras.saving.load_model(f"{folder}/model.keras")
found["keras"] = plain(model(x))
for variable in model.variables:
    variable.assign(tf.zeros_like(variable))
model.load_weights(f"{folder}/model.weights.h5")
found["weights"] = plain(model(x))
lite = tf.lite.Interpreter(f"{folder}/model.tflite").get_signature_runner("serve")
found["tflite"] = plain(lite(**x))
assert not any(name.startswith("distlaunch") for name in sys.modules)
np.savez(out, **{f"{kind}/{name}": value for kind, parts in found.items() for name, value in parts.items()})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `one_device` and its predictions."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.yaml").write_text(CONFIG)
    train("one_device", folder)
    return folder


def train(name: str, folder: Path) -> None:
    strategy = [word for setting in settings(IN_ONE_PROCESS[name]) for word in ("--set", setting)]
    code, out, err = run("train", "mine.yaml", "--name", name, *strategy, "--json", cwd=folder)
    assert code == 0, err
    exported = {event["format"]: event["signature"] for event in json_lines(out) if event["event"] == "Exported"}
    assert exported == dict.fromkeys(("saved_model", "keras", "weights", "tflite"), SIGNATURE)
    assert not list((folder / "runs" / name / "export").glob(".*"))
    code, _, err = run("predict", f"runs/{name}", "--output", f"{name}.npz", cwd=folder)
    assert code == 0, err


def expected(folder: Path, name: str = "one_device") -> dict[str, np.ndarray]:
    """Return the predictions that a run has made under its strategy."""
    with np.load(folder / f"{name}.npz") as arrays:
        return dict(arrays)


def validation(folder: Path) -> dict[str, np.ndarray]:
    space: dict = {}
    exec(MINE, space)
    return space["data"]()["validation"][0]


# test_sentiment.py, test_exit_hooks.py, test_train.py and the smoke tests export too
@pytest.mark.slow
@pytest.mark.parametrize("strategy", IN_ONE_PROCESS)
def test_exports_predict_as_their_run_does(folder: Path, strategy: str) -> None:
    """All formats, loaded without distlaunch, give what `predict RUN` gives under the strategy, dropout or not."""
    if strategy != "one_device":
        train(strategy, folder)
    np.savez(folder / "rows.npz", **validation(folder))
    (folder / "load.py").write_text(LOAD)
    command = [sys.executable, "-P", "load.py", f"runs/{strategy}/export", "found.npz"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env={**env, "CUDA_VISIBLE_DEVICES": "-1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "found.npz") as found:
        for name, wanted in expected(folder, strategy).items():
            for kind in ("saved_model", "keras", "weights", "tflite"):
                np.testing.assert_allclose(found[f"{kind}/{name}"], wanted, rtol=1e-4, atol=1e-5, err_msg=kind)


@pytest.mark.slow
def test_predict_from_a_copy_for_files_and_functions(folder: Path, tmp_path: Path) -> None:
    """By name from an .npz, a .csv and a data function, by each format, in order, with a smaller last batch."""
    export, rows, wanted = folder / "runs/one_device/export", validation(folder), expected(folder)
    for name in ("saved_model", "model.tflite", "model.keras"):
        copy = shutil.copytree if (export / name).is_dir() else shutil.copy
        copy(export / name, tmp_path / name)
    np.savez(tmp_path / "rows.npz", **rows)
    table = [",".join(["rating", "item_0", "item_1", "item_2", "user"])]
    table += [",".join(map(repr, [0, *map(float, x), int(u)])) for x, u in zip(rows["item"], rows["user"], strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(table) + "\n")
    (tmp_path / "mine.py").write_text(MINE)
    for words in (
        ("saved_model", "--input", "rows.npz", "--batch-size", "7"),
        ("model.tflite", "--input", "rows.csv", "--batch-size", "7"),
        ("model.keras", "--data", "mine.py:data"),
    ):
        code, out, err = run("predict", *words, "--output", "found.npz", cwd=tmp_path)
        assert (code, err) == (0, ""), err
        assert "found.npz: kind 36 x 2, rating 36 x 1" in out
        with np.load(tmp_path / "found.npz") as found:
            for name, values in wanted.items():
                np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=words[0])


@pytest.mark.slow  # in CI tests/processes/test_predict.py
def test_a_run_predicts_json_lines_by_its_export(folder: Path) -> None:
    np.savez(folder / "one.npz", **{name: part[:3] for name, part in validation(folder).items()})
    code, out, err = run("predict", "runs/one_device", "--input", "one.npz", "--output", "-", cwd=folder)
    assert (code, err) == (0, "")
    kinds = [json.loads(line)["kind"] for line in out.splitlines()]
    np.testing.assert_allclose(kinds, expected(folder)["kind"][:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("runs/one_device", "--input", "wrong.csv"),
         "wrong.csv:1: got the columns 'user', 'item'; expected 'item_0 to item_2'; the model takes item"),
        (("cut.tflite", "--input", "rows.npz"), "cut.tflite: "),
        (("runs/one_device/export/saved_model",), "add --input FILE or --data FUNCTION"),
        (("runs/one_device", "--input", "none.npz"), "--input none.npz: there is no such file"),
        (("runs/one_device", "--input", "mine.py"), "--input mine.py: expected a file that ends in .npy"),
        (("runs", "--input", "rows.npz"), "runs is not an export; expected a run directory, a SavedModel folder"),
        (("runs/one_device/export/model.weights.h5", "--input", "rows.npz"), "contains only weights"),
        (("runs/one_device", "--input", "rows.npz", "--set", "seed=1"), "--set: with --input, an export is used"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted(folder: Path, words: tuple[str, ...], message: str) -> None:
    if words[-1] in ("wrong.csv", "rows.npz"):
        (folder / "wrong.csv").write_text("user,item\n1,2\n")
        np.savez(folder / "rows.npz", **validation(folder))
        lite = (folder / "runs/one_device/export/model.tflite").read_bytes()
        (folder / "cut.tflite").write_bytes(lite[: len(lite) // 2])
    code, out, err = run("predict", *words, cwd=folder)
    assert code in (2, 3)
    assert message in err
    assert "Traceback" not in out + err


def test_an_export_that_the_run_has_outgrown_is_told(folder: Path, tmp_path: Path) -> None:
    """And one that takes the place of its input is refused."""
    shutil.copytree(folder / "runs/one_device", tmp_path / "run")
    np.savez(tmp_path / "rows.npz", **validation(folder))
    before = (tmp_path / "rows.npz").read_bytes()
    for output in ("rows.npz", "../" + tmp_path.name + "/rows.npz"):
        code, _, err = run("predict", "run", "--input", "rows.npz", "--output", output, cwd=tmp_path)
        assert code == 2
        assert "this is the input file; give another file" in err
    assert (tmp_path / "rows.npz").read_bytes() == before
    words = ("predict", "run", "--input", "rows.npz", "--output", "of.npz", "-q")
    assert run(*words, cwd=tmp_path)[::2] == (0, "")
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    shutil.copytree(newest, newest.with_name("step-00000900"))
    os.utime(newest.with_name("step-00000900"))
    code, _, err = run(*words, cwd=tmp_path)
    assert code == 0
    assert (
        "warning: run was trained further after its export was written; predicting with the export (run/export/" in err
    )


@pytest.mark.slow
def test_a_bad_export_takes_no_good_one_s_place(folder: Path) -> None:
    """A layer that forgets an argument when it is saved: the file loads, and predicts something else."""
    own = (
        "--set",
        "data.function=mine.py:plain",
        "--set",
        "compile.loss=mse",
        "--set",
        "model.function=mine.py:scaled",
    )
    code, _, err = run("train", "mine.yaml", "--name", "own", *own, "--set", "model.args.forget=false",
                       "--set", "export=[]", "--set", "validation=null", cwd=folder)  # fmt: skip
    assert code == 0, err
    (folder / "runs/own/export").mkdir()
    (folder / "runs/own/export/model.keras").write_text("the good one")
    formats = ("--format", "keras", "--format", "saved_model")
    code, out, err = run("export", "runs/own", *formats, "--set", "model.args.forget=true", cwd=folder)
    assert code == 3
    told = " ".join(err.split())
    assert "the export as keras failed its check and was deleted; the previous one is kept: output_0 differs" in told
    assert "Traceback" not in out + err
    assert (folder / "runs/own/export/model.keras").read_text() == "the good one"
    assert "exported  saved_model  step 1  runs/own/export/saved_model   serve(" in out


LOCAL = """
import keras, numpy as np
X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")

class Odd(keras.layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise RuntimeError("has no config")  # odd

def model(odd=False):
    words = open("words.txt").read().split()
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(len(words)), *([Odd()] if odd else [])])

def data():
    return {"train": (X, X[:, :2])}
"""


def test_training_is_done_whatever_becomes_of_its_export(tmp_path: Path) -> None:
    """A relative path leads where it did in training; a format that fails is reported, and the run is not to be blamed.

    Afterwards: evaluating needs no process to say that there is no validation data, and `logs` shows the training.
    """
    (tmp_path / "mine.py").write_text(LOCAL)
    (tmp_path / "words.txt").write_text("to be")
    text = CONFIG.replace("{rating: mse, kind: mse}", "mse").replace(
        "[saved_model, keras, weights, tflite]", "[weights]"
    )
    (tmp_path / "mine.yaml").write_text(text)
    code, out, err = run("train", "mine.yaml", cwd=tmp_path)
    assert code == 0, err
    assert "exported  weights  step 1  runs/mine/export/model.weights.h5" in out
    words = ("--set", "model.args.odd=true", "--set", "export=[keras]", "--name", "odd")
    code, out, err = run("train", "mine.yaml", *words, cwd=tmp_path)
    assert code == 3, out + err
    told = " ".join((out + err).split())
    line = LOCAL[: LOCAL.index("# odd")].count("\n") + 1
    failure = f"the export as keras could not be written: RuntimeError: has no config (mine.py:{line})"
    assert f"the export failed: {failure}; the run is done; once that" in told
    assert "Traceback" not in told
    listed = json.loads(run("runs", "--json", cwd=tmp_path)[1])
    assert {each["status"] for each in listed} == {"done"}
    assert f"export     failed: {failure}" in run("report", "runs/odd", cwd=tmp_path)[1]
    code, out, err = run("evaluate", "runs/odd", cwd=tmp_path)
    assert (code, "has no validation data" in err, "--split train" in err) == (2, True, True), err
    assert not (tmp_path / "runs/odd/attempts/1").exists()
    assert run("evaluate", "runs/odd", "--split", "train", "-q", cwd=tmp_path)[0] == 0
    code, out, err = run("logs", "runs/odd", cwd=tmp_path)
    assert "epoch 1/1" in out
    assert f"the export failed: {failure}" in out
    # once the function gives some, the processes find out
    (tmp_path / "mine.py").write_text(LOCAL.replace("X[:, :2])}", 'X[:, :2]), "validation": (X, X[:, :2])}'))
    assert run("evaluate", "runs/odd", "-q", cwd=tmp_path)[0] == 0
