"""Runs a worker or parameter server, which holds the coordinator's variables and executes functions for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from distlaunch.base.errors import UsageError
from distlaunch.base.events import Event, Notice
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import ClusterSpec, Task, split_address
from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.run import RunConfig
from distlaunch.data.context import WorkerContext
from distlaunch.data.seeds import seed_process
from distlaunch.data.source import open_splits, with_global_batch
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.devices import grow_gpu_memory, use_one_gpu
from distlaunch.strategies.parameter_server.numbered_batches import offer_splits
from distlaunch.strategies.parameter_server.strategy import start_server
from distlaunch.strategies.parameter_server.worker_batches import report_failures, report_times
from distlaunch.training.step_timer import StepTimer

_PROBE_S = 1.0  # interval between probes, and the timeout of each
_MAX_UNANSWERED = 3  # after this many unanswered probes in a row, the coordinator counts as ended


def serve(config: RunConfig, run: RunDir, task: Task, asked_to_stop: threading.Event, on_started: Callable[[], None],
          emit: Callable[[Event], None], *, wait_for_chief: bool) -> None:  # fmt: skip
    """Serve until the process is asked to stop or, with `wait_for_chief`, until the coordinator is gone.

    TensorFlow's own `Server.join` never returns, even when the coordinator has ended.

    Args:
        on_started: called when the server runs; by then TensorFlow has set its signal handlers.
        emit: called with the times of steps and, if `wait_for_chief` is set, with a notice that names the coordinator.
        wait_for_chief: end when the coordinator has ended; False if a launcher stops this process.
    """
    spec, _ = from_tf_config(os.environ["TF_CONFIG"])
    # before the data function is called, which may draw random numbers
    seed_process(config)
    use_one_gpu()
    grow_gpu_memory()
    timer = None
    if task.job == "worker":
        # before the server starts, because the coordinator may send work at once
        context = WorkerContext(len(spec.jobs["worker"]), task.index)
        splits, train, validation = open_splits(config, run, context=context, on_host=True)
        config = with_global_batch(config, train)
        offer_splits(config, splits, train, validation, context)
        timer = StepTimer(emit, train, config.data, reads_ahead=False)
    # an evaluator is not part of TensorFlow's cluster
    jobs = {job: list(addresses) for job, addresses in spec.jobs.items() if job != "evaluator"}
    start_server(tf.train.ClusterSpec(jobs), task)
    on_started()
    failures: list[Exception] = []

    def fail(error: Exception) -> None:
        failures.append(error)
        # this process must end: the graph that waits for the batch has no timeout (see `worker_batches`), but the
        # coordinator notices when a process is gone
        asked_to_stop.set()

    report_failures(fail)
    if timer is not None:
        report_times(timer.add)
    try:
        _wait_for_end(spec, task, config, asked_to_stop, failures, emit, wait_for_chief=wait_for_chief)
    finally:
        if timer is not None:
            timer.report()
    if failures:
        raise failures[0]


def _wait_for_end(spec: ClusterSpec, task: Task, config: RunConfig, asked_to_stop: threading.Event,
             failures: list[Exception], emit: Callable[[Event], None], *, wait_for_chief: bool) -> None:  # fmt: skip
    if not wait_for_chief:
        asked_to_stop.wait()
        return
    chief = spec.address(spec.chief)
    emit(Notice(level="info", message=f"serving at {spec.address(task)}, until the coordinator at {chief} has ended"))
    wait_for_chief_to_end(chief, config.cluster.start_timeout_s, asked_to_stop, failures)


def wait_for_chief_to_end(
    address: str,
    start_timeout_s: float,
    asked_to_stop: threading.Event,
    failures: list[Exception],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the coordinator has started and ended, reading has failed, or a stop is asked for before it starts.

    Raises:
        UsageError: the coordinator does not start in time.
    """
    unanswered, has_started, began = 0, False, clock()
    # unanswered probes do not count before the coordinator has started
    while not failures and (unanswered < _MAX_UNANSWERED or not has_started):
        try:
            socket.create_connection(split_address(address), timeout=_PROBE_S).close()
            has_started, unanswered = True, 0
        except OSError:
            unanswered += 1
        if not has_started and asked_to_stop.is_set():
            return
        if not has_started and clock() - began > start_timeout_s:
            raise UsageError(f"the coordinator at {address} did not start within {start_timeout_s:g} s")
        # not `asked_to_stop.wait`, because the coordinator still needs this server to save its checkpoint
        sleep(_PROBE_S)
