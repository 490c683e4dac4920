"""`python -m distlaunch.tasks.worker`: the program of each task.

Its input is argv, TF_CONFIG and the run directory; it reports through events, `error.json` and its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlaunch.base.code_origins import format_exception
from distlaunch.base.errors import ConfigError, DistlaunchError, ExitCode, code_of_os_error
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Event, Notice, RunEnded, TaskStarted
from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.protocol import NOT_FORKED, READ_MODES
from distlaunch.base.run_dir import BEST, BestName, RunDir
from distlaunch.base.run_files.task_error import write_exception, write_problems
from distlaunch.base.run_files.trial_records import TrialOrder
from distlaunch.base.signals import DUMP_SIGNAL, STOP_SIGNALS
from distlaunch.base.user_modules import after_user_code, begin_program
from distlaunch.cluster.cores import num_visible_cores
from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.backend import choose_backend
from distlaunch.config.read.load import parse_resolved
from distlaunch.config.read.text import read_text
from distlaunch.config.references.modules import program_of
from distlaunch.config.run import RunConfig
from distlaunch.tasks.check import fork_check
from distlaunch.tasks.framework_imports import import_frameworks
from distlaunch.tasks.lifeline import hold_lifeline
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.process_end import end_process
from distlaunch.tasks.threads import limit_openblas_threads, num_foreign_threads

if TYPE_CHECKING:
    from distlaunch.base.forked import ForkedProcess
    from distlaunch.base.process import Process


class StopFlag:
    """Records that this process was asked to stop.

    Args:
        on_check: called each time the flag is checked, which is before each graph call.
    """

    def __init__(self, on_check: Callable[[], None]) -> None:
        self.event = threading.Event()
        self._on_check = on_check
        self._handler: Callable[[int, Any], object] = _end_at_once

    def __call__(self) -> bool:
        self._on_check()
        self.hold()
        return self.event.is_set()

    def install(self) -> None:
        """Install the handler of the stop signals; call it after TensorFlow has installed its own."""
        self._handler = lambda *_: self.event.set()
        for number in STOP_SIGNALS:
            signal.signal(number, self._handler)

    def hold(self) -> None:
        """Install the handler again if the user's code has handled, ignored or blocked the stop signals."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not self._handler:
                signal.signal(number, self._handler)
        if any(number in STOP_SIGNALS for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # ignoring SIGCHLD would lose the exit codes of helper processes
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _end_at_once(number: int, frame: Any) -> None:
    """Handle a stop signal while there is nothing to save."""
    end_process(ExitCode.PREEMPTED)


def main(argv: list[str] | None = None) -> None:
    """Run the task, and end the process at once: TensorFlow's own shutdown can wait for peers that are gone."""
    arguments = _parse(argv)
    for number in STOP_SIGNALS:  # until there is something to save
        signal.signal(number, _end_at_once)
    hold_lifeline()
    refuse_input()
    # a crash of native code then leaves the Python stacks in the log
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    end_process(_run(arguments))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.tasks.worker", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--task", type=Task.parse, required=True, help="JOB:INDEX")
    parser.add_argument("--mode", choices=("train", "evaluate", "predict", "export", "verify"), default="train")
    parser.add_argument(
        "--checkpoint", type=_step_or_best, help="step of the checkpoint, or best; default: the newest good one"
    )
    parser.add_argument("--config-sha256", help="expected hash of the attempt's config.yaml")
    parser.add_argument("--split", choices=("train", "validation"), default="validation")
    parser.add_argument("--output", type=Path, help="file for predictions; default: below the run directory")
    parser.add_argument("--wait-for-chief", action="store_true", help="a server: end when the coordinator is gone")
    parser.add_argument("--formats", type=lambda text: text.split(","), help="default: those of the config")
    parser.add_argument("--unchecked", action="store_true", help="do not check the exports after training")
    parser.add_argument("--trial", type=TrialOrder.from_json, help="what a trial of `verify` or `tune` does")
    return parser.parse_args(argv)


def _step_or_best(text: str) -> int | BestName:
    return BEST if text == BEST else int(text)


def _run(arguments: argparse.Namespace) -> int:
    """Run the task, and return its exit code; errors are written to error.json."""
    run, task = RunDir(arguments.run_dir), arguments.task
    files = run.task(arguments.attempt, str(task))
    heartbeat = Heartbeat(files.heartbeat)
    try:
        config = read_config(run.attempt_config(arguments.attempt), arguments.config_sha256)
        _import_framework(config, task)
        # before the program of the user is imported, and before the framework starts threads
        forked = _fork_check(arguments, config, files.path) if num_foreign_threads() == 0 else None
        # starts threads, after which this process could not be forked
        limit_openblas_threads()
        begin_program(program_of(config))
        emit = _emitter(EventWriter(_event_file(run, arguments), attempt=arguments.attempt, task=str(task)))
        if (reason := os.environ.pop(NOT_FORKED, "")) and task == _chief():
            hint = "engine: {warm_start: false} saves the time of the warm process"
            emit(Notice(level="info", message=f"tasks start as fresh processes, because {reason}; {hint}"))
        stop = StopFlag(heartbeat.turn)
        after_user_code(stop.hold)
        return _play(arguments, config, run, emit, stop, heartbeat, forked)
    except ConfigError as error:
        write_problems(files, error.problems)  # the launcher prints them once
        return ExitCode.USAGE
    # also SystemExit from the user's code: such a task has failed
    except BaseException as error:
        user_error = isinstance(error, DistlaunchError)  # the launcher prints its whole message
        if not user_error:
            print(format_exception(error), end="", file=sys.stderr)
        # the exit code carries this too: on a full disk the file may be missing
        is_outside = isinstance(error, OSError) and code_of_os_error(error) is ExitCode.TEMPORARY
        with contextlib.suppress(OSError):
            write_exception(files, error, step=heartbeat.step, user_error=user_error)
        return ExitCode.TEMPORARY if is_outside else ExitCode.FAILED


def read_config(path: Path, sha256: str | None) -> RunConfig:
    """Read the config of the attempt.

    Raises:
        DistlaunchError: the file is not the one that was written for this attempt.
    """
    text = read_text(path)
    if sha256 is not None and hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise DistlaunchError(f"{path} was modified after it was written for this attempt, so it is not used")
    return parse_resolved(text, str(path), os.environ)


def _import_framework(config: RunConfig, task: Task) -> None:
    """Import the framework before the program of the user, which may have files with the names of packages."""
    choose_backend(config.backend_of(task.job))
    threads = (config.data.threads or 0) * (config.cluster.num_workers if config.cluster.hosting == "in_process" else 1)
    if config.strategy.has_coordinator and threads > num_visible_cores():
        # its workers load batches outside of pipelines, in TensorFlow's own thread pool
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(threads + num_visible_cores()))
    from distlaunch.patches.tensorflow_autograph import keep_in_memory
    from distlaunch.patches.tensorflow_late import when_imported

    when_imported(keep_in_memory)
    # this also imports the backend: a task counts as started when the frameworks that it needs in any case are imported
    import_frameworks(config.backend_of(task.job), ("keras",))
    end_process.skip_earlier_hooks()


def _fork_check(arguments: argparse.Namespace, config: RunConfig, files: Path) -> ForkedProcess | None:
    """Fork the process that compares steps if this task is the chief of a training that may be compared."""
    if arguments.mode != "train" or config.train.check == "off" or config.strategy == config.strategy.on_one_device():
        return None
    return fork_check(files, is_strict=config.train.check == "strict") if arguments.task == _chief() else None


def _emitter(writer: EventWriter) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        was_behind = writer.behind
        writer.write(event)
        if writer.behind and not was_behind:
            print(f"{writer.path} cannot be written; events are kept until there is space again", file=sys.stderr)

    return emit


def _play(arguments: argparse.Namespace, config: RunConfig, run: RunDir, emit: Callable[[Event], None],
          stop: StopFlag, heartbeat: Heartbeat, forked: ForkedProcess | None) -> ExitCode:  # fmt: skip
    """Run the task's part in the attempt."""
    from distlaunch.base.process import Process
    from distlaunch.data.examples.read_failures import data_errors_raised

    process = Process(
        emit, stop, on_connected=stop.install, on_step=heartbeat.at_step, on_meeting=heartbeat.turn,
        saving=heartbeat.saving, writing=heartbeat.writing, is_stopping=stop.event.is_set,
        files=run.task(arguments.attempt, str(arguments.task)).path, forked=forked,
    )  # fmt: skip
    if _is_server(config, arguments.task):
        return _serve(arguments, config, run, process, stop)
    with data_errors_raised():
        emit(_started())
        if arguments.task.job == "evaluator":
            return _follow_checkpoints(arguments, config, run, process, stop)
        if arguments.mode == "verify":
            return _run_trial(arguments, config, run, process)
        return _train_or_use(arguments, config, run, process)


def _is_server(config: RunConfig, task: Task) -> bool:
    """Return whether a task of this run serves a coordinator, instead of training by itself."""
    return task.job in config.strategy.processes(config.cluster) and config.strategy.is_server(task.job)


def _started() -> TaskStarted:
    return TaskStarted(host=socket.gethostname(), pid=os.getpid())


def _train_or_use(arguments: argparse.Namespace, config: RunConfig, run: RunDir, process: Process) -> ExitCode:
    from distlaunch.training.session import Session

    began, is_training = time.monotonic(), arguments.mode == "train"
    # a mode that only reads the run writes nothing to it
    compiled = None if is_training else run.reader_compiled(arguments.attempt)
    session = Session.build(config, run, arguments.task, process, compiled=compiled)
    status = "done"
    if is_training:
        outcome = session.run_training(check_exports=not arguments.unchecked)
        status, at, seconds = outcome.status, outcome.progress, time.monotonic() - began
        process.emit(RunEnded(status=status, step=at.step, epochs_done=at.epoch, seconds=seconds, logs=outcome.logs))
    elif arguments.mode == "evaluate":
        session.evaluate(arguments.split, arguments.checkpoint)
    elif arguments.mode == "predict":
        session.predict(arguments.split, arguments.checkpoint, arguments.output)
    else:
        session.export_checkpoint(arguments.formats or (), arguments.checkpoint)
    # after the end is reported, since leaving waits for the other tasks
    session.leave()
    return ExitCode.DONE if status == "done" else ExitCode.PREEMPTED


def _run_trial(arguments: argparse.Namespace, config: RunConfig, run: RunDir, process: Process) -> ExitCode:
    from distlaunch.training.session import Session
    from distlaunch.training.trials.recorder import Stopped, Trial

    trial = Trial(arguments.trial, config, process.emit, process.should_stop)
    session = Session.build(config, run, arguments.task, process, on_built=trial.prepare)
    try:
        trial.run(session, run.record(arguments.attempt))
        if arguments.trial.timed:
            from distlaunch.training.trials.rounds import Rounds

            Rounds.of(trial, arguments.trial, session, arguments.attempt, str(arguments.task), process).follow()
    except Stopped:
        return ExitCode.PREEMPTED
    session.leave()
    return ExitCode.DONE


def _follow_checkpoints(arguments: argparse.Namespace, config: RunConfig, run: RunDir, process: Process,
                        stop: StopFlag) -> ExitCode:  # fmt: skip
    from distlaunch.training.evaluator import Evaluator, evaluator_config
    from distlaunch.training.session import Session

    # the tasks that train report the same notices
    silent = dataclasses.replace(process, emit=lambda event: None)
    session = Session.build(evaluator_config(config), run, arguments.task, silent)
    Evaluator(session, run, arguments.attempt, process.emit).follow(stop.event)
    return ExitCode.DONE


def _serve(arguments: argparse.Namespace, config: RunConfig, run: RunDir, process: Process,
           stop: StopFlag) -> ExitCode:  # fmt: skip
    from distlaunch.training.server import serve

    def serving() -> None:
        process.on_connected()
        # only now: a server that dies before this counts as not started, so that restarts are limited
        process.emit(_started())

    waits = arguments.wait_for_chief
    serve(config, run, arguments.task, stop.event, serving, process.emit, wait_for_chief=waits)
    return ExitCode.DONE


def _event_file(run: RunDir, arguments: argparse.Namespace) -> Any:
    """Return the file of a task's events: all tasks except the chief write next to their logs.

    The chief writes the run's own events, or, in an attempt that only reads the run, those of the attempt.
    """
    if arguments.task == _chief():
        return run.reader_events(arguments.attempt) if arguments.mode in READ_MODES else run.events
    return run.task(arguments.attempt, str(arguments.task)).events


def _chief() -> Task:
    """Return the chief of the cluster; without a cluster, it is worker:0, the only task."""
    text = os.environ.get("TF_CONFIG")
    return (from_tf_config(text)[0] if text else ClusterSpec({})).chief


if __name__ == "__main__":
    main()
