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

jax.config.update("jax_num_cpu_devices", 8)

from distlaunch.cluster.spec import Task  # noqa: E402
from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.strategies import create  # noqa: E402
from tests.parity.cases import CASES  # noqa: E402
from tests.parity.jax_cases import EXTRA  # noqa: E402
from tests.parity.mesh_cases import MODELS  # noqa: E402
from tests.parity.train_case import Record, train_case  # noqa: E402


def main() -> None:
    results, jobs = sys.argv[1:]
    CASES.update({**EXTRA, **MODELS})
    records: dict[str, Record] = {}
    for result, name, strategy in json.loads(jobs):
        config = RunConfig.model_validate({**CASES[name], "strategy": strategy})
        records[result] = train_case(name, create(config, Task("worker", 0)), config=config)
        print(result, flush=True)
    Path(results).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
