"""Offers the state of a run as OpenMetrics: `python -m distlaunch.runs.metrics RUN [--socket FD] [--file FILE]`.

This separate process reads the run's events from the disk, so that no scrape delays or fails the run. The process ends
at the end of its standard input.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from distlaunch.base.errors import reason_of
from distlaunch.base.event_files import EventReader
from distlaunch.base.events import Event, StepsTimed, TaskStarted
from distlaunch.base.priority import yield_to_training
from distlaunch.base.protocol import PROBLEM
from distlaunch.base.run_dir import RunDir, write_given_file
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.runs.bottleneck import task_summary
from distlaunch.runs.paths import display_path

_INTERVAL_S = 5.0
"""Time between two versions of the text file."""
_OF_TASKS = {
    "examples_per_s": ("examples_per_second", "Examples per second since the attempt began"),
    "input_share": ("input_wait_ratio", "Share of the time of steps in which the task waits for input"),
    "peers_share": (
        "peers_wait_ratio",
        "Share of the time of steps in which the task waits for the other tasks' gradients",
    ),
    "cores": ("busy_cores", "Cores that are busy during steps, on average"),
    "memory_bytes": ("memory_bytes", "Resident memory of the task's process"),
    "gpu_percent": ("gpu_utilization_percent", "Mean utilization of the task's GPUs"),
    "gpu_memory_bytes": ("gpu_memory_bytes", "Memory in use on the task's GPUs, by all processes"),
}


class RunCollector(Collector):
    """The state of a run when it is collected.

    Args:
        run: the run, which may not have written anything yet.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._reading = threading.Lock()
        self._facts = RunFacts()
        self._events = EventReader(run.events)
        self._of_tasks: dict[Path, EventReader] = {}
        self._last_at = 0.0

    def collect(self) -> Iterator[Metric]:
        # the server answers each request in a thread of its own
        with self._reading:
            self._read()
            return iter(list(self._metrics()))

    def _read(self) -> None:
        for event in self._events.read():
            self._add(event)
        if not self._facts.attempts:
            return
        # the run's file has the host and times of the chief, and other tasks have files of their own
        number = max(self._facts.attempts)
        facts = self._facts.attempts[number]
        for files in self._run.tasks(number).values():
            reader = self._of_tasks.setdefault(files.events, EventReader(files.events))
            for event in reader.read():
                match event:
                    case TaskStarted():
                        facts.hosts[event.task] = event.host
                    case StepsTimed():
                        facts.timed[event.task] = event
                    case _:
                        pass

    def _add(self, event: Event) -> None:
        self._facts.add(event)
        self._last_at = event.time

    def _metrics(self) -> Iterator[Metric]:
        facts, now, start = self._facts, self._facts.now, self._facts.start
        # until an attempt begins to train, the run is where the last one has left it
        trained = facts.last_trained()
        info = {"run": self._run.name, "path": str(self._run.path)}
        if start is not None:
            info |= {"strategy": start.strategy, "optimizer": start.optimizer}
        yield InfoMetricFamily("distlaunch_run", "The run", info)
        ended = now.ended.status if now.ended else ""
        # a launcher that was killed has recorded no end
        running = not ended and self._run.is_busy()
        yield self._gauge("running", "1 while an attempt is running, else 0", int(running))
        yield self._gauge("failed", "1 if the last attempt has failed, else 0", 1 if ended == "failed" else 0)
        yield self._gauge("attempt", "Number of the attempt, from 0", max(facts.attempts, default=0))
        restarts = CounterMetricFamily(
            "distlaunch_task_restarts", "Restarts of a task while the others continued", labels=["run", "task"]
        )
        for task, number in sorted(facts.restarts.items()):
            restarts.add_metric([self._run.name, task], number)
        yield restarts
        yield self._gauge("step", "Steps since the run began", trained.step)
        yield self._gauge("epochs_done", "Complete epochs", trained.epochs_done)
        if start is not None:
            yield self._gauge("epochs", "Epochs in all", start.epochs)
            yield self._gauge("replicas", "Replicas", start.replicas)
        values = self._family("value", "Newest values of the loss and the metrics", "name")
        for name, value in trained.logs.items():
            values.add_metric([self._run.name, name], value)
        yield values
        if facts.epochs and (rate := facts.epochs[-1].learning_rate) is not None:
            yield self._gauge("learning_rate", "Learning rate after the last epoch", rate)
        if facts.checkpoints:
            yield self._gauge("checkpoint_step", "Step of the newest checkpoint", facts.checkpoints[-1].step)
            yield self._gauge("checkpoint_time_seconds", "Time of the newest checkpoint, in seconds since 1970",
                              facts.checkpoints[-1].time)  # fmt: skip
        if self._last_at:
            yield self._gauge("event_time_seconds", "Time of the newest event, in seconds since 1970", self._last_at)
        yield from self._of_all_tasks()

    def _of_all_tasks(self) -> Iterator[Metric]:
        now = self._facts.now
        steps = GaugeMetricFamily(
            "distlaunch_step_seconds", "Duration of a step among the last 1,000 steps",
            labels=["run", "task", "host", "quantile"],
        )  # fmt: skip
        families = {
            key: GaugeMetricFamily(f"distlaunch_{name}", text, labels=["run", "task", "host"])
            for key, (name, text) in _OF_TASKS.items()
        }
        for task, timed in sorted(now.timed.items()):
            labels = [self._run.name, task, now.hosts.get(task, "")]
            steps.add_metric([*labels, "0.5"], timed.step_median_s)
            steps.add_metric([*labels, "0.99"], timed.step_p99_s)
            values = task_summary(timed)
            for key, family in families.items():
                if values[key] is not None:
                    family.add_metric(labels, values[key])
        yield steps
        yield from (family for family in families.values() if family.samples)

    def _family(self, name: str, text: str, label: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"distlaunch_{name}", text, labels=["run", label])

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"distlaunch_{name}", text, labels=["run"])
        family.add_metric([self._run.name], value)
        return family


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


def _serve(listening: socket.socket, registry: CollectorRegistry) -> None:
    server = WSGIServer(listening.getsockname()[:2], _QuietHandler, bind_and_activate=False)
    server.socket = listening
    # set by `server_bind`, which is not called, because the launcher has bound the socket
    server.server_name, server.server_port = listening.getsockname()[:2]
    server.setup_environ()
    library: Any = prometheus_client
    server.set_app(library.make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.runs.metrics", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--socket", type=int, help="descriptor of a listening socket")
    parser.add_argument("--file", type=Path, help="file to write every few seconds")
    options = parser.parse_args(argv)
    yield_to_training()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(RunDir(options.run)))
    if options.socket is not None:
        _serve(socket.socket(fileno=options.socket), registry)
    due = time.monotonic()
    problem = ""
    while True:
        if options.file is not None:
            problem = _write(options.file, registry, problem)
        due += _INTERVAL_S
        # standard input ends with the launcher, whatever ends it
        if select.select([sys.stdin], [], [], max(due - time.monotonic(), 0.0))[0]:
            break
    if options.file is not None:
        _write(options.file, registry, problem)


def _write(file: Path, registry: CollectorRegistry, known: str) -> str:
    """Write the text file, and print and return why that failed; empty if it did not.

    Args:
        known: the result of the last call, which is not printed again.
    """
    try:
        # the textfile collector of node_exporter must not see an incomplete file
        write_given_file(file, generate_latest(registry).decode())
    except OSError as error:
        problem = f"{display_path(file)} is not written: {reason_of(error)}"
        if problem != known:
            print(f"{PROBLEM}{problem}", flush=True)
        return problem
    return ""


if __name__ == "__main__":
    main()
