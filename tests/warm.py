"""Modules of tests as processes of their own, forked from one that has imported their framework."""

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
from distlaunch.base.protocol import UNBUFFERED
from distlaunch.plan.preload import READ_LATE
from tests.conftest import is_cold

DEADLINE_S = 900.0
_ENVIRON = {"TF_CPP_MIN_LOG_LEVEL": "2", **UNBUFFERED}


@functools.cache
def _pool() -> WarmStarts:
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
    """`python -m MODULE ARGUMENTS` until it has ended well; returns what it printed."""
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
    """The same in several processes at once.

    Args:
        folder: for their logs.
        late: variables of each that nothing reads while it is imported.
    """
    with HostTasks(lambda task, line: None, time.monotonic, _pool()) as host:
        tasks = []
        for index, own in enumerate(late):
            what = Preload("distlaunch.tasks.preload", (backend,), (*READ_LATE, "PYTEST_CURRENT_TEST", *sorted(own)))
            logs = folder / f"{index}.out", folder / f"{index}.err", folder / "heartbeat"
            argv, env = (sys.executable, "-m", module, *arguments), {**os.environ, **_ENVIRON, **own}
            tasks.append(host.start(TaskSpec(str(index), argv, env, *logs, None if is_cold() else what)))
        until = time.monotonic() + deadline_s
        while any(task.poll() is None for task in tasks):
            assert time.monotonic() < until, f"{module} has not ended within {deadline_s:g} s"
            host.wait(0.1)
        codes = [end.code for task in tasks if (end := task.poll()) is not None]
    logs = itertools.chain.from_iterable((folder / f"{i}.out", folder / f"{i}.err") for i in range(len(tasks)))
    assert codes == [0] * len(tasks), "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
