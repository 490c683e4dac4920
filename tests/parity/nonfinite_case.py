"""Finds where a call of several steps ends if data spoils the loss: `python -m tests.parity.nonfinite_case KIND`."""

from __future__ import annotations

import json
import sys
from typing import Any

from distlaunch.config.strategies import MODELS
from tests.strategies import IN_ONE_PROCESS

STEPS, BATCH, BAD = 16, 24, 13


def spoilt(value: str) -> dict:
    """Step 13 has one label that is no finite number, in the rows of the last replica."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 12)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    y[BAD * BATCH - 1] = float(value)
    return {"train": (x, y)}


def linear() -> Any:
    import keras

    return keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(1)])


def first_call(kind: str, value: str, policy: str, loop: str = "fit", precision: str | None = None) -> list[Any]:
    """Steps done by one call of 16, the first whose loss is not finite, and whether the data ended there."""
    from distlaunch.strategies.coordination import Vote

    result = program_of(kind, value, policy, loop, precision).run_steps(STEPS, Vote())
    return [result.steps, result.nonfinite, result.ended]


def program_of(kind: str, value: str, policy: str, loop: str = "fit", precision: str | None = None) -> Any:
    """Ready to train on that data."""
    from distlaunch.config.run import RunConfig
    from distlaunch.data.source import make_split
    from distlaunch.data.splits import read_splits
    from distlaunch.strategies.factory import create
    from distlaunch.strategies.parameter_server.numbered_batches import offer_splits
    from distlaunch.training.build import build_model
    from distlaunch.training.steps.functions import make_steps

    here = "tests.parity.nonfinite_case"
    raw = {
        "model": {"function": f"{here}:linear"},
        "data": {"function": f"{here}:spoilt", "args": {"value": value}, "global_batch": BATCH, "shuffle": False},
        "compile": {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]},
        "train": {"on_nonfinite": policy, "loop": loop},
        "precision": precision,
    }
    config = RunConfig.model_validate({**raw, **IN_ONE_PROCESS[kind]})
    strategy = create(config)
    splits = read_splits(config.data)
    train = make_split(splits.train, config.data, seed=0, training=True)
    offer_splits(config, splits, train, None)
    model = build_model(config, strategy, train.first_rows(2))
    program = strategy.program(make_steps(config, model))
    program.set_train_data(train.training_source(0, 0, ends_visible=False))
    return program


def main() -> None:
    from distlaunch.config.backend import choose_backend
    from tests.parity.train_jobs import prepare_devices

    [kind] = sys.argv[1:]
    choose_backend(MODELS[kind].backend)
    if kind == "jax":
        prepare_devices(2)
    found = [
        first_call(kind, "nan", "fail"),
        first_call(kind, "inf", "warn"),
        first_call(kind, "-inf", "fail", "custom"),
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
