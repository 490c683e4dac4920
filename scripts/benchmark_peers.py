"""Times a training step of distlaunch relative to other ways to train the same model on the same machine.

    python scripts/benchmark_peers.py [--peers ddp,loop,fit] [--rounds 10] [--only "cnn 64"] [--avx2] [--json FILE]
        [--quick]

* `ddp`: PyTorch's DistributedDataParallel on gloo, two processes with OMP_NUM_THREADS=1, relative to two workers of
  `multi_worker_mirrored`. It needs PyTorch, the extra `peers`.
* `loop`: the better of the two loops of TensorFlow's tutorials (see `benchmark.py`), under `mirrored` and
  `multi_worker_mirrored`, in two replicas.
* `schedule`: the loop of TensorFlow's tutorial "Parameter server training", relative to `parameter_server`; both with
  two workers and one parameter server.
* `fit`: Keras `fit` on one device with the best of several `steps_per_execution`, relative to `one_device`.

Each contender has processes of its own: those of distlaunch with the environment that `distlaunch plan` shows, the
others with that of this script. All are started first. Then they train in turn, an epoch each, round by round, so that
a busy machine slows all of them equally; who waits uses no core. A ratio is our time of a step divided by the peer's in
the same round: the table has the median over the rounds, and the range. Below 1, distlaunch is faster.

`--avx2` imitates a CPU that has AVX2, but no AVX512 and no VNNI: oneDNN and PyTorch's libraries are limited to AVX2,
`distlaunch plan` is told that the CPU has nothing else, and the TensorFlow of the peers leaves oneDNN off, as it does
by itself on such a CPU. TensorFlow's other kernels are not limited.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmark_task import Row, config_of

from distlaunch.cluster.hardware import INJECTED
from distlaunch.cluster.ports import REUSE_ENV, pick_ports

TASK = Path(__file__).with_name("benchmark_peers_task.py")
STEPS = {"mlp": 64, "cnn": 24}  # of one epoch
QUICK_STEPS = 4
OURS = "distlaunch"
AVX2_ONLY = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
AVX2_DEFAULT = {"TF_ENABLE_ONEDNN_OPTS": "0"}  # TensorFlow's own choice for a CPU without VNNI
TASKS = {
    "multi_worker_mirrored": (("worker", 0), ("worker", 1)),
    "parameter_server": (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)),
}


@dataclass(frozen=True)
class Pair:
    """A row of the table: a job, and the contenders of which the fastest is the peer."""

    peer: str
    model: str
    batch: int
    strategy: str
    contenders: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.peer:<8} {self.model} {self.batch}  {self.strategy}"


_LOOPS = ("loop", "repeat")
_FITS = ("fit 1", "fit 8", "fit 64")
PAIRS = (
    *(Pair("ddp", model, batch, "multi_worker_mirrored", ("ddp",)) for model, batch in (
        ("cnn", 64), ("cnn", 128), ("mlp", 128), ("mlp", 512))),
    *(Pair("loop", model, batch, strategy, _LOOPS) for strategy in ("mirrored", "multi_worker_mirrored")
      for model, batch in (("mlp", 128), ("cnn", 64))),
    Pair("schedule", "mlp", 128, "parameter_server", ("schedule",)),
    *(Pair("fit", model, batch, "one_device", _FITS) for model, batch in (("mlp", 128), ("cnn", 64))),
)  # fmt: skip


class Contender:
    """The processes of a contender, which train an epoch each time they are asked."""

    def __init__(self, name: str, row: Row, folder: Path, *, avx2: bool) -> None:
        self.name = name
        self._cpu = {} if not avx2 else AVX2_ONLY if name == OURS else {**AVX2_ONLY, **AVX2_DEFAULT}
        tasks = TASKS.get(row.strategy, (("worker", 0),))
        self._held = pick_ports(len(tasks)) if len(tasks) > 1 else None
        if self._held is not None and name == "ddp":
            self._held.release()  # PyTorch listens on ports that nobody shares
        self._log = folder / f"{name}.log"
        planned = planned_environments(row, avx2=avx2) if name == OURS else [{}] * len(tasks)
        work = json.dumps({"row": dataclasses.asdict(row), "contender": name})
        with self._log.open("w") as log:
            self._started = [
                subprocess.Popen(
                    [sys.executable, str(TASK), work], env={**self._environment(tasks, at), **planned[at]},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                ) for at in range(len(tasks))
            ]  # fmt: skip
        # the others are servers of the first one
        self._processes = self._started[:1] if row.strategy == "parameter_server" else self._started

    def _environment(self, tasks: Sequence[tuple[str, int]], at: int) -> dict[str, str]:
        found = {**os.environ, **self._cpu, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
        found.pop("TF_CONFIG", None)
        if self._held is None:
            return found
        if self.name == "ddp":
            port = str(self._held.numbers[0])
            return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(at), "WORLD_SIZE": "2",
                    "OMP_NUM_THREADS": "1"}  # fmt: skip
        cluster: dict[str, list[str]] = {}
        for (job, _), port in zip(tasks, self._held.numbers, strict=True):
            cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
        job, index = tasks[at]
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        return {**found, **REUSE_ENV, "TF_CONFIG": json.dumps(config)}

    def ask(self) -> None:
        """Have all processes train."""
        for process in self._processes:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write("\n")
            process.stdin.flush()

    def answer(self) -> float:
        """Wait for all processes; return the seconds of the first one."""
        first, *_ = [self._read(process) for process in self._processes]
        return first

    def _read(self, process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            if line.startswith("SECONDS "):
                return float(line.split()[1])
        sys.exit(f"{self.name}: exit code {process.wait()}\n{self._log.read_text()[-3000:]}")

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        if self._held is not None:
            self._held.release()


def planned_environments(row: Row, *, avx2: bool) -> list[dict[str, str]]:
    """Return the variables that `distlaunch train` would set for each task of this row."""
    environ = dict(os.environ)
    if avx2:
        environ[INJECTED] = json.dumps({"features": ["avx2"]})
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "benchmark.yaml"
        # its checkpoints are so rare that `plan` would ask whether that is meant
        config.write_text(yaml.safe_dump({**config_of(row), "checkpoint": {}}))
        command = [sys.executable, "-m", "distlaunch", "plan", str(config), "--json"]
        plan = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environ)
    of_tasks = [task["env"] for task in json.loads(plan.stdout)["tasks"]]
    return [
        {name: value for name, value in variables.items() if name != "TF_CONFIG" and "DISTLAUNCH" not in name}
        for variables in of_tasks
    ]


@contextlib.contextmanager
def contenders_of(pair: Pair, row: Row, *, avx2: bool) -> Iterator[list[Contender]]:
    """Start the contenders, and end them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started: list[Contender] = []
        for name in (OURS, *pair.contenders):
            started.append(Contender(name, row, Path(folder), avx2=avx2))
            stack.callback(started[-1].end)
            started[-1].answer()  # one after the other, since both cores are busy while one compiles
        yield started


def measure(pair: Pair, row: Row, *, avx2: bool) -> dict[str, list[float]]:
    """Return the seconds per step of each contender, one number per round."""
    seconds: dict[str, list[float]] = {}
    with contenders_of(pair, row, avx2=avx2) as contenders:
        for number in range(row.rounds):
            # who comes first changes, so that a machine that slows down favours nobody
            for contender in contenders if number % 2 else reversed(contenders):
                contender.ask()
                seconds.setdefault(contender.name, []).append(contender.answer() / row.steps)
    return seconds


def describe(pair: Pair, seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the line of a row."""
    best = min(pair.contenders, key=lambda name: statistics.median(seconds[name]))
    ratios = [own / other for own, other in zip(seconds[OURS], seconds[best], strict=True)]
    ours, theirs = (1e3 * statistics.median(seconds[name]) for name in (OURS, best))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"{pair.title:<42}{ours:>9.2f} ms{theirs:>9.2f} ms  {best:<8}{ratio:>18}"


def cpu_model() -> str:
    """Return the name of the CPU, and whether it has the instructions for which TensorFlow turns oneDNN on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in facts.items()}
    vnni = "with" if "avx512_vnni" in found.get("flags", "").split() else "without"
    return f"{found.get('model name', platform.machine())}, {os.cpu_count()} cores, {vnni} AVX512-VNNI"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = tuple(dict.fromkeys(pair.peer for pair in PAIRS))
    parser.add_argument("--peers", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="only rows whose line contains this text")
    parser.add_argument("--avx2", action="store_true", help="imitate a CPU without AVX512 and VNNI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds a step")
    parser.add_argument("--quick", action="store_true", help="a few steps, one round: does it run at all?")
    options = parser.parse_args()
    peers = options.peers.split(",")
    if unknown := [name for name in peers if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    records: list[dict[str, Any]] = []
    cpu = cpu_model() + (", limited to AVX2" if options.avx2 else "")
    print(cpu)
    print(f"{'':<42}{OURS:>12}{'peer':>12}  {'':<8}{'ours / peer':>18}", flush=True)
    for pair in PAIRS:
        if pair.peer not in peers or options.only not in pair.title:
            continue
        steps, rounds = (QUICK_STEPS, 1) if options.quick else (STEPS[pair.model], options.rounds)
        seconds = measure(pair, Row(pair.model, pair.batch, pair.strategy, steps, rounds), avx2=options.avx2)
        print(describe(pair, seconds), flush=True)
        records.append({**dataclasses.asdict(pair), "seconds": seconds})
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu, "rows": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
