"""Trains parity cases in a process of its own: `python -m tests.parity.train_jobs RESULTS.json JOBS`.

JOBS is a list of [name of the result, case, sections] as YAML or JSON, or a file of it. The case is a name or a config;
the sections are `strategy`, all of one kind, since Keras has one backend, and `cluster`. Meshes lie on 8 virtual CPU
devices. With TF_CONFIG it is one of several processes that share them, and the first writes the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.backend import choose_backend
from distlaunch.config.strategies import MODELS as KINDS


def main() -> None:
    results, listed = sys.argv[1:]
    jobs = yaml.safe_load(listed if listed.startswith("[") else Path(listed).read_text())
    kind = jobs[0][2]["strategy"]["kind"]
    choose_backend(KINDS[kind].backend)
    workers = 1
    if "TF_CONFIG" in os.environ:
        spec, _ = from_tf_config(os.environ["TF_CONFIG"])
        workers = len(spec.tasks)
    if kind in ("jax", "dtensor"):
        prepare_devices(8 // workers)
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create
    from tests.parity.cases import CASES
    from tests.parity.jax_cases import EXTRA
    from tests.parity.mesh_cases import MODELS
    from tests.parity.train_case import Record, train_case

    CASES.update({**EXTRA, **MODELS})
    records: dict[str, Record] = {}
    strategy = before = None
    for result, case, sections in jobs:
        raw = CASES[case] if isinstance(case, str) else case
        config = RunConfig.model_validate({**raw, "cluster": {"workers": workers}, **sections})
        if strategy is None or sections != before:  # processes and servers meet once
            strategy, before = create(config), sections
        records[result] = train_case(case, strategy, config=config)
        print(result, flush=True)
    assert strategy is not None
    if strategy.is_chief:
        Path(results).write_text(json.dumps(records))
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)  # as a worker: the frameworks' own end waits for peers


def prepare_devices(number: int) -> None:
    """Create `number` virtual CPU devices, which all jobs share. Their meshes may differ in size."""
    if os.environ["KERAS_BACKEND"] != "jax":
        from distlaunch.strategies.devices import virtual_cpus

        virtual_cpus(number)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", number)


if __name__ == "__main__":
    main()
