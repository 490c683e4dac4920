"""One run that is disturbed once, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_runs import (
    EPOCHS,
    LIMIT_S,
    SAVE_STEPS,
    STALL_S,
    STATE,
    STEPS_PER_EPOCH,
    STRATEGIES,
    Launch,
    checkpoints,
    crowd,
    differences,
    final_state,
    options,
    processes_of,
    write_config,
)

from distlaunch.base.event_files import EventReader, read_events
from distlaunch.base.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    RunEnded,
    StepsDone,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.ports import find_holder

FAULTS = (
    "kill", "kill_saving", "stop", "pause", "term_task", "term_job", "int_job", "exit1", "exception", "truncate",
    "full_disk", "port_taken", "lost_launcher", "warm_lost",
)  # fmt: skip
_KILLS = ("kill", "kill_saving", "warm_lost")
MOMENTS = ("copy", "write", "sync", "commit")
"""Of a checkpoint, at which a task is killed."""
DEAD_S, STOPPED_S = 1.0, STALL_S + 2
FULL_BYTES = 200_000
"""A task whose files may grow no further cannot write a checkpoint; its event file is smaller."""


@dataclass(frozen=True)
class Trial:
    """What is done to which run, and when."""

    seed: int
    strategy: str
    fault: str
    victim: str
    step: int
    restarts: int

    @staticmethod
    def draw(seed: int, strategies: tuple[str, ...], faults: tuple[str, ...]) -> Trial:
        rng = random.Random(seed)
        strategy, fault = rng.choice(strategies), rng.choice(faults)
        tasks = STRATEGIES[strategy][1]
        if fault == "port_taken" and len(tasks) == 1:
            fault = "kill"
        # only the coordinator runs callbacks and writes checkpoints
        candidates = tasks[:1] if fault in ("full_disk", "kill_saving") else tasks
        if strategy == "parameter_server" and fault in ("exit1", "exception"):
            candidates = tasks[:1]
        step = rng.randrange(1, round(EPOCHS * STEPS_PER_EPOCH * 0.8))
        return Trial(seed, strategy, fault, rng.choice(candidates), step, rng.randrange(2))


@dataclass
class Result:
    """How a trial went.

    Attributes:
        outcome: what the disturbed command ended with.
        detected_s: from the fault to the first word about it.
        violations: what should not be; empty if all is well.
    """

    trial: Trial
    outcome: str = ""
    detected_s: float | None = None
    violations: list[str] = field(default_factory=list)


class Disturbance:
    """Carries a trial out in a folder of its own."""

    def __init__(self, trial: Trial, work: Path, expected: Path | None) -> None:
        self.trial, self.work, self._expected = trial, work, expected
        self.run = RunDir(work / "runs" / "job")
        self.result = Result(trial)
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
                self._fail(f"ended before it was disturbed: {launch.text[-300:]}")
                return self.result
            self._at = time.time()
            getattr(self, f"_{self.trial.fault}")(launch)
            code = launch.wait()
            ended = time.time()
            self.result.outcome = str(code)
            self._check_end(launch, code, ended)
            self._nothing_left()
            if code != 0:
                self._resume()
            self._same_weights()
        except subprocess.TimeoutExpired:
            self._fail(f"did not end within {LIMIT_S:g} s")
        finally:
            if launch is not None and launch.process.poll() is None:
                launch.process.kill()
                launch.process.wait()
        return self.result

    def _restarts(self) -> list[str]:
        return ["--set", f"restarts.max={self.trial.restarts}"]

    def _fail(self, text: str) -> None:
        self.result.violations.append(text)

    def _wait_for_moment(self, launch: Launch) -> bool:
        """Until the step is reached; for faults of checkpoints until there are two."""
        saves = 2 if self.trial.fault == "truncate" else 0
        until = time.monotonic() + LIMIT_S
        while launch.process.poll() is None and time.monotonic() < until:
            events = read_events(self.run.events)
            step = max([event.step for event in events if isinstance(event, StepsDone)], default=0)
            if step >= self.trial.step and sum(isinstance(event, CheckpointSaved) for event in events) >= saves:
                return True
            time.sleep(0.02)
        return False

    # the faults

    def _kill(self, launch: Launch) -> None:
        os.kill(self._pid(), signal.SIGKILL)

    def _kill_saving(self, launch: Launch) -> None:
        """While a checkpoint is copied, or written, or put in its place, as the seed says; the last chance is taken."""
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
        """First what tasks are forked from, then a task, which has to be started without it."""
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
        """The launcher is lost with its machine, whose disk has half of the newest checkpoint."""
        self._lost_launcher(launch)
        newest = max(checkpoints(self.run)[-1].glob(STATE))
        os.truncate(newest, newest.stat().st_size // 2)

    def _lost_launcher(self, launch: Launch) -> None:
        launch.process.kill()
        launch.process.wait()
        self._gone(within_s=5.0)

    def _full_disk(self, launch: Launch) -> None:
        """For one checkpoint at least; then there is space again."""
        pid, seen = self._pid(), len(self._events(CheckpointFailed))
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
        until = time.monotonic() + 60
        while len(self._events(CheckpointFailed)) == seen and launch.process.poll() is None:
            if time.monotonic() > until:
                self._fail("no checkpoint has failed on a full disk")
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
            self._fail(f"exit {code} instead of 2 that names port {taken}: {launch.text[-300:]}")
        if self.run.path.exists():
            self._fail("a run directory is left of a run that could not start")

    # what must hold

    def _check_end(self, launch: Launch, code: int, ended: float) -> None:
        trial, task_fault = self.trial, self.trial.fault in (*_KILLS, "stop", "exit1", "exception")
        codes = {
            "pause": {0}, "full_disk": {0}, "term_job": {4}, "int_job": {130}, "truncate": {-9}, "lost_launcher": {-9},
            "term_task": {4, 0, 3} if trial.strategy == "parameter_server" else {4},
        }.get(trial.fault, {0, 3} if trial.restarts or trial.victim.startswith("worker") else {3})  # fmt: skip
        if code not in codes:
            self._fail(f"exit {code}, expected one of {sorted(codes)}: {launch.text[-400:]}")
        if task_fault:
            self._check_diagnosis(launch, ended)
        if trial.fault in (*_KILLS, "stop") and trial.restarts and code != 0:
            self._fail(f"exit {code} although it might be started again: {launch.text[-400:]}")

    def _check_diagnosis(self, launch: Launch, ended: float) -> None:
        """Who, and why; and when it was known."""
        trial = self.trial
        failed = [(e.failed_task, e.reason, e.time) for e in self._events(TaskFailed)]
        again = [(e.restarted_task, e.reason, e.time) for e in self._events(TaskRestarted)]
        word = {**dict.fromkeys(_KILLS, "SIGKILL"), "exit1": "exit code 1", "exception": "ChaosError"}.get(
            trial.fault, ""
        )
        own = [entry for entry in [*again, *failed] if entry[0] == trial.victim and word in entry[1]]
        if not own or (failed and failed[0][0] != trial.victim):
            self._fail(f"diagnosis {[*failed, *again]}, expected {trial.victim} and {word or 'why'!r}")
            return
        # the order is carried out at the end of a step
        begins = [at for at, line in launch.said if at > self._at and trial.victim in line]
        told = min([*begins, own[0][2], ended])
        self.result.detected_s = told - self._at
        limit = (STOPPED_S if trial.fault == "stop" else DEAD_S) * crowd()
        if self.result.detected_s > limit:
            self._fail(f"known after {self.result.detected_s:.1f} s, expected within {limit:.1f} s")

    def _resume(self) -> None:
        launch = Launch(self.work, str(self.run.path), "--resume")
        code = launch.wait()
        self.result.outcome += f", resumed {code}"
        if code != 0:
            self._fail(f"resumed, exit {code}: {launch.text[-400:]}")
        if self.trial.fault == "truncate" and not self._events(CheckpointFailed):
            self._fail("nothing was said of the damaged checkpoint")
        self._nothing_left()

    def _same_weights(self) -> None:
        ends = self._events(RunEnded)
        if not ends or ends[-1].status != "done" or ends[-1].step != EPOCHS * STEPS_PER_EPOCH:
            self._fail(f"ended with {ends[-1] if ends else None}")
        elif self._expected is not None:
            self.result.violations += differences(self._expected, final_state(self.run))
        left = [*self.run.checkpoints.glob(".*"), *self.run.path.glob(".*.*"), *(self.work / "tmp").glob("distlaunch*")]
        if left:
            self._fail(f"temporary files are left: {', '.join(path.name for path in left)}")

    def _nothing_left(self) -> None:
        self._gone(within_s=5.0)
        ours = {f"process {pid}" for pid in processes_of(self.work)}
        # by now a port may be somebody else's
        for number in self._ports():
            holder = find_holder(number)
            if holder is not None and holder.partition(" (")[0] in ours:
                self._fail(f"port {number} is still held by {holder}")

    def _gone(self, within_s: float) -> None:
        until = time.monotonic() + within_s * crowd()
        while (left := processes_of(self.work)) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self._fail(f"processes are left: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ports(self) -> list[int]:
        tasks = json.loads(self.run.plan.read_text())["tasks"]
        return [int(task["address"].rpartition(":")[2]) for task in tasks if task["address"]]

    def _pid(self) -> int:
        own = self.run.task(0, self.trial.victim).events
        told = [event for path in (self.run.events, own) for event in read_events(path)]
        return [e.pid for e in told if isinstance(e, TaskStarted) and e.task == self.trial.victim][-1]

    def _events(self, kind: type[Event]) -> list:
        return [event for event in read_events(self.run.events) if isinstance(event, kind)]
