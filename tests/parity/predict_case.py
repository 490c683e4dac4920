"""Predicts with untrained models of parity cases. As a script, this is one task of a job that predicts all cases.

STRATEGY='{"kind": ...}' [TF_CONFIG=...] python -m tests.parity.predict_case RESULTS.npz CASE...

Meshes have 8 virtual CPU devices, shared by the processes of TF_CONFIG.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import keras
import numpy as np

from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.run import RunConfig
from distlaunch.data.source import make_split
from distlaunch.data.splits import read_splits
from distlaunch.strategies.factory import create
from distlaunch.strategies.protocol import Strategy
from distlaunch.training.build import build_model
from distlaunch.training.predictions import named_arrays
from distlaunch.training.steps.functions import make_steps
from tests.parity.cases import CASES
from tests.parity.train_jobs import prepare_devices


def predict_case(name: str, strategy: Strategy, kind: dict[str, Any]) -> dict[str, np.ndarray]:
    """Predictions by output for the first 50 examples of a case, in batches of 24, 24 and 2."""
    config = RunConfig.model_validate({**copy.deepcopy(CASES[name]), "strategy": kind})
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)
    split = make_split(read_splits(config.data).validation, config.data, seed=0, training=False)
    model = build_model(config, strategy, split.first_rows(2))
    program = strategy.program(make_steps(config, model))
    return named_arrays(program.predict(split.evaluation_source(), lambda: False))


def main() -> None:
    results, *names = sys.argv[1:]
    kind = json.loads(os.environ["STRATEGY"])
    workers = 1
    if "TF_CONFIG" in os.environ:
        workers = len(from_tf_config(os.environ["TF_CONFIG"])[0].tasks)
    if "mesh" in kind:
        prepare_devices(8 // workers)
    config = RunConfig.model_validate({**CASES["mlp adam"], "strategy": kind, "cluster": {"workers": workers}})
    strategy = create(config)
    found = {f"{name}/{key}": value for name in names for key, value in predict_case(name, strategy, kind).items()}
    if strategy.is_chief:
        np.savez(results, **found)
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
