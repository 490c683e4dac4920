"""Runs test modules as processes, forked from the same processes from which `real.start` forks launchers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlaunch.agent.host import HostTasks
from distlaunch.agent.messages import Preload, TaskSpec
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.protocol import LIFELINE_FD, SAFE_MODULE, UNBUFFERED
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables
from distlaunch.plan.train import READ_LATE
from tests.conftest import is_cold

DEADLINE_S = 900.0
_REPOSITORY = str(Path(__file__).parents[1])
# variables that differ between processes and that nothing reads while a framework is imported; a folder for temporary
# files is looked for anew after a fork
_OF_TESTS = ("PYTEST_CURRENT_TEST", "STRATEGY", "HOOKS", "BAD_KIND", "PYTHONBREAKPOINT", "TMPDIR")
_LATE = (*READ_LATE, LIFELINE_FD, "KERAS_BACKEND", *_OF_TESTS)


# variables that importing a framework or making a strategy sets, in the process of the tests too
_OF_FRAMEWORKS = (
    "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH",
    "TF2_BEHAVIOR", "TF_CPP_MIN_LOG_LEVEL", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "TPU_SKIP_MDS_QUERY",
)  # fmt: skip


def preload(backend: str) -> Preload:
    """The imports of a process for tests; processes with the same backend are forked from the same process."""
    return Preload("tests.processes.warm_launcher", (backend,), _LATE)


def environment(**own: str) -> dict[str, str]:
    """Return the environment of a forked process. Other values of variables outside `_LATE` need a new warm process.

    It has what a launcher gives its tasks on this machine; `forked_launcher` takes it out for the launcher itself.
    """
    ours = {name: value for name, value in os.environ.items() if name not in _OF_FRAMEWORKS}
    return {**kept_variables(Machine.here().hardware), **ours, "PYTHONPATH": _REPOSITORY, **UNBUFFERED, **own}


@functools.cache
def pool() -> WarmStarts:
    """The pool of this session."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(WarmStarts().kept())


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    backend: str = "tensorflow",
    late: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> str:
    """Run `python -m MODULE ARGUMENTS`, and return its output; fail if it fails."""
    with tempfile.TemporaryDirectory() as name:
        run_modules(Path(name), module, arguments, [late or {}], backend=backend, deadline_s=deadline_s)
        return (Path(name) / "0.out").read_text()


def run_modules(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    late: Sequence[Mapping[str, str]],
    *,
    backend: str = "tensorflow",
    deadline_s: float = DEADLINE_S,
) -> None:
    """Run several modules at the same time; see `run_module`.

    Args:
        folder: for their logs.
        late: variables of each that nothing reads while it is imported.
    """
    with HostTasks(lambda task, line: None, time.monotonic, pool()) as host:
        tasks = []
        for index, own in enumerate(late):
            assert set(own) <= set(_LATE), own
            logs = folder / f"{index}.out", folder / f"{index}.err", folder / "heartbeat"
            argv, what = (sys.executable, *SAFE_MODULE, module, *arguments), None if is_cold() else preload(backend)
            tasks.append(host.start(TaskSpec(str(index), argv, environment(**own), *logs, what)))
        until = time.monotonic() + deadline_s
        while any(task.poll() is None for task in tasks):
            assert time.monotonic() < until, f"{module} has not ended within {deadline_s:g} s"
            host.wait(0.1)
        codes = [end.code for task in tasks if (end := task.poll()) is not None]
    logs = itertools.chain.from_iterable((folder / f"{i}.out", folder / f"{i}.err") for i in range(len(tasks)))
    assert codes == [0] * len(tasks), "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
