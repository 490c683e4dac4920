"""Trains parity cases on meshes of 8 virtual CPU devices: `python -m tests.parity.train_jobs RESULTS.json JOBS`.

JOBS is a JSON list of [name of the result, name of the case, strategy], all of one kind. A process of its own: Keras
has one backend. With TF_CONFIG it is one of several processes that share the devices, and the first writes the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from distlaunch.backend import choose_backend
from distlaunch.cluster.spec import Task, from_tf_config


def main() -> None:
    results, listed = sys.argv[1:]
    jobs = json.loads(listed)
    choose_backend(jobs[0][2]["kind"])
    workers = len(from_tf_config(os.environ["TF_CONFIG"])[0].tasks) if "TF_CONFIG" in os.environ else 1
    prepare_devices(8 // workers)
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies import create
    from tests.parity.cases import CASES
    from tests.parity.jax_cases import EXTRA
    from tests.parity.mesh_cases import MODELS
    from tests.parity.train_case import Record, train_case

    CASES.update({**EXTRA, **MODELS})
    records: dict[str, Record] = {}
    strategy = None
    for result, name, raw in jobs:
        config = RunConfig.model_validate({**CASES[name], "strategy": raw, "cluster": {"workers": workers}})
        strategy = create(config, Task("worker", 0))
        records[result] = train_case(name, strategy, config=config)
        print(result, flush=True)
    assert strategy is not None
    if strategy.is_chief:
        Path(results).write_text(json.dumps(records))
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)  # as a worker: the frameworks' own end waits for peers


def prepare_devices(number: int) -> None:
    """For all jobs, which may have meshes of different sizes."""
    if os.environ["KERAS_BACKEND"] != "jax":
        from distlaunch.strategies.devices import virtual_cpus

        virtual_cpus(number)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", number)


if __name__ == "__main__":
    main()
