"""Resumes runs from their newest checkpoints. As a script, this is one task of a job that resumes all runs of a list.

[TF_CONFIG=...] python -m tests.parity.run_session RESULTS.json JOBS

JOBS is a JSON list of [run directory, config, steps after which to stop], all of one strategy. The results are the logs
of every step of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from distlaunch.cluster.spec import Task
from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.backend import choose_backend
from distlaunch.config.strategies import MODELS
from tests.parity.train_jobs import prepare_devices

Steps = list[dict[str, float]]


def run_session(run_dir: str, raw: dict[str, Any], stop_after: int, *, leave: bool = True) -> Steps:
    """The logs of every step.

    Args:
        stop_after: steps after which the process is asked to stop.
        leave: no other session of this process follows.
    """
    from distlaunch.base.events import Event, StepsDone
    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.config.run import RunConfig
    from distlaunch.training.session import Session

    steps: Steps = []

    def emit(event: Event) -> None:
        if isinstance(event, StepsDone):
            steps.append(event.logs)

    config, task = RunConfig.model_validate(raw), Task("worker", 0)
    if "TF_CONFIG" in os.environ:
        task = from_tf_config(os.environ["TF_CONFIG"])[1]
    session = Session.build(config, RunDir(run_dir), task, Process(emit, lambda: len(steps) >= stop_after))
    session.run_training()
    if leave:
        session.leave()
    return steps


def main() -> None:
    results, listed = sys.argv[1:]
    jobs = json.loads(listed)
    strategy, cluster = jobs[0][1]["strategy"], jobs[0][1].get("cluster", {})
    choose_backend(MODELS[strategy["kind"]].backend)
    if "mesh" in strategy:
        prepare_devices(8 // cluster.get("workers", 1))
    found = [
        run_session(run_dir, raw, stop_after, leave=number == len(jobs) - 1)
        for number, (run_dir, raw, stop_after) in enumerate(jobs)
    ]
    if "TF_CONFIG" not in os.environ or from_tf_config(os.environ["TF_CONFIG"])[1].index == 0:
        Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # as a worker: the frameworks' own end waits for peers


if __name__ == "__main__":
    main()
