"""A snapshot is a copy, under every strategy: a thread writes it while training goes on.

`python -m tests.parity.test_snapshot KIND` prints what is wrong with it, in a process of its own.
"""

from __future__ import annotations

import json
import sys

import pytest

from distlaunch.config.strategies import MODELS
from tests.parity.nonfinite_case import program_of
from tests.strategies import IN_ONE_PROCESS
from tests.warm import run_module


@pytest.mark.parametrize("kind", IN_ONE_PROCESS)
def test_training_does_not_change_a_snapshot(kind: str) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    out = run_module("tests.parity.test_snapshot", [kind], backend=MODELS[kind].backend, deadline_s=300)
    assert json.loads(out.splitlines()[-1]) == {"changed": [], "shared": [], "trained": True}


def main() -> None:
    from distlaunch.config.backend import choose_backend
    from tests.parity.train_jobs import prepare_devices

    [kind] = sys.argv[1:]
    choose_backend(MODELS[kind].backend)
    if kind != "parameter_server":
        prepare_devices(2)
    import numpy as np

    from distlaunch.strategies.coordination import Vote

    program = program_of(kind, "0", "fail")
    program.run_steps(2, Vote())
    first, second = program.snapshot(), program.snapshot()
    values = {name: value.tobytes() for name, value in first.items()}
    program.run_steps(4, Vote())
    later = program.snapshot()
    found = {
        "changed": [name for name, value in first.items() if value.tobytes() != values[name]],
        # TensorFlow and JAX keep what others look at, for a price in memory and time: that is no copy
        "shared": [name for name, value in first.items() if np.shares_memory(value, second[name])],
        "trained": all(later[name].tobytes() != values[name] for name in first if "kernel" in name),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
