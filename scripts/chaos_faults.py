"""Carries out the fault of a trial."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
from chaos_checks import Aftermath
from chaos_runs import (
    EPOCHS,
    LIMIT_S,
    SAVE_STEPS,
    STATE,
    STEPS_PER_EPOCH,
    STRATEGIES,
    Launch,
    checkpoints,
    events_of,
    options,
    processes_of,
    write_config,
)
from chaos_trial import Result, Trial

from distlaunch.base.event_files import EventReader, read_events
from distlaunch.base.events import CheckpointFailed, CheckpointSaved, StepsDone, TaskStarted
from distlaunch.base.run_dir import RunDir

MOMENTS = ("copy", "write", "sync", "commit")
"""The stages of a checkpoint at which a task is killed."""
FULL_BYTES = 200_000
"""Limit on the size of a task's files. A checkpoint exceeds it, and the event file does not."""


class Disturbance:
    """Carries out a trial in a separate folder."""

    def __init__(self, trial: Trial, work: Path, expected: Path | None) -> None:
        self.trial, self.work = trial, work
        self.run = RunDir(work / "runs" / "job")
        self.result = Result(trial)
        self._after = Aftermath(self.result, self.run, work, expected)
        self._at = 0.0

    def execute(self) -> Result:
        write_config(self.work)
        launch: Launch | None = None
        try:
            if self.trial.fault == "port_taken":
                self._port_taken()
                return self.result
            launch = Launch(self.work, "job.yaml", *options(self.trial.strategy), *self._restarts())
            if not self._wait_for_moment(launch):
                self._after.fail(f"ended before it was disturbed: {launch.text[-300:]}")
                return self.result
            self._at = time.time()
            getattr(self, f"_{self.trial.fault}")(launch)
            code = launch.wait()
            ended = time.time()
            self.result.outcome = str(code)
            self._after.check_end(launch, code, self._at, ended)
            self._after.nothing_left()
            if code != 0:
                self._after.resume()
            self._after.same_weights()
        except subprocess.TimeoutExpired:
            self._after.fail(f"did not end within {LIMIT_S:g} s")
        finally:
            if launch is not None and launch.process.poll() is None:
                launch.process.kill()
                launch.process.wait()
        return self.result

    def _restarts(self) -> list[str]:
        return ["--set", f"restarts.max={self.trial.restarts}"]

    def _wait_for_moment(self, launch: Launch) -> bool:
        """Wait until the step is reached; for faults of checkpoints, until there are two checkpoints."""
        saves = 2 if self.trial.fault == "truncate" else 0
        until = time.monotonic() + LIMIT_S
        while launch.process.poll() is None and time.monotonic() < until:
            events = read_events(self.run.events)
            step = max([event.step for event in events if isinstance(event, StepsDone)], default=0)
            if step >= self.trial.step and sum(isinstance(event, CheckpointSaved) for event in events) >= saves:
                return True
            time.sleep(0.02)
        return False

    # the faults, each by its name

    def _kill(self, launch: Launch) -> None:
        os.kill(self._pid(), signal.SIGKILL)

    def _kill_saving(self, launch: Launch) -> None:
        """Kill a task while a checkpoint is copied, written or renamed, as the seed decides, or at the last chance."""
        pid, folder, events = self._pid(), self.run.checkpoints, EventReader(self.run.events)
        moment, last = MOMENTS[self.trial.seed % len(MOMENTS)], EPOCHS * STEPS_PER_EPOCH - SAVE_STEPS
        there, step, reached = len(checkpoints(self.run)), 0, False
        while not reached and step < last and launch.process.poll() is None:
            new = [event.step for event in events.read() if isinstance(event, StepsDone) and event.step > step]
            step = max(new, default=step)
            if moment == "copy":
                reached = any(each % SAVE_STEPS == 0 for each in new[-1:])
            elif moment == "commit":
                reached = len(checkpoints(self.run)) != there
            else:
                name = "meta.json" if moment == "sync" else STATE
                reached = any(folder.glob(f".step-*.tmp/{name}"))
        self._at = time.time()
        os.kill(pid, signal.SIGKILL)

    def _warm_lost(self, launch: Launch) -> None:
        """Kill the process that tasks are forked from, then a task, which must then be started without that process."""
        for pid in processes_of(self.work):
            with contextlib.suppress(psutil.Error):
                if "distlaunch.agent.warm_process" in psutil.Process(pid).cmdline():
                    os.kill(pid, signal.SIGKILL)
        self._kill(launch)

    def _stop(self, launch: Launch) -> None:
        os.kill(self._pid(), signal.SIGSTOP)

    def _pause(self, launch: Launch) -> None:
        os.kill(self._pid(), signal.SIGSTOP)
        time.sleep(2)
        os.kill(self._pid(), signal.SIGCONT)

    def _term_task(self, launch: Launch) -> None:
        os.kill(self._pid(), signal.SIGTERM)

    def _term_job(self, launch: Launch) -> None:
        launch.process.terminate()

    def _int_job(self, launch: Launch) -> None:
        launch.process.send_signal(signal.SIGINT)

    def _exit1(self, launch: Launch) -> None:
        self._order("exit1")

    def _exception(self, launch: Launch) -> None:
        self._order("exception")

    def _order(self, how: str) -> None:
        path = self.work / "orders" / self.trial.victim.replace(":", "-")
        draft = self.work / "orders" / "draft"
        draft.write_text(how)
        draft.rename(path)

    def _truncate(self, launch: Launch) -> None:
        """Kill the launcher and its tasks, and truncate the newest checkpoint, as if the machine had failed."""
        self._lost_launcher(launch)
        newest = max(checkpoints(self.run)[-1].glob(STATE))
        os.truncate(newest, newest.stat().st_size // 2)

    def _lost_launcher(self, launch: Launch) -> None:
        launch.process.kill()
        launch.process.wait()
        self._after.gone(within_s=5.0)

    def _full_disk(self, launch: Launch) -> None:
        """Fill the disk for at least one checkpoint, then free the space."""
        pid, seen = self._pid(), len(events_of(self.run, CheckpointFailed))
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
        until = time.monotonic() + 60
        while len(events_of(self.run, CheckpointFailed)) == seen and launch.process.poll() is None:
            if time.monotonic() > until:
                self._after.fail("no checkpoint has failed on a full disk")
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def _port_taken(self) -> None:
        count = len(STRATEGIES[self.trial.strategy][1])
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            numbers = [each.getsockname()[1] for each in sockets]
            taken = numbers[self.trial.seed % count]
            for each, number in zip(sockets, numbers, strict=True):
                each.listen() if number == taken else each.close()
            launch = Launch(self.work, "job.yaml", *options(self.trial.strategy), "--set", f"cluster.ports={numbers}")
            code = launch.wait()
        self.result.outcome = str(code)
        if code != 2 or f"port {taken} is in use by process {os.getpid()}" not in launch.text:
            self._after.fail(f"exit {code} instead of 2 that names port {taken}: {launch.text[-300:]}")
        if self.run.path.exists():
            self._after.fail("a run directory is left of a run that could not start")

    def _pid(self) -> int:
        own = self.run.task(0, self.trial.victim).events
        told = [event for path in (self.run.events, own) for event in read_events(path)]
        return [e.pid for e in told if isinstance(e, TaskStarted) and e.task == self.trial.victim][-1]
