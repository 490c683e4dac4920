"""Plants small faults one by one, and checks that the tests catch each.

    python scripts/mutants.py [--only NAME,...] [--list]

Each mutant of `mutants.yaml` changes one place in a copy of the repository, in which its tests must then fail. Before
that, the tests must pass in an unchanged copy. So the script shows which faults the tests would miss. It takes about an
hour on 2 cores. Exit code 1 means that a mutant was not caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 900.0
_COPIED = (
    "distlaunch",
    "tests",
    "configs",
    "scripts",
    "docs",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
_TOLD = 5000
_NO_TESTS = 5
"""Exit code of pytest if it found no tests, which proves nothing."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that must detect it.

    Attributes:
        find: text that occurs in the file exactly once.
        tests: arguments of pytest.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: str

    def plant(self, copy: Path) -> None:
        path = copy / self.file
        text = path.read_text()
        if text.count(self.find) != 1:
            sys.exit(f"{self.name}: {self.file} has {text.count(self.find)} times: {self.find}")
        path.write_text(text.replace(self.find, self.replace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants, and try whether they can be planted")
    words = parser.parse_args()
    listed = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    mutants = [Mutant(name=name, **fields) for name, fields in listed.items()]
    chosen = [mutant for mutant in mutants if words.only is None or mutant.name in words.only]
    if words.only and len(chosen) != len(words.only):
        sys.exit(f"unknown: {', '.join(sorted(set(words.only) - {mutant.name for mutant in chosen}))}")
    with tempfile.TemporaryDirectory(prefix="distlaunch-mutants-") as folder:
        if words.list:
            for mutant in chosen:
                mutant.plant(_copy(Path(folder) / mutant.name))
                print(mutant.name)
            return
        missed = _try_all(chosen, Path(folder))
    print(
        f"{len(chosen) - len(missed)} of {len(chosen)} mutants caught"
        + (f"; missed: {', '.join(missed)}" * bool(missed))
    )
    sys.exit(bool(missed))


def _try_all(mutants: Sequence[Mutant], folder: Path) -> list[str]:
    """Return the names of the mutants that were not caught."""
    sound = _copy(folder / "sound")
    for tests in sorted({mutant.tests for mutant in mutants}):
        code, output = _run(sound, tests)
        if code != 0:
            sys.exit(f"{output}\nthese tests fail without a fault: pytest {tests}")
    missed = []
    for mutant in mutants:
        copy = _copy(folder / "mutant")
        mutant.plant(copy)
        began = time.monotonic()
        code, _ = _run(copy, mutant.tests)
        shutil.rmtree(copy)
        caught = code not in (0, _NO_TESTS)
        if not caught:
            missed.append(mutant.name)
        print(f"{'caught' if caught else 'MISSED'}  {mutant.name}  {time.monotonic() - began:.0f} s", flush=True)
    return missed


def _copy(to: Path) -> Path:
    to.mkdir(parents=True)
    for name in _COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def _run(copy: Path, tests: str) -> tuple[int, str]:
    """Return the exit code of pytest and its last output; tests that hang have caught the mutant, too."""
    words = [word.strip('"') for word in _split(tests)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"more than {LIMIT_S:g} s"
    return done.returncode, done.stdout.decode(errors="replace")[-_TOLD:]


def _split(tests: str) -> list[str]:
    import shlex

    return shlex.split(tests)


if __name__ == "__main__":
    main()
