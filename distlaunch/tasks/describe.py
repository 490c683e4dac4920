"""`python -m distlaunch.tasks.describe CONFIG ANSWER`: builds a config's model and says where its variables go.

For `distlaunch plan`. Writes one JSON object to the file ANSWER: `variables` and `mesh`, as VariablesPlaced has
them, or `problems`. Servers run inside this process and nothing is trained.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, ExitCode
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.backend import choose_backend
from distlaunch.config.read.load import load_resolved
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.process_end import end_process


def main() -> None:
    refuse_input()
    config, answer = sys.argv[1:]
    code, told = _describe(config)
    if told is not None:
        Path(answer).write_text(json.dumps(told), encoding="utf-8")
    end_process(code)  # servers in this process cannot be stopped


def _describe(path: str) -> tuple[ExitCode, dict[str, Any] | None]:
    # before TensorFlow is imported, which reads it then
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        config = load_resolved(path)
        choose_backend(config.strategy.backend)
        if config.strategy.has_coordinator:
            in_process = config.cluster.model_copy(update={"hosting": "in_process", "ports": "auto"})
            config = config.model_copy(update={"cluster": in_process})
        from distlaunch.strategies.patches.tensorflow_autograph import keep_in_memory
        from distlaunch.training.session import Session

        # after the imports of Session: hooks of the frameworks are skipped, those of the user are not
        end_process.skip_earlier_hooks()
        keep_in_memory()
        with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
            session = Session(
                config,
                RunDir(folder),
                Task("chief", 0),
                emit=lambda event: None,
                should_stop=lambda: False,
            )
            return ExitCode.DONE, {"variables": session.program.placement(), "mesh": session.program.mesh()}
    except ConfigError as error:
        return ExitCode.USAGE, {"problems": [problem.to_plain() for problem in error.problems]}
    except Exception:  # the user's model may raise anything; the last line is what is shown
        traceback.print_exc()
        return ExitCode.FAILED, None


if __name__ == "__main__":
    main()
