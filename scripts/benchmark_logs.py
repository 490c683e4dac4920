"""Measures the processor time that the launcher needs for the output of tasks, with and without secrets to mask.

    python scripts/benchmark_logs.py [--against FOLDER] [--rounds 10] [--mebibytes 256]

Prints the seconds per GiB of lines for each number of secrets, and their ratios to the time without secrets. With
`--against`, the code of another checkout is measured in turn with this code, and the ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE_S = 600
SECRETS = {
    "HF_TOKEN": "hf_q7Xk82Zp41abcdWERd23",
    "WANDB_API_KEY": "wk-a1/b2+c3d4e5f6",
    "AWS_SECRET_ACCESS_KEY": "Abcdefgh/ijkl+mn12345678zz",
}
NUMBERS = (0, 1, 3)
"""The numbers of secrets to measure."""
WORDS = (
    *("epoch", "step", "loss:", "accuracy:", "val_loss:", "learning_rate:", "INFO", "WARNING", "worker", "chief"),
    *("0.1234", "1.5e-3", "/job:worker/replica:0/task:0", "reading", "writing", "(32,", "128)", "dtype=float32"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mebibytes", type=int, default=256)
    words = parser.parse_args()
    codes = {"this": Path(__file__).resolve().parents[1]} | ({"other": words.against} if words.against else {})
    found: dict[tuple[str, int], list[tuple[float, float]]] = {(code, each): [] for code in codes for each in NUMBERS}
    with tempfile.TemporaryDirectory() as name:
        lines = Path(name) / "lines.txt"
        lines.write_text(_lines(words.mebibytes << 20))
        for _ in range(words.rounds):
            for (code, number), each in found.items():
                each.append(_measure(codes[code], number, lines))
    gib = words.mebibytes / 1024
    for (code, number), each in found.items():
        cpu, wall = ([seconds / gib for seconds in times] for times in zip(*each, strict=True))
        print(
            f"{code:5} {number} secrets: {statistics.median(cpu):7.3f} s of processor time a GiB "
            f"({min(cpu):.3f} to {max(cpu):.3f}), {statistics.median(wall):7.3f} s"
        )
    for code in codes:
        for number in NUMBERS[1:]:
            print(f"{code}: {number} secrets / none: {_ratio(found[code, number], found[code, 0])}")
    for number in NUMBERS if words.against else ():
        print(f"this / other, {number} secrets: {_ratio(found['this', number], found['other', number])}")


def _ratio(these: list[tuple[float, float]], others: list[tuple[float, float]]) -> str:
    """Return the median ratio of processor times that were measured one after the other, and the range."""
    ratios = [this[0] / other[0] for this, other in zip(these, others, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _lines(size: int) -> str:
    chosen = random.Random(0)
    some = "".join(" ".join(chosen.choices(WORDS, k=14)) + "\n" for _ in range(10_000))
    return some * -(-size // len(some))


def _measure(code: Path, number: int, lines: Path) -> tuple[float, float]:
    """Return the processor time of a launcher whose task prints a file, and the time that passed, in seconds."""
    script = Path(__file__).resolve()
    program = f"import runpy; runpy.run_path({str(script)!r})['launch']({number}, {str(lines)!r})"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(code)}, check=True, stdout=subprocess.PIPE)
    cpu, wall = json.loads(done.stdout)
    return cpu, wall


def launch(number: int, lines: str) -> None:
    """Run a task that prints a file, with a number of secrets in its environment, and print the times."""
    from distlaunch.agent.host import HostTasks
    from distlaunch.agent.messages import TaskSpec

    folder = Path(lines).parent
    env = {"PATH": os.environ["PATH"], **dict(list(SECRETS.items())[:number])}
    out, err = folder / "out.log", folder / "err.log"
    with HostTasks(lambda task, line: None, time.monotonic) as tasks:
        began, before = time.monotonic(), _cpu()
        task = tasks.start(TaskSpec("worker:0", ("cat", lines), env, out, err, folder / "heartbeat"))
        while task.poll() is None:
            if time.monotonic() - began > DEADLINE_S:
                raise SystemExit("the task has not ended in time")
            tasks.wait(0.5)
        took = _cpu() - before, time.monotonic() - began
    if out.stat().st_size != Path(lines).stat().st_size:
        raise SystemExit("the log does not have all lines")
    out.unlink()
    print(json.dumps(took))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
