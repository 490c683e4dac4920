"""The worked example of docs/comparing.md, for real."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_job import environment

from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import EpochEnded
from distlaunch.base.run_dir import RunDir
from tests.documents import snippet


@pytest.mark.slow
def test_the_best_of_six_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(snippet("README.md", "# mine.py"))
    config = snippet("README.md", "# mine.yaml")
    one_device = config.replace("kind: multi_worker_mirrored", "kind: one_device").replace("workers: 2", "workers: 1")
    (tmp_path / "mine.yaml").write_text(one_device)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def shell(script: str) -> str:
        done = subprocess.run(
            ["sh", "-euc", script], cwd=tmp_path, env={**environment(), "PATH": path}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert shell(snippet("comparing.md", "for rate in")) == ""
    runs = [RunDir(folder) for folder in sorted((tmp_path / "runs").iterdir())]
    assert len(runs) == 6
    lowest = {run.name: min(event.logs["val_loss"] for event in read_events_of(run.events, EpochEnded)) for run in runs}
    in_order = sorted(lowest, key=lambda name: lowest[name])
    head, *rows = shell("distlaunch compare 'rate-*' --sort val_loss").splitlines()
    assert head.split()[:4] == ["run", "status", "units", "learning_rate"]
    assert [row.split()[0] for row in rows[:6]] == [f"runs/{name}" for name in in_order]
    assert rows[-1].startswith(f"best val_loss: runs/{in_order[0]}, ")
    shell("distlaunch compare 'rate-*' --sort val_loss --csv > rates.csv")
    with (tmp_path / "rates.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["run"], float(row["best val_loss"])) for row in table] == [
        (f"runs/{name}", lowest[name]) for name in in_order
    ]
    shell("distlaunch runs --remove --name 'rate-0.1-*' --yes")
    assert len(list((tmp_path / "runs").iterdir())) == 4
