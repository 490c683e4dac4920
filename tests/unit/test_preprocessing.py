"""The layer before the model: made once, kept, the same for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.base.run_dir import RunDir  # noqa: E402
from distlaunch.cluster.environment import describe_environment  # noqa: E402
from distlaunch.cluster.machine import Machine  # noqa: E402
from distlaunch.config.read.load import dump_config  # noqa: E402
from distlaunch.config.read.load_run import load_run  # noqa: E402
from distlaunch.config.resume import keep_preprocessing  # noqa: E402
from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.data.random_ops import random_warnings  # noqa: E402
from distlaunch.data.source import open_splits  # noqa: E402
from distlaunch.training.export.writers import save_saved_model  # noqa: E402
from tests.warm import run_modules  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")

MODULE = (Path(__file__).parent / "user_code" / "preprocessing.py").read_text()


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(MODULE)

    def make(function: str = "vectorizer", **args: Any) -> RunConfig:
        data = {
            "function": f"{tmp_path}/mine.py:texts",
            "preprocessing": {"function": f"{tmp_path}/mine.py:{function}", "args": args},
            "global_batch": 5,
            "shuffle": False,
        }
        return RunConfig.model_validate({"model": {"function": "unused:model"}, "data": data})

    return make


def test_it_is_made_once_and_used_for_both_splits(config: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for _ in range(2):
        splits, train, validation = open_splits(config(), run)
        x, y = train.first_rows(2)
        assert x.shape == (2, 5)  # [UNK], film, good, bad, so
        assert y.numpy().tolist() == [1, 0]
        np.testing.assert_array_equal(validation.first_rows(2)[0], x)
        assert splits.preprocessing.input_spec.dtype == tf.string
    assert (tmp_path / "calls").read_text() == "x"
    open_splits(config(max_tokens=3), run)
    assert (tmp_path / "calls").read_text() == "xx", "other arguments make another layer"


@pytest.mark.parametrize("with_code", [True, False])
def test_a_run_that_was_moved_keeps_its_layer(config: Any, tmp_path: Path, with_code: bool) -> None:
    project, vocabulary = tmp_path / "project", tmp_path / "elsewhere.txt"
    run = RunDir(project / "runs" / "job")
    run.path.mkdir(parents=True)
    (tmp_path / "mine.py").rename(project / "mine.py")
    vocabulary.touch()
    args = {"max_tokens": 4, "source": str(vocabulary)}

    def given(**changed: Any) -> RunConfig:
        text = json.dumps(config(**{**args, **changed}).to_plain())
        text = text.replace("unused:model", f"{tmp_path}/mine.py:texts").replace("/mine.py", "/project/mine.py")
        plain = json.loads(text)
        return RunConfig.model_validate(plain)

    _record(run, given(), project)
    calls = project / "calls"
    made, _, _ = open_splits(given(), run)
    assert calls.read_text() == "x"

    now = tmp_path / "moved"
    if with_code:
        project.rename(now)
        calls = now / "calls"
        run = RunDir(now / "runs" / "job")
    else:
        run.path.rename(now)
        run = RunDir(now)
    moved = load_run(run, (), Machine({})).config
    assert (moved.data.preprocessing == given().data.preprocessing) is not with_code
    keep_preprocessing(moved, run)
    splits, _, _ = open_splits(moved, run)
    assert calls.read_text() == "x", "the layer was made again"
    assert splits.preprocessing.layer.get_vocabulary() == made.preprocessing.layer.get_vocabulary()

    other = load_run(run, ("data.preprocessing.args.max_tokens=3",), Machine({})).config
    keep_preprocessing(other, run)
    open_splits(other, run)
    assert calls.read_text() == "xx", "other arguments make another layer"


def _record(run: RunDir, config: RunConfig, folder: Path) -> None:
    """Write the files with which an attempt begins."""
    run.attempt_config(0).parent.mkdir(parents=True)
    for path in (run.config, run.attempt_config(0)):
        path.write_text(dump_config(config))
    run.write_json(run.environment, describe_environment([], folder, run))


class Shuffled(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(6)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        rows = self.order[3 * index : 3 * index + 3].astype("float32")
        return rows[:, None], rows

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def shuffled() -> dict[str, Any]:
    return {"train": Shuffled()}


def adapted(inputs: tf.data.Dataset) -> Any:
    layer = keras.layers.Normalization()
    layer.adapt(inputs)
    return layer


def test_adapting_to_a_py_dataset_leaves_its_order(tmp_path: Path) -> None:
    def first_labels(run: str, preprocessing: dict[str, Any] | None) -> list[float]:
        data = {"function": f"{__name__}:shuffled", "preprocessing": preprocessing}
        _, train, _ = open_splits(
            RunConfig.model_validate({"model": {"function": "unused:model"}, "data": data}), RunDir(tmp_path / run)
        )
        source = train.training_source(0, 0, ends_visible=False, batches=2)
        return [label for batch in source.elements.take(2) for label in np.asarray(source.load(batch)[1]).tolist()]

    expected = first_labels("none", None)
    for _ in range(2):  # when the layer is adapted, and when it is loaded
        assert first_labels("one", {"function": f"{__name__}:adapted"}) == expected


def images() -> dict[str, Any]:
    x = np.random.default_rng(0).uniform(size=(6, 8, 8, 3)).astype("float32")
    return {"train": (x, np.arange(6)), "validation": (x, np.arange(6))}


def flipped(inputs: tf.data.Dataset) -> Any:
    flip = keras.layers.RandomFlip(seed=1, name="the_flip")
    return keras.Sequential([keras.layers.Rescaling(0.5), flip, keras.layers.Dropout(0.9, name="the_dropout")])


def test_random_layers_change_nothing_and_are_named(tmp_path: Path) -> None:
    data = {"function": f"{__name__}:images", "preprocessing": {"function": f"{__name__}:flipped"}, "global_batch": 6}
    raw = {"model": {"function": "unused:model"}, "data": {**data, "shuffle": False}}
    config = RunConfig.model_validate(raw)
    splits, train, validation = open_splits(config, RunDir(tmp_path))
    for split in (train, validation):
        np.testing.assert_allclose(split.first_rows(6)[0], images()["train"][0] * 0.5, rtol=1e-6)
    (warning,) = random_warnings(config.data, train, splits.preprocessing)
    assert "data.preprocessing: the_flip, the_dropout change nothing" in warning
    model = keras.Sequential([keras.layers.Input((8, 8, 3)), keras.layers.Flatten()])
    save_saved_model(model, tmp_path / "saved", train.first_rows(2), splits.preprocessing)
    served = tf.saved_model.load(tmp_path / "saved").serve(images()["train"][0])
    np.testing.assert_allclose(served, images()["train"][0].reshape(6, -1) * 0.5, rtol=1e-6)


def test_a_layer_that_exists_is_read_without_writing(config: Any, tmp_path: Path) -> None:
    open_splits(config(), RunDir(tmp_path / "run"))
    (lock,) = (tmp_path / "run" / "preprocessing").glob("*.lock")
    lock.unlink()
    open_splits(config(), RunDir(tmp_path / "run"))
    assert not lock.exists()


def table(config: Any, **args: Any) -> RunConfig:
    """A table of mixed columns, and a FeatureSpace for it."""
    found = config("space", **args)
    return found.model_copy(
        update={"data": found.data.model_copy(update={"function": str(found.data.function).replace("texts", "table")})}
    )


def test_a_feature_space_is_kept_and_used_like_any_layer(config: Any, tmp_path: Path) -> None:
    import importlib.util

    run = RunDir(tmp_path / "run")
    first, again = ([split.first_rows(4)[0] for split in open_splits(table(config), run)[1:]] for _ in range(2))
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    x = mine.table()["train"][0]
    expected = mine.space(tf.data.Dataset.from_tensor_slices(x).batch(2))(x)
    assert expected.shape == (4, 3 + 3 + 1 + 8)
    for train, validation in (first, again):
        np.testing.assert_allclose(train, expected, rtol=1e-6)
        np.testing.assert_allclose(validation, expected[:3], rtol=1e-6)
    by_name = open_splits(table(config, output_mode="dict"), run)[1].first_rows(4)[0]
    assert set(by_name) == {"age", "kind", "size", "age_X_kind"}


def test_a_saved_model_with_a_feature_space_takes_columns_by_name(config: Any, tmp_path: Path) -> None:
    splits, train, _ = open_splits(table(config), RunDir(tmp_path / "run"))
    model = keras.Sequential([keras.layers.Input((15,)), keras.layers.Dense(1)])
    save_saved_model(model, tmp_path / "saved", train.first_rows(2), splits.preprocessing)
    signature = tf.saved_model.load(str(tmp_path / "saved")).signatures["serve"]
    specs = signature.structured_input_signature[1]
    assert {name: spec.dtype.name for name, spec in specs.items()} == {
        "age": "int64",
        "kind": "string",
        "size": "float32",
    }
    served = signature(age=tf.constant([30], tf.int64), kind=tf.constant(["b"]), size=tf.constant([1.0]))
    expected = model(train.first_rows(2)[0])[1:]
    np.testing.assert_allclose(next(iter(served.values())), expected, rtol=1e-5)


def test_layers_made_before_do_not_rename_the_models_variables(config: Any) -> None:
    """The process that makes the layer makes more of them than the one that loads it; checkpoints know names."""
    from distlaunch.strategies.replica.one_device import OneDevice
    from distlaunch.training.build import build_model

    raw = {**config().to_plain(), "model": {"function": f"{__name__}:unnamed"}, "compile": {"loss": "mse"}}
    rows = (np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32))
    for _ in range(2):
        keras.Sequential([keras.layers.Dense(1)])
        model = build_model(RunConfig.model_validate(raw), OneDevice(), rows)
        assert [weight.path for weight in model.weights] == ["sequential/dense/kernel", "sequential/dense/bias"]


def unnamed() -> Any:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def test_processes_that_start_together_share_one(config: Any, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "mine.py"), config().model_dump_json(), str(tmp_path / "run")]
    run_modules(tmp_path, "tests.run_file", arguments, [{}, {}])
    first, second = ((tmp_path / f"{index}.out").read_text() for index in range(2))
    assert first == second != ""
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", "returned int; expected a Keras layer"),
        ("unregistered", "register_keras_serializable"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_what_is_no_layer_or_cannot_be_kept(function: str, words: str, config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        open_splits(config(function), RunDir(tmp_path / "run"))


def test_arguments_it_does_not_take(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_token"):
        open_splits(config(max_token=3), RunDir(tmp_path / "run"))
