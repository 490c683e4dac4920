"""Tests of the state that callbacks keep when a run resumes, and of the arguments that the config sets again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.base.run_dir import RunDir  # noqa: E402
from distlaunch.checkpoints.callback_state import restore_state, stored_places, stored_state  # noqa: E402
from distlaunch.config.references import keras_names  # noqa: E402
from distlaunch.config.run import Callback  # noqa: E402
from distlaunch.training.callbacks import (  # noqa: E402
    build_callbacks,
    continue_log,
    missing_monitor,
    watch_batches,
)

MINE = """
import keras

class Count(keras.callbacks.Callback):
    def __init__(self, limit=3):
        super().__init__()
        self.most, self.left, self.seen = limit, 0, 0

    def on_train_begin(self, logs=None):
        self.left = self.most
"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs TensorBoard to work."""
    monkeypatch.setattr(keras_names, "IMPORTS", {})


def built(name: str, run: Path = Path("/none"), **args: Any) -> Any:
    (callback,) = build_callbacks([Callback(name=name, args=args)], is_chief=True, run=RunDir(run))
    return callback


def resume(first: Any, second: Any) -> dict[str, str]:
    state, arrays = stored_state(first)
    return restore_state(second, json.loads(json.dumps(state)), arrays)


def test_progress_goes_along_and_arguments_are_the_configs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path}/mine.py:Count"
    first = built(name, limit=3)
    first.on_train_begin()
    first.left, first.seen = 0, 7
    second = built(name, limit=20)
    second.on_train_begin()
    resume(first, second)
    assert (second.most, second.left, second.seen) == (20, 0, 7)


OWN = """
import collections
import keras, numpy as np

class Own(keras.callbacks.Callback):
    seen_by_class = 0

    def __init__(self, names=("a",), monitor="loss", limit=0.0):
        super().__init__()
        self.names, self.monitor = list(names), monitor
        self.limits, self.more_limits = np.full(2, limit), (np.full(1, limit), "a")
        self._steps, self.window, self.by_name, self._all = 0, [], {}, []
        self.rows, self.by_epoch, self.best, self._means, self._seen = [], {}, (0.0, 0), [np.zeros(1)], set()
        self.last, self.counts, self.files, self.opened = collections.deque(maxlen=2), collections.Counter(), [], []

    def on_train_begin(self, logs=None):
        self.window, self.file, self.opened, self.layers = [], object(), [object()], [object()]

    def work(self):
        self._steps += 3
        self.seen_by_class += 1
        self.window += [0.5, None]
        self.by_name["a"] = {"best": [1, 2.5]}
        self.params = {"epochs": 7}
        self._all = list(range(20_000))
        self.rows.append((0, np.float32(0.5)))
        self.by_epoch[3] = {"$tuple": [1]}
        self.best, self._seen = (0.5, 3), {"b", "a"}
        self._means[0] += 2
        self.last.extend([1, 2, 3])
        self.counts["a"] += 1
        self.files.append(object())
"""


def own(folder: Path, **args: Any) -> Any:
    (folder / "own.py").write_text(OWN)
    return built(f"{folder}/own.py:Own", **args)


def test_attributes_of_own_classes_are_restored(tmp_path: Path) -> None:
    """With their types, private or not; those that training has not changed are the config's."""
    first, second = own(tmp_path, names=["a"]), own(tmp_path, names=["b", "c"], limit=2.0)
    first.on_train_begin()
    first.work()
    second.set_params({"epochs": 9})
    second.on_train_begin()
    initial = resume(first, second)
    assert (second._steps, second.seen_by_class) == (3, 1)
    assert (second.window, second.by_name) == ([0.5, None], {"a": {"best": [1, 2.5]}})
    assert (second.rows, second.by_epoch) == ([(0, 0.5)], {3: {"$tuple": [1]}})
    assert (second.best, second._seen) == ((0.5, 3), {"a", "b"})
    assert (second._means[0].tolist(), first._means[0] is second._means[0]) == ([2.0], False)
    assert second.names == ["b", "c"], "from the config"
    assert (second.limits.tolist(), second.more_limits) == ([2.0, 2.0], (2.0, "a")), "from the config"
    assert second.params == {"epochs": 9}, "Keras sets it"
    assert (list(second.last), second.last.maxlen) == ([2, 3], 2)
    assert (second._all, second.counts, second.files) == ([], {}, [])
    assert initial == {
        "_all": "more than 10,000 entries",
        "counts": "values of the type Counter",
        "files": "values of the type object",
    }
    second.names.append("d")
    assert own(tmp_path, names=["b", "c"]).names == ["b", "c"]


def test_each_callback_finds_its_state(tmp_path: Path) -> None:
    stopping = lambda monitor: Callback(name="EarlyStopping", args={"monitor": monitor})  # noqa: E731
    mine, log = Callback(name=f"{tmp_path}/own.py:Own"), Callback(name="CSVLogger", args={"filename": "log.csv"})
    (tmp_path / "own.py").write_text(OWN)

    def places(*configs: Callback, is_chief: bool = True) -> list[int]:
        return stored_places(build_callbacks(list(configs), is_chief=is_chief, run=RunDir(tmp_path)), stored)

    before = build_callbacks([mine, stopping("loss"), stopping("val_loss"), mine], is_chief=True, run=RunDir(tmp_path))
    stored = [stored_state(callback)[0] for callback in before]
    assert places(mine, stopping("loss"), stopping("val_loss"), mine) == [0, 1, 2, 3]
    assert places(log, mine, stopping("loss"), stopping("val_loss"), mine) == [-1, 0, 1, 2, 3]
    assert places(log, mine, stopping("loss"), stopping("val_loss"), mine, is_chief=False) == [0, 1, 2, 3]
    assert places(stopping("val_loss"), stopping("loss")) == [2, 1]
    assert places(stopping("val_mae"), stopping("val_mae")) == [-1, -1]
    assert places(mine, mine, mine) == [0, 3, -1]


PATHS = """
import keras

class Mine(keras.callbacks.CSVLogger):
    pass

class Writer(keras.callbacks.Callback):
    def __init__(self, path, more):
        super().__init__()
        self.path, self.more = path, more
"""


@pytest.mark.parametrize(
    ("name", "argument", "given", "expected"),
    [
        ("CSVLogger", "filename", "log.csv", "RUN/log.csv"),
        ("CSVLogger", "filename", "new/folder/log.csv", "RUN/new/folder/log.csv"),
        ("CSVLogger", "filename", "${run_dir}/a/b/log.csv", "RUN/a/b/log.csv"),
        ("CSVLogger", "filename", "/there/log.csv", "/there/log.csv"),
        ("ModelCheckpoint", "filepath", "best/{epoch:02d}.keras", "RUN/best/{epoch:02d}.keras"),
        ("ModelCheckpoint", "filepath", "gs://bucket/best.keras", "gs://bucket/best.keras"),
        ("ModelCheckpoint", "filepath", "${run_dir}/best.keras", "RUN/best.keras"),
        ("BackupAndRestore", "backup_dir", "backup", "RUN/backup"),
        ("TensorBoard", "log_dir", "board", "RUN/board"),
        ("mine.py:Mine", "filename", "log.csv", "RUN/log.csv"),
    ],
)
def test_relative_paths_are_those_of_the_run(
    name: str, argument: str, given: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PATHS)
    reference = name.replace("mine.py", str(tmp_path / "mine.py"))
    callback = built(reference, tmp_path / "run", **{argument: given})
    found = getattr(callback, argument, None) or getattr(callback, f"_{argument}", None)
    assert found == expected.replace("RUN", str(tmp_path / "run"))
    if argument == "filename" and given[0] != "/":
        assert Path(found).parent.is_dir()


def test_the_run_directory_in_arguments_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PATHS)
    given = {"path": "log.txt", "more": [{"a": "${run_dir}/a", "b": 3}, "${run_dir}"]}
    callback = built(f"{tmp_path}/mine.py:Writer", tmp_path, **given)
    assert callback.path == "log.txt", "nobody knows that it is a path"
    assert callback.more == [{"a": f"{tmp_path}/a", "b": 3}, str(tmp_path)]
    assert built("TensorBoard", tmp_path).log_dir == str(tmp_path / "tensorboard")


def test_a_package_that_a_callback_imports_later_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_names, "IMPORTS", {"CSVLogger": "nowhere_to_be_found", "History": "json"})
    built("History")
    with pytest.raises(ConfigError, match="csv_logger needs the package nowhere") as error:
        built("csv_logger", filename="log.csv")
    assert error.value.problems[0].key == ("train", "callbacks", 0, "name")
    # others than the chief do not have it
    assert build_callbacks([Callback(name="CSVLogger")], is_chief=False, run=RunDir("/none")) == []


def test_orbax_only_records() -> None:
    """A callback that only records may be added to a finished run."""
    assert Callback(name="OrbaxCheckpoint", args={"directory": "all"}).only_records


def test_early_stopping_may_get_more_patience() -> None:
    first, second = (built("EarlyStopping", monitor="loss", patience=patience) for patience in (2, 20))
    first.on_train_begin()
    first.wait, first.best = 1, 0.5
    second.on_train_begin()
    resume(first, second)
    assert (second.wait, second.best, second.patience) == (1, 0.5, 20)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("epoch", [0, 2, 3, 5])
def test_a_csv_log_goes_on_without_what_is_trained_again(tmp_path: Path, epoch: int, append: bool) -> None:
    path = tmp_path / "log.csv"
    older = "0,9.0\n1,9.0\n2,9.0\n3,9.0\n" if append else ""  # of another run
    rows = ["0,0.1\n", "1,0.2\n", "2,0.3\n"]
    path.write_text("epoch,loss\n" + older + "".join(rows))
    first, second = (built("CSVLogger", filename=str(path), append=append) for _ in range(2))
    continue_log(second, epoch)
    second.set_model(keras.Sequential())
    second.on_train_begin()
    resume(first, second)
    second.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.6})
    second.on_train_end()
    assert path.read_text().splitlines() == [
        "epoch,loss",
        *(older + "".join(rows[:epoch])).splitlines(),
        f"{epoch},0.5,0.6",
    ]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, False),
        ({"update_freq": "epoch", "profile_batch": 0}, False),
        ({"update_freq": "batch"}, True),
        ({"update_freq": 100}, True),
        ({"write_steps_per_second": True}, True),
    ],
)
def test_a_tensorboard_that_counts_batches_sees_each_of_them(tmp_path: Path, args: Any, expected: bool) -> None:
    board = built("TensorBoard", tmp_path, **args)
    assert watch_batches([board]) is expected
    board._global_train_batch = 7
    resumed = built("TensorBoard", tmp_path, **args)
    resume(board, resumed)
    assert resumed._global_train_batch == 7


LOGS = {"loss": 1.0, "val_loss": 1.0, "val_psnr": 20.0}
MONITORS = {
    "the default is there": ({"name": "EarlyStopping", "args": {}}, None),
    "it is there": ({"name": "ReduceLROnPlateau", "args": {"monitor": "val_psnr"}}, None),
    "it is not": ({"name": "EarlyStopping", "args": {"monitor": "val_acc"}}, "'val_acc', which no epoch reports"),
    "not needed": ({"name": "ModelCheckpoint", "args": {"filepath": "a.keras", "monitor": "val_acc"}}, None),
    "needed": (
        {"name": "ModelCheckpoint", "args": {"filepath": "a.keras", "monitor": "val_acc", "save_best_only": True}},
        "ModelCheckpoint watches 'val_acc'",
    ),
    "another callback": ({"name": "TerminateOnNaN", "args": {}}, None),
    "the user's": ({"name": f"{__name__}:patient", "args": {}}, "'val_accuracy', which no epoch reports"),
}


def patient() -> Any:
    return keras.callbacks.EarlyStopping(monitor="val_accuracy")


@pytest.mark.parametrize("name", MONITORS)
def test_a_callback_that_watches_what_no_epoch_reports_is_named(name: str, tmp_path: Path) -> None:
    raw, expected = MONITORS[name]
    configs = [Callback(name="TerminateOnNaN", args={}), Callback(**raw)]
    callbacks = build_callbacks(configs, is_chief=True, run=RunDir(tmp_path))
    problem = missing_monitor(configs, callbacks, LOGS)
    if expected is None:
        assert problem is None
        return
    assert problem is not None
    assert problem.key[:3] == ("train", "callbacks", 1)
    assert expected in problem.message
    assert problem.message.endswith("expected one of loss, val_loss, val_psnr")
