"""What callbacks take along when a run goes on, and what the config says anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from distlaunch.config.run import Callback  # noqa: E402
from distlaunch.training.callbacks import build_callbacks, continue_log, plain_state, restore_state  # noqa: E402

MINE = """
import keras

class Count(keras.callbacks.Callback):
    def __init__(self, limit=3):
        super().__init__()
        self.most, self.left, self.seen = limit, 0, 0

    def on_train_begin(self, logs=None):
        self.left = self.most
"""


def built(name: str, **args: Any) -> Any:
    (callback,) = build_callbacks([Callback(name=name, args=args)], is_chief=True, tensorboard_dir="")
    return callback


def test_progress_goes_along_and_arguments_are_the_configs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path}/mine.py:Count"
    first = built(name, limit=3)
    first.on_train_begin()
    first.left, first.seen = 0, 7
    second = built(name, limit=20)
    second.on_train_begin()
    restore_state(second, plain_state(first))
    assert (second.most, second.left, second.seen) == (20, 0, 7)


def test_early_stopping_may_get_more_patience() -> None:
    first, second = (built("EarlyStopping", monitor="loss", patience=patience) for patience in (2, 20))
    first.on_train_begin()
    first.wait, first.best = 1, 0.5
    second.on_train_begin()
    restore_state(second, plain_state(first))
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
    restore_state(second, plain_state(first))
    second.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.6})
    second.on_train_end()
    assert path.read_text().splitlines() == [
        "epoch,loss",
        *(older + "".join(rows[:epoch])).splitlines(),
        f"{epoch},0.5,0.6",
    ]
