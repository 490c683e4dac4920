"""Trains parity cases and records every step's values; run as a script it is one task of a multi-worker job.

TF_CONFIG=... python -m tests.parity.train_case RESULTS.json CASE...
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras

from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.events import EpochEnded, Event, StepsDone
from distlaunch.strategies import create
from distlaunch.strategies.protocol import Strategy
from distlaunch.training.build import build_model
from distlaunch.training.checkpoint import CheckpointStore, Progress
from distlaunch.training.data import make_split, read_splits
from distlaunch.training.loop import Surroundings, TrainingLoop
from distlaunch.training.steps import make_steps
from tests.parity.cases import CASES

Record = dict[str, Any]


def train_case(name: str, strategy: Strategy, *, permute: int = 0, steps_per_call: int | str = "auto") -> Record:
    """Logs of every step, and the final weights, of one case under one strategy."""
    raw = copy.deepcopy(CASES[name])
    raw["train"]["steps_per_call"] = steps_per_call
    if permute:
        raw["data"]["args"]["permute"] = permute
    config = RunConfig.model_validate(raw)
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.seed)
    splits = read_splits(config.data)
    train = make_split(splits.train, config.data, seed=0, training=True)
    validation = make_split(splits.validation, config.data, seed=0, training=False)
    model = build_model(config, strategy, train.first_rows(2))
    program = strategy.program(make_steps(config, model))
    record: Record = {"steps": [], "epochs": []}

    def emit(event: Event) -> None:
        if isinstance(event, StepsDone):
            record["steps"].append(event.logs)
        if isinstance(event, EpochEnded):
            record["epochs"].append(event.logs)

    around = Surroundings(emit, lambda: False, CheckpointStore(Path("unused")), is_chief=False)
    TrainingLoop(config, model, program, train, validation, [], around).run(Progress(), None)
    record["weights"] = {weight.path: weight.numpy().tolist() for weight in model.weights}
    return record


def main() -> None:
    results, *names = sys.argv[1:]
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    kind = {"kind": "multi_worker_mirrored"}
    config = RunConfig.model_validate({**CASES["mlp adam"], "strategy": kind, "cluster": {"workers": 2}})
    strategy = create(config, Task(task["type"], task["index"]))
    records = {name: train_case(name, strategy) for name in names}
    if strategy.is_chief:
        Path(results).write_text(json.dumps(records))
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
