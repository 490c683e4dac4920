"""`python -m distlaunch.tasks.worker`: what runs in each task.

Gets its part from argv, TF_CONFIG and the run directory; tells what happens by events, `error.json` and its exit code.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlaunch.base.backend import choose_backend
from distlaunch.base.code_origins import format_exception
from distlaunch.base.errors import ConfigError, DistlaunchError, ExitCode
from distlaunch.base.events import Event, EventWriter, RunEnded, TaskStarted
from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.lifeline import hold_lifeline
from distlaunch.base.protocol import DUMP_SIGNAL, STOP_SIGNALS
from distlaunch.base.run_dir import RunDir
from distlaunch.base.task_error import write_exception, write_problems
from distlaunch.base.trial_records import TrialOrder
from distlaunch.cluster.spec import Task
from distlaunch.config.read.load import load_resolved
from distlaunch.config.run import RunConfig
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.process_end import end_process


class StopFlag:
    """Remembers that this process was asked to stop.

    Args:
        on_look: called whenever somebody looks at it, which is before each graph call.
    """

    def __init__(self, on_look: Callable[[], None]) -> None:
        self.event = threading.Event()
        self._on_look = on_look

    def __call__(self) -> bool:
        self._on_look()
        return self.event.is_set()

    def install(self) -> None:
        """Takes the stop signals over, after TensorFlow has installed a handler of its own: the later one counts."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: self.event.set())


def main(argv: list[str] | None = None) -> None:
    """Runs the task and ends the process at once: TensorFlow's own shutdown can wait for peers that are gone."""
    arguments = _parse(argv)
    for number in STOP_SIGNALS:  # until there is something to save
        signal.signal(number, lambda *_: end_process(ExitCode.PREEMPTED))
    hold_lifeline()
    refuse_input()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    end_process(_run(arguments))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.tasks.worker", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--task", type=Task.parse, required=True, help="JOB:INDEX")
    parser.add_argument("--mode", choices=("train", "evaluate", "predict", "export", "verify"), default="train")
    parser.add_argument("--checkpoint", type=int, help="step of the checkpoint; default: the newest good one")
    parser.add_argument("--split", choices=("train", "validation"), default="validation")
    parser.add_argument("--output", type=Path, help="file for predictions; default: below the run directory")
    parser.add_argument("--wait-for-chief", action="store_true", help="a server: end when the coordinator is gone")
    parser.add_argument("--formats", type=lambda text: text.split(","), help="default: those of the config")
    parser.add_argument("--unchecked", action="store_true", help="do not load what is exported after training")
    parser.add_argument("--trial", type=TrialOrder.from_json, help="what a trial of `verify` does")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    run, task = RunDir(arguments.run_dir), arguments.task
    files = run.task(arguments.attempt, str(task))
    session: Any = None
    heartbeat = Heartbeat(files.heartbeat)
    try:
        config = load_resolved(run.attempt_config(arguments.attempt))
        # an evaluator is one device of TensorFlow, which reads the checkpoints of every strategy
        alone = task.job == "evaluator"
        choose_backend("tensorflow" if alone else config.strategy.backend, quiet=config.strategy.has_coordinator)
        from distlaunch.strategies.patches.tensorflow_autograph import keep_in_memory
        from distlaunch.training.evaluator import Evaluator, evaluator_config
        from distlaunch.training.server import is_server, serve
        from distlaunch.training.session import Session

        end_process.skip_earlier_hooks()
        keep_in_memory()
        writer = EventWriter(_event_file(run, arguments), attempt=arguments.attempt, task=str(task))

        def emit(event: Event) -> None:
            was_behind = writer.behind
            writer.write(event)
            if writer.behind and not was_behind:
                print(f"{writer.path} cannot be written; what happens is told when there is room", file=sys.stderr)

        stop = StopFlag(heartbeat.turn)
        began = time.monotonic()
        if is_server(config, task):

            def serving() -> None:
                stop.install()
                # only now: a server that dies before this every time is not started again for ever
                emit(TaskStarted(host=socket.gethostname(), pid=os.getpid()))

            serve(config, run, task, stop.event, serving, emit, wait_for_chief=arguments.wait_for_chief)
            return ExitCode.DONE
        emit(TaskStarted(host=socket.gethostname(), pid=os.getpid()))
        if task.job == "evaluator":
            session = Session(evaluator_config(config), run, task, lambda event: None, stop, on_connected=stop.install)
            Evaluator(session, run, arguments.attempt, emit).follow(stop.event)
            return ExitCode.DONE
        if arguments.mode == "verify":
            return _run_trial(arguments, config, run, emit, stop)
        on_progress = {"on_step": heartbeat.at_step, "on_meeting": heartbeat.turn}
        session = Session(
            config, run, task, emit, stop, on_connected=stop.install, saving=heartbeat.saving, **on_progress
        )
        if arguments.mode == "train":
            outcome = session.run_training(check_exports=not arguments.unchecked)
            at = outcome.progress
            seconds = time.monotonic() - began
            emit(
                RunEnded(status=outcome.status, step=at.step, epochs_done=at.epoch, seconds=seconds, logs=outcome.logs)
            )
            session.leave()
            return ExitCode.DONE if outcome.status == "done" else ExitCode.PREEMPTED
        if arguments.mode == "evaluate":
            session.evaluate(arguments.split, arguments.checkpoint)
        elif arguments.mode == "predict":
            session.predict(arguments.split, arguments.checkpoint, arguments.output)
        else:
            session.export_checkpoint(arguments.formats or (), arguments.checkpoint)
        session.leave()
        return ExitCode.DONE
    except ConfigError as error:
        write_problems(files, error.problems)  # the launcher shows them, once
        return ExitCode.USAGE
    except BaseException as error:
        user_error = isinstance(error, DistlaunchError)  # told whole by the launcher
        if not user_error:
            print(format_exception(error), end="", file=sys.stderr)
        write_exception(files, error, step=heartbeat.step, user_error=user_error)
        return ExitCode.FAILED


def _run_trial(
    arguments: argparse.Namespace, config: RunConfig, run: RunDir, emit: Callable[[Event], None], stop: StopFlag
) -> ExitCode:
    from distlaunch.training.session import Session
    from distlaunch.training.trials.recorder import Stopped, Trial

    trial = Trial(arguments.trial, config, emit, stop)
    session = Session(config, run, arguments.task, emit, stop, on_connected=stop.install, on_built=trial.prepare)
    try:
        trial.run(session, run.record(arguments.attempt))
    except Stopped:
        return ExitCode.PREEMPTED
    session.leave()
    return ExitCode.DONE


def _event_file(run: RunDir, arguments: argparse.Namespace) -> Any:
    """The chief writes the run's own events; every other task writes beside its logs."""
    from distlaunch.cluster.spec import ClusterSpec, from_tf_config

    text = os.environ.get("TF_CONFIG")
    spec = from_tf_config(text)[0] if text else ClusterSpec({})
    if arguments.task == spec.chief:
        return run.events
    return run.task(arguments.attempt, str(arguments.task)).events


if __name__ == "__main__":
    main()
