"""One worker of a parameter-server cluster gives the numbers of one device, with variables whole and split."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.parity.cases import CASES
from tests.parity.test_replicas import DEADLINE_S, check

WHOLE_NORM = "mlp adamw clipped, skewed"  # clips each variable by its own norm, which split variables refuse
OPTIMIZERS = ("mlp sgd, uneven", "mlp momentum, last batch of one row", "mlp adam", "subclassed")
PARTITIONERS = {
    "whole": (None, tuple(CASES)),
    "fixed_shards": ({"num_shards": 2}, tuple(name for name in CASES if name != WHOLE_NORM)),
    "min_size": ({"min_shard_bytes": 64, "max_shards": 3}, (*OPTIMIZERS, "embeddings, sparse gradients")),
    "max_size": ({"max_shard_bytes": 128}, (*OPTIMIZERS, "embeddings, sparse gradients")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Records of all cases under one partitioner, from a process that hosts a worker and two servers."""
    made: dict[str, dict] = {}

    def train(kind: str) -> dict:
        if kind not in made:
            arguments, names = PARTITIONERS[kind]
            partitioner = None if arguments is None else {"kind": kind, **arguments}
            job = {
                "strategy": {"kind": "parameter_server", "partitioner": partitioner},
                "cluster": {"workers": 1, "ps": 2, "hosting": "in_process"},
            }
            results = tmp_path_factory.mktemp("servers") / "results.json"
            environment = {**os.environ, "STRATEGY": json.dumps(job), "TF_CPP_MIN_LOG_LEVEL": "2"}
            command = [sys.executable, "-m", "tests.parity.train_case", str(results), *names]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
            assert done.returncode == 0, done.stderr[-3000:]
            made[kind] = json.loads(results.read_text())
        return made[kind]

    return train


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, names) in PARTITIONERS.items() for name in names]
)
def test_parameter_server(kind, name, trained, one_device):
    record = trained(kind)[name]
    assert (record["shards"] > 0) == (kind != "whole"), "variables are really split"
    check(record, one_device(name))
