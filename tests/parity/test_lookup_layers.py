"""Lookup layers within a model on parameter servers, where each worker has a copy of the lookup tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch import notebook
from tests.parity.optimizer_runs import STRATEGIES
from tests.parity.probe_models import dense
from tests.warm import run_module

WORDS = ["red", "green", "blue", "black"]
HERE = "tests.parity.test_lookup_layers"
KINDS = ("text", "words", "numbers")
RUNS = ("one_device", "parameter_server")


def model(kind: str) -> keras.Model:
    if kind == "text":
        x = keras.Input((1,), dtype="string")
        numbers = keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=3)(x)
        embedded = keras.layers.Embedding(7, 4, embeddings_initializer=keras.initializers.GlorotUniform(seed=2))(
            numbers
        )
        found: Any = keras.layers.GlobalAveragePooling1D()(embedded)
    elif kind == "words":
        x = keras.Input((1,), dtype="string")
        found = keras.layers.StringLookup(vocabulary=WORDS, output_mode="one_hot")(x)
    else:
        x = keras.Input((1,), dtype="int64")
        found = keras.layers.IntegerLookup(vocabulary=[3, 14, 15, 92], output_mode="multi_hot")(x)
    made = keras.Model(x, dense(1, 1)(found))
    made.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return made


def data(kind: str) -> dict[str, Any]:
    at = np.random.default_rng(0).integers(0, 4, 59)
    values = np.array([15, 3, 92, 14]) if kind == "numbers" else np.array(WORDS, object)
    x, y = values[at][:, None], at[:, None].astype("float32")
    return {"train": (x, y), "validation": (x[:20], y[:20])}


def history(strategy: str, folder: Path) -> Any:
    """Return the history of a training of each model."""
    found = {}
    for kind in KINDS:
        config = {
            "name": "lookup",
            "model": {"function": f"{HERE}:model", "args": {"kind": kind}},
            "data": {"function": f"{HERE}:data", "args": {"kind": kind}, "global_batch": 16, "shuffle": False},
            "train": {"epochs": 2},
            **STRATEGIES[strategy],
        }
        found[kind] = notebook.train(config, runs_dir=folder / kind).history
    return found


@pytest.mark.slow
def test_workers_look_up_what_one_device_does() -> None:
    output = [run_module("tests.parity.optimizer_runs", [kind, f"{HERE}.history"], deadline_s=200) for kind in RUNS]
    one, servers = (json.loads(out.splitlines()[-1])[f"{HERE}.history"] for out in output)
    for kind in KINDS:
        assert one[kind]["val_loss"][1] < one[kind]["val_loss"][0]
        assert servers[kind].keys() == one[kind].keys()
        for name, values in one[kind].items():
            assert servers[kind][name] == pytest.approx(values, rel=1e-5), (kind, name)
