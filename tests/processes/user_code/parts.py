import json
import os
import pathlib
import signal

import keras
import numpy as np

from distlaunch.checkpoints import writers

layers = keras.layers
given = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
order = pathlib.Path("order")


def die_once(who, step):
    if order.exists() and order.read_text() == who and step in (None, 20):
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


write, commit = writers.write_file, writers.CheckpointStore.commit


def write_file(folder, name, *words):
    (folder / name).write_bytes(b"half")
    die_once(f"part of {given['index']}", int(folder.name.split(".")[1].removeprefix("step-")))
    (folder / name).unlink()
    return write(folder, name, *words)


def commit_all(self, folder, files, progress, *words, **more):
    die_once("commit", progress.step)
    return commit(self, folder, files, progress, *words, **more)


writers.write_file, writers.CheckpointStore.commit = write_file, commit_all


def model():
    return keras.Sequential([layers.Input((12,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(4)])


def data():
    x = np.random.default_rng(0).normal(size=(96, 12)).astype("float32")
    return {"train": (x, x[:, :4])}
