"""The allocation of hosts with agents: which task runs on which host, at which address."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distlaunch.agent.remote.file_transfer import Incoming
from distlaunch.agent.remote.frames import encode
from distlaunch.agent.remote.task_files import most_bytes
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_mask import MASKED_ENV, REFERENCES_ENV
from distlaunch.cluster.hardware import POOL_SIZES
from distlaunch.cluster.spec import ClusterSpec, Place, Task, split_address
from distlaunch.engines.remote.link import Link, LinkError
from distlaunch.engines.remote.path_watch import PathWatch
from distlaunch.engines.remote.run_files import messages_with_run_files, open_run, replaced_by_tasks
from distlaunch.engines.remote.tasks import RemoteTasks
from distlaunch.plan.train import REMOVED_ENV, LaunchPlan
from distlaunch.supervise.allocation import Starter

FORWARDED = ("TF_", "XLA_", "JAX_", "KERAS_", "NCCL_", "GRPC_", "OMP_", "PYTHONHASHSEED")
"""Prefixes of variables that change what a framework computes. Tasks get these variables from the launcher's
environment, along with the sizes of thread pools."""
_LISTENING_S = 10.0
_BEAT_MS, _FEW_HOSTS = 500, 4
"""Interval at which a host sends the heartbeats of its tasks; doubled for more than `_FEW_HOSTS` hosts."""


def forwarded(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables that tasks get from the launcher. All other variables are those of their host."""
    wanted = {*names, *POOL_SIZES, MASKED_ENV, REFERENCES_ENV, *environ.get(REFERENCES_ENV, "").split(",")}
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(FORWARDED) or name in wanted) and name not in REMOVED_ENV
    }


@dataclass(frozen=True)
class RemoteAllocation:
    """Hosts on which agents run.

    Attributes:
        links: the hosts that get a task, by name.
        environ: variables for the tasks, in addition to their host's environment.
        note_host_failure: called with the name of a host that was lost, or on which a task was lost.
        patience_s: seconds without a step of any task after which the paths between hosts are tried.
    """

    places: tuple[Place, ...]
    links: Mapping[str, Link]
    environ: Mapping[str, str]
    note_host_failure: Callable[[str], None]
    engine: str
    patience_s: float = 15.0
    given: tuple[ClusterSpec, Task] | None = None
    notes: Sequence[str] = ()
    has_comparable_heartbeats: bool = False

    @contextmanager
    def starting(
        self, plan: LaunchPlan, show: Callable[[str, str], None], clock: Callable[[], float]
    ) -> Generator[Starter]:
        run = RunDir(plan.run_dir)
        copies, kept = open_run(run, list(self.links.values()))
        for host, path in kept.items():
            files = "it may have files that were not fetched; delete it if you do not need them"
            show(
                "", f"warning: {host}: the copy of this run that an earlier agent has left was moved to {path}; {files}"
            )
        incoming = Incoming(run.path, most_bytes)
        listening = {task.address: task.host for task in plan.tasks if task.address is not None}
        paths = PathWatch(self.links, listening, self.patience_s, clock)
        tasks = RemoteTasks(plan, self.links, incoming, show, self.environ, paths, self.note_host_failure, copies)
        # only the chief, which is the first task, and the evaluator read checkpoints
        readers = {plan.tasks[0].host, *(task.host for task in plan.tasks if task.task.job == "evaluator")}
        for name, link in self.links.items():
            link.take, link.on_lost = tasks.take, tasks.note_end
            if name in copies:
                existing = copies[name] if name in readers else None
                link.post_in_order(messages_with_run_files(run, plan.attempt, existing_checkpoints=existing))
            link.post_in_order([self._begin(plan)])
        try:
            yield tasks
        finally:
            tasks.collect(lambda: False)
            for name, link in self.links.items():
                link.take = link.on_lost = None
                link.keeps_copies = link.keeps_copies or bool(incoming.problem)
                if link.lost:
                    self.note_host_failure(name)
            if incoming.problem:
                show("", incoming.problem)
            tasks.close()

    def _begin(self, plan: LaunchPlan) -> bytes:
        beat_ms = _BEAT_MS if len(self.links) <= _FEW_HOSTS else 2 * _BEAT_MS
        at_once = replaced_by_tasks(plan)
        return encode("begin", attempt=plan.attempt, without=list(REMOVED_ENV), beat_ms=beat_ms, at_once=at_once)

    def import_ahead(self, plan: LaunchPlan) -> None:
        """Do nothing, since agents import modules ahead when they start tasks."""

    def listening(self, addresses: Collection[str]) -> set[str]:
        pending = {name: link.request("listening") for name, link in self.links.items()}
        until = time.monotonic() + _LISTENING_S
        ports: dict[str, set[int]] = {}
        for name, answer in pending.items():
            try:
                ports[name] = set(answer.result(max(0.0, until - time.monotonic())).fields["ports"])
            except (LinkError, TimeoutError):
                ports[name] = set()
        hosts = {place.address: place.host for place in self.places}
        return {each for each in addresses if split_address(each)[1] in ports.get(hosts.get(each, ""), ())}

    def release_ports(self) -> None:
        for link in self.links.values():
            link.post("release")

    def release(self) -> None:
        self.release_ports()
