"""Disturbs small runs on three hosts at random, and checks that each ends with the right weights or names the host.

    python scripts/chaos_hosts.py [--faults 50] [--seed 0] [--kinds kill_host,cut_pair]

The hosts are those of `pytest -m cluster`: network namespaces with an sshd each, which needs root. Two of them train
and one is a spare. They share no disk. Each run is disturbed once. A run that did not end well is resumed when the
fault is over; a run that could not start is started again without the fault. In the end:
- Its weights must equal those of an undisturbed run, bit for bit.
- The host at fault must have been named.
- No process may be left on any host.

In half of the trials whose fault concerns only one job, a second job runs on the same hosts, which must not be
affected. Trial N of `--seed S` is `--seed S+N --faults 1`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from chaos_runs import differences, final_state

from distlaunch.base.event_files import read_events
from distlaunch.base.events import StepsDone
from distlaunch.base.run_dir import RunDir

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))
from lab import Job, Lab, what_is_missing

EPOCHS, STEPS_PER_EPOCH = 8, 40
TIMEOUT_S, STALL_S, LIMIT_S = 8.0, 60.0, 240.0
AGENT, TASK = "distlaunch.agent.remote", "distlaunch.tasks.worker"


@dataclass
class Trial:
    """One run and its fault.

    Attributes:
        host: the host at fault; the first of two hosts that no longer reach each other.
        beside: whether another job runs on the same hosts, which must not be disturbed.
        violations: conditions that do not hold; empty on success.
    """

    seed: int
    fault: str
    host: int
    step: int
    restarts: int
    beside: bool = False
    outcome: str = ""
    violations: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its run."""
        return f"trial-{self.seed}-"

    @staticmethod
    def draw(seed: int, faults: list[str]) -> Trial:
        rng = random.Random(seed)
        step = rng.randrange(1, round(EPOCHS * STEPS_PER_EPOCH * 0.7))
        fault, host, restarts = rng.choice(faults), rng.choice((1, 2)), rng.randrange(2)
        return Trial(seed, fault, host, step, restarts, fault in OF_ONE_JOB and rng.random() < 0.5)


class Disturber:
    """The faults, with a method for each name."""

    def __init__(self, lab: Lab, disk: Path) -> None:
        self._lab, self._disk = lab, disk

    def kill_task(self, trial: Trial, job: Job) -> None:
        self._task(trial).kill()

    def kill_agent(self, trial: Trial, job: Job) -> None:
        agent = self._task(trial).parent()
        assert agent is not None, "the task has no parent"
        assert AGENT in agent.cmdline(), agent.cmdline()
        agent.kill()

    def kill_controller(self, trial: Trial, job: Job) -> None:
        self._lab.launcher(job).kill()

    def term_controller(self, trial: Trial, job: Job) -> None:
        self._lab.launcher(job).terminate()

    def kill_host(self, trial: Trial, job: Job) -> None:
        self._lab.kill(trial.host)

    def stop_task(self, trial: Trial, job: Job) -> None:
        self._task(trial).suspend()

    def pause_host(self, trial: Trial, job: Job) -> None:
        """Freeze a host for less time than it takes to declare it lost."""
        frozen = self._lab.processes(trial.host)
        for process in frozen:
            process.suspend()
        time.sleep(TIMEOUT_S / 2)
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def cut_host(self, trial: Trial, job: Job) -> None:
        self._lab.cut(trial.host)

    def cut_one_way(self, trial: Trial, job: Job) -> None:
        self._lab.cut(trial.host, 3 - trial.host)

    def cut_pair(self, trial: Trial, job: Job) -> None:
        for number in (1, 2):
            self._lab.cut(number, 3 - number)

    def lose_packets(self, trial: Trial, job: Job) -> None:
        rule = "add rule inet fault in numgen random mod 5 0 drop"
        table = "add table inet fault; add chain inet fault in { type filter hook input priority 0; }"
        self._inside(trial.host, "nft", f"{table}; {rule}")

    def full_disk(self, trial: Trial, job: Job) -> None:
        told = self._inside(trial.host, "df", "--output=used", "-k", str(self._disk))
        used = int(told.split()[-1])
        self._inside(trial.host, "mount", "-o", f"remount,size={used + 4}k", str(self._disk))

    def release(self, trial: Trial) -> None:
        """End the process that holds a port."""
        for process in self._lab.processes(trial.host):
            if HOLDS_PORT in process.cmdline():
                process.kill()

    def _task(self, trial: Trial) -> psutil.Process:
        found = ((each, each.cmdline()) for each in self._lab.processes(trial.host))
        return next(each for each, words in found if TASK in words and any(trial.name in word for word in words))

    def _inside(self, host: int, *words: str) -> str:
        job = self._lab.run(host, words)
        assert job.end(30) == 0, job.output
        return job.output

    def wrong_python(self, trial: Trial) -> list[str]:
        """Make a host use a Python without distlaunch, before the start."""
        wrong = [f"{name} python=/usr/bin/false" if at == trial.host else name for at, name in enumerate(HOSTS, 1)]
        return [f"engine.hosts={wrong}"]

    def taken_port(self, trial: Trial) -> list[str]:
        """Bind one of the ports that the config names, before the start."""
        port = 21000 + trial.seed % 1000
        ports = [port if at == trial.host else port + 2000 for at in (1, 2)]
        self._lab.run(trial.host, [sys.executable, "-c", HOLDS_PORT, str(port)]).wait_for("held", 30)
        return [f"cluster.ports={ports}"]


HOLDS_PORT = """
import signal, socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("held", flush=True)
signal.pause()
"""
HOSTS = ["host1", "host2", "host3"]
AT_START = ("wrong_python", "taken_port")
"""Faults that exist when a job is started."""
FAULTS = [name for name in vars(Disturber) if not name.startswith("_") and name != "release"]
OF_ONE_JOB = ("kill_task", "kill_agent", "kill_controller", "term_controller", "stop_task")
HARMLESS = ("pause_host", "lose_packets")
EXACT = {
    **dict.fromkeys(HARMLESS, (0,)),
    **dict.fromkeys(AT_START, (2,)),
    "kill_controller": (137, -9),
    "term_controller": (4,),
    "full_disk": (0, 3),
}
"""Exit codes of faults for which they are not 3 or 75 (lost from outside), or 0 after a restart."""


class Runs:
    """Runs of the lab.

    Args:
        disk: a folder that is separate on each host.
    """

    def __init__(self, lab: Lab, work: Path, disk: Path) -> None:
        self.lab, self.disk, self._work = lab, disk, work
        self._disturber = Disturber(lab, disk)
        config = {
            "runs_dir": str(disk),
            "model": {"function": f"{Path(__file__).with_name('chaos_job.py')}:model"},
            "data": {"function": f"{Path(__file__).with_name('chaos_job.py')}:data", "global_batch": 16},
            "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 0.01, "momentum": 0.9}}, "loss": "mse"},
            "train": {"epochs": EPOCHS, "log_every_steps": 1, "callbacks": [self._slow()]},
            "determinism": True,
            "checkpoint": {"every_steps": 15},
            "strategy": {"kind": "multi_worker_mirrored"},
            "cluster": {"workers": 2, "stall_timeout_s": STALL_S, "stop_timeout_s": 20},
            "engine": {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": TIMEOUT_S},
        }
        self._config = work / "job.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self.expected = self._undisturbed()

    def _slow(self) -> dict[str, object]:
        name = f"{Path(__file__).with_name('chaos_job.py')}:Sabotage"
        return {"name": name, "args": {"folder": str(self._work / "orders")}, "tasks": "all"}

    def _undisturbed(self) -> Path:
        job = self.lab.start("train", str(self._config), "--name", "whole")
        if job.end(LIMIT_S) != 0:
            raise RuntimeError(job.output)
        return final_state(RunDir(self.disk / "whole"))

    def execute(self, trial: Trial) -> None:
        """Carry out a trial, and record its violations."""
        run = RunDir(self.disk / trial.name)
        restarts = f"restarts.max={trial.restarts}"
        fault = getattr(self._disturber, trial.fault)
        settings = [restarts, *(fault(trial) if trial.fault in AT_START else ())]
        job = self._start(trial.name, *settings)
        other = self._start(f"beside-{trial.seed}") if trial.beside else None
        try:
            if trial.fault not in AT_START:
                if not self._reaches(run, trial.step, job):
                    trial.violations.append(f"ended before it was disturbed: {job.output[-800:]}")
                    return
                fault(trial, job)
            code = job.end(LIMIT_S)
            trial.outcome = str(code)
            self._check(trial, job, code)
            if trial.fault in HARMLESS and len(run.attempts()) > 1:
                trial.violations.append(f"a fault that is none has cost a restart: {job.output[-8000:]}")
            if other is not None and (ended := other.end(LIMIT_S)) != 0:
                trial.violations.append(f"the job beside it ended with {ended}: {other.output[-8000:]}")
            self._disturber.release(trial)
            # an agent that is cut off needs twice the time after which it is given up
            if left := self.lab.left(2 * TIMEOUT_S + 20):
                trial.violations.append(f"left: {left}")
        except AssertionError as error:
            trial.violations.append(str(error)[-800:])
        finally:
            self.lab.clean()
            self._grow_disks()
        if trial.outcome != "0":
            self._resume(trial, run)
        for each in (run, RunDir(self.disk / f"beside-{trial.seed}")) if trial.beside else (run,):
            if not trial.violations:
                trial.violations += differences(self.expected, final_state(each))

    def _check(self, trial: Trial, job: Job, code: int) -> None:
        allowed = EXACT.get(trial.fault, (0,) if trial.restarts else (3, 75))
        if code not in allowed:
            trial.violations.append(f"exit {code}, expected one of {allowed}: {job.output[-8000:]}")
        # of two that do not reach each other, either may be named
        names = ["host1", "host2"] if trial.fault in ("cut_pair", "cut_one_way") else [f"host{trial.host}"]
        is_diagnosed = trial.fault not in EXACT or trial.fault in AT_START
        after = job.said if trial.fault in AT_START else job.said.partition("training")[2]
        if is_diagnosed and not any(name in after for name in names):
            trial.violations.append(f"no word of {' or '.join(names)}: {job.output[-8000:]}")

    def _start(self, name: str, *settings: str) -> Job:
        words = [word for setting in settings for word in ("--set", setting)]
        return self.lab.start("train", str(self._config), "--name", name, *words)

    def _resume(self, trial: Trial, run: RunDir) -> None:
        job = self.lab.start("train", str(run.path), "--resume") if run.path.exists() else self._start(trial.name)
        code = job.end(LIMIT_S)
        trial.outcome += f", resumed {code}"
        if code != 0:
            trial.violations.append(f"resumed, exit {code}: {job.output[-8000:]}")

    def _reaches(self, run: RunDir, step: int, job: Job) -> bool:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and psutil.pid_exists(job.pid):
            if any(isinstance(event, StepsDone) and event.step >= step for event in read_events(run.events)):
                return True
            time.sleep(0.05)
        return False

    def _grow_disks(self) -> None:
        for number in (1, 2, 3):
            self.lab.run(number, ["mount", "-o", "remount,size=50%", str(self.disk)]).end(30)
            # files that a failed run has left there
            self.lab.run(number, ["sh", "-c", f"rm -rf {self.disk}/trial-* {self.disk}/beside-*"]).end(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=FAULTS, help="which faults")
    words = parser.parse_args()
    if missing := what_is_missing():
        sys.exit(missing)
    # both leave no host behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    trials = [Trial.draw(words.seed + number, words.kinds) for number in range(words.faults)]
    # not below the current folder: sockets have short names
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))) for _ in range(3)]
        lab = Lab(folders[0], 3, folders[1])
        stack.callback(lab.down)
        runs = Runs(lab, folders[2], folders[1])
        for trial in trials:
            runs.execute(trial)
            verdict = "VIOLATION" if trial.violations else "ok"
            what = f"{trial.fault:<15} host{trial.host}  step {trial.step:<3} restarts.max {trial.restarts}"
            what += "  beside another" if trial.beside else ""
            head = f"{verdict:<9} seed {trial.seed:<4} {what}  exit {trial.outcome}"
            print(head, *trial.violations, sep="\n    ", flush=True)
    print_table(trials)
    sys.exit(any(trial.violations for trial in trials))


def print_table(trials: list[Trial]) -> None:
    """Print the faults, and how their trials ended."""
    for fault in FAULTS:
        own = [trial for trial in trials if trial.fault == fault]
        ends = collections.Counter(trial.outcome for trial in own)
        if own:
            told = ", ".join(f"{end}: {count}" for end, count in ends.most_common())
            print(
                f"{fault:<16} {len(own):>4} trials  {sum(bool(each.violations) for each in own):>3} violations   {told}"
            )


if __name__ == "__main__":
    main()
