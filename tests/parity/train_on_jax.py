"""Trains parity cases on JAX meshes of 8 virtual CPU devices: `python -m tests.parity.train_on_jax RESULTS.json JOBS`.

JOBS is a JSON list of [name of the result, name of the case, strategy]. A process of its own: Keras has one backend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
import jax
import keras

jax.config.update("jax_num_cpu_devices", 8)

from distlaunch.cluster.spec import Task  # noqa: E402
from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.strategies import create  # noqa: E402
from tests.parity.cases import ADAMW, CASES, UNEVEN, case  # noqa: E402
from tests.parity.train_case import Record, train_case  # noqa: E402

layers = keras.layers

# cases that cannot be compared with TensorFlow, whose random numbers differ
CASES["dropout"] = case(optimizer=ADAMW, data_args=UNEVEN)
CASES["dropout"]["model"]["function"] = "tests.parity.train_on_jax:dropout"
CASES["own train_step of JAX"] = case("subclassed", data_args=UNEVEN)
CASES["own train_step of JAX"]["model"]["function"] = "tests.parity.train_on_jax:own_train_step"


def dropout() -> keras.Model:
    """Dropout and BatchNorm."""
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


class OwnTrainStep(keras.Sequential):
    """A step as in Keras's guide to custom steps on JAX."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "rows": data[0].shape[0]}, state


def own_train_step() -> keras.Model:
    return OwnTrainStep([layers.Input((12,)), layers.Dense(32, activation="relu"), layers.Dense(4)])


def main() -> None:
    results, jobs = sys.argv[1:]
    records: dict[str, Record] = {}
    for result, name, strategy in json.loads(jobs):
        config = RunConfig.model_validate({**CASES[name], "strategy": strategy})
        records[result] = train_case(name, create(config, Task("worker", 0)), config=config)
        print(result, flush=True)
    Path(results).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
