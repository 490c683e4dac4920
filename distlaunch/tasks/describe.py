"""Finds the facts of `distlaunch plan` that need TensorFlow.

`python -m distlaunch.tasks.describe WHAT CONFIG GPUS ANSWER`. WHAT is `variables` to build the config's model and find
where its variables are placed, or `data` to read its data and find which process reads what. GPUS is the number of GPUs
that a run would see. The file ANSWER gets one JSON object: `variables` and `mesh` as in VariablesPlaced, the result of
`data/overview.py`, or `problems`. Servers run inside this process, and nothing is trained.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, ExitCode
from distlaunch.base.run_dir import RunDir
from distlaunch.base.user_modules import begin_program
from distlaunch.cluster.spec import Task
from distlaunch.config.backend import choose_backend
from distlaunch.config.read.load import load_resolved
from distlaunch.config.references.modules import program_of
from distlaunch.config.run import RunConfig
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.process_end import end_process


def main() -> None:
    refuse_input()
    what, config, gpus, answer = sys.argv[1:]
    describe = functools.partial(_data if what == "data" else _variables, num_gpus=int(gpus))
    code, facts = _describe(describe, config)
    if facts is not None:
        Path(answer).write_text(json.dumps(facts), encoding="utf-8")
    end_process(code)  # servers in this process cannot be stopped


def _describe(
    describe: Callable[[RunConfig, RunDir], dict[str, Any]], path: str
) -> tuple[ExitCode, dict[str, Any] | None]:
    try:
        config = load_resolved(path, os.environ)
        choose_backend(config.strategy.backend)
        begin_program(program_of(config))
        # in the launcher's folder, which is deleted even if this process is killed
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
            return ExitCode.DONE, describe(config, RunDir(folder))
    except ConfigError as error:
        return ExitCode.USAGE, {"problems": [problem.to_plain() for problem in error.problems]}
    except Exception:  # the user's functions may raise anything; the launcher shows the last line
        traceback.print_exc()
        return ExitCode.FAILED, None


def _variables(config: RunConfig, run: RunDir, num_gpus: int) -> dict[str, Any]:
    config = _with_mesh_of_gpus(config, num_gpus)
    if config.strategy.has_coordinator:
        in_process = config.cluster.model_copy(update={"hosting": "in_process", "ports": "auto"})
        config = config.model_copy(update={"cluster": in_process})
    from distlaunch.base.process import Process
    from distlaunch.patches.tensorflow_autograph import keep_in_memory
    from distlaunch.patches.tensorflow_late import when_imported
    from distlaunch.training.session import Session

    # after the imports of Session: hooks of the frameworks are skipped, those of the user are not
    end_process.skip_earlier_hooks()
    when_imported(keep_in_memory)
    session = Session.build(config, run, Task("chief", 0), Process(lambda event: None, lambda: False))
    return {"variables": session.program.placement(), "mesh": session.program.mesh()}


def _with_mesh_of_gpus(config: RunConfig, num_gpus: int) -> RunConfig:
    """Replace a size of -1 in the mesh by the one that a run would choose, since this process hides the GPUs."""
    from distlaunch.config.strategies.mesh import MeshSection
    from distlaunch.strategies.mesh.strategy import mesh_sizes

    section = config.strategy
    if not (num_gpus and isinstance(section, MeshSection) and config.engine.is_here):
        return config
    sizes, _ = mesh_sizes(section, config.cluster.num_workers, num_gpus)
    return config.model_copy(update={"strategy": section.model_copy(update={"mesh": sizes})})


def _data(config: RunConfig, run: RunDir, num_gpus: int) -> dict[str, Any]:
    from distlaunch.data.overview import overview
    from distlaunch.data.seeds import seed_process

    end_process.skip_earlier_hooks()
    seed_process(config)
    return overview(config, run, num_gpus)


if __name__ == "__main__":
    main()
