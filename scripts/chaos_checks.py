"""Checks a run after it was disturbed: the named task, the exit code, what is left behind, and the weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from chaos_runs import (
    EPOCHS,
    STALL_S,
    STEPS_PER_EPOCH,
    Launch,
    crowd,
    differences,
    events_of,
    final_state,
    processes_of,
)
from chaos_trial import KILLS, Result

from distlaunch.base.events import CheckpointFailed, RunEnded, TaskFailed, TaskRestarted
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.ports import find_holder

DEAD_S, STOPPED_S = 1.0, STALL_S + 2


class Aftermath:
    """Checks what a trial has left behind, and adds violations to its result.

    Args:
        work: the folder of the trial.
        expected: the weights of an undisturbed run; None if they cannot be compared.
    """

    def __init__(self, result: Result, run: RunDir, work: Path, expected: Path | None) -> None:
        self._result, self._run, self._work, self._expected = result, run, work, expected

    def fail(self, text: str) -> None:
        """Record a violation."""
        self._result.violations.append(text)

    def check_end(self, launch: Launch, code: int, at: float, ended: float) -> None:
        """Check the exit code, and for faults of a task also the diagnosis.

        Args:
            at, ended: when the run was disturbed, and when its command had ended.
        """
        trial = self._result.trial
        task_fault = trial.fault in (*KILLS, "stop", "exit1", "exception")
        failed = {3} if trial.fault in ("exit1", "exception") else {3, 75}
        codes = {
            "pause": {0}, "full_disk": {0}, "term_job": {4}, "int_job": {4}, "truncate": {-9}, "lost_launcher": {-9},
            "term_task": {4, 0, 3, 75} if trial.strategy == "parameter_server" else {4},
        }.get(trial.fault, {0, *failed} if trial.restarts or trial.victim.startswith("worker") else failed)  # fmt: skip
        if code not in codes:
            self.fail(f"exit {code}, expected one of {sorted(codes)}: {launch.text[-400:]}")
        if task_fault:
            self._check_diagnosis(launch, at, ended)
        if trial.fault in (*KILLS, "stop") and trial.restarts and code != 0:
            self.fail(f"exit {code} although a restart was allowed: {launch.text[-400:]}")

    def _check_diagnosis(self, launch: Launch, begun: float, ended: float) -> None:
        """Check the named task and reason, and when they were reported."""
        trial = self._result.trial
        failed = [(e.failed_task, e.reason, e.time) for e in events_of(self._run, TaskFailed)]
        again = [(e.restarted_task, e.reason, e.time) for e in events_of(self._run, TaskRestarted)]
        word = {**dict.fromkeys(KILLS, "SIGKILL"), "exit1": "exit code 1", "exception": "ChaosError"}.get(
            trial.fault, ""
        )
        own = [entry for entry in [*again, *failed] if entry[0] == trial.victim and word in entry[1]]
        if not own or (failed and failed[0][0] != trial.victim):
            self.fail(f"diagnosis {[*failed, *again]}, expected {trial.victim} and {word or 'why'!r}")
            return
        # the order is carried out at the end of a step
        begins = [at for at, line in launch.said if at > begun and trial.victim in line]
        told = min([*begins, own[0][2], ended])
        self._result.detected_s = told - begun
        limit = (STOPPED_S if trial.fault == "stop" else DEAD_S) * crowd()
        if self._result.detected_s > limit:
            self.fail(f"known after {self._result.detected_s:.1f} s, expected within {limit:.1f} s")

    def resume(self) -> None:
        launch = Launch(self._work, str(self._run.path), "--resume")
        code = launch.wait()
        self._result.outcome += f", resumed {code}"
        if code != 0:
            self.fail(f"resumed, exit {code}: {launch.text[-400:]}")
        if self._result.trial.fault == "truncate" and not events_of(self._run, CheckpointFailed):
            self.fail("nothing was said of the damaged checkpoint")
        self.nothing_left()

    def same_weights(self) -> None:
        ends = events_of(self._run, RunEnded)
        if not ends or ends[-1].status != "done" or ends[-1].step != EPOCHS * STEPS_PER_EPOCH:
            self.fail(f"ended with {ends[-1] if ends else None}")
        elif self._expected is not None:
            self._result.violations += differences(self._expected, final_state(self._run))
        left = [
            *self._run.checkpoints.glob(".*"),
            *self._run.path.glob(".*.*"),
            *(self._work / "tmp").glob("distlaunch*"),
        ]
        if left:
            self.fail(f"temporary files are left: {', '.join(path.name for path in left)}")

    def nothing_left(self) -> None:
        self.gone(within_s=5.0)
        ours = {f"process {pid}" for pid in processes_of(self._work)}
        # another process may use the port by now
        for number in self._ports():
            holder = find_holder(number)
            if holder is not None and holder.partition(" (")[0] in ours:
                self.fail(f"port {number} is still held by {holder}")

    def gone(self, within_s: float) -> None:
        until = time.monotonic() + within_s * crowd()
        while (left := processes_of(self._work)) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self.fail(f"processes are left: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ports(self) -> list[int]:
        tasks = json.loads(self._run.plan.read_text())["tasks"]
        return [int(task["address"].rpartition(":")[2]) for task in tasks if task["address"]]
