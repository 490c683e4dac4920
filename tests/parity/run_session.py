"""Goes on with a run from its newest checkpoint, in this process.

On JAX: python -m tests.parity.run_session RUN_DIR CONFIG_JSON STOP_AFTER
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def run_session(run_dir: str, raw: dict[str, Any], stop_after: int, *, export: bool = False) -> list[dict[str, float]]:
    """The logs of every step.

    Args:
        stop_after: steps after which the process is asked to stop.
        export: write the model in all formats then.
    """
    from distlaunch.cluster.spec import Task
    from distlaunch.config.run import RunConfig
    from distlaunch.events import Event, StepsDone
    from distlaunch.run_dir import RunDir
    from distlaunch.training.session import Session

    steps: list[dict[str, float]] = []

    def emit(event: Event) -> None:
        if isinstance(event, StepsDone):
            steps.append(event.logs)

    config = RunConfig.model_validate(raw)
    session = Session(config, RunDir(run_dir), Task("worker", 0), emit, lambda: len(steps) >= stop_after)
    session.run_training()
    if export:
        session.export(["keras", "saved_model"])
    return steps


if __name__ == "__main__":
    os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    print(json.dumps(run_session(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), export=True)))
