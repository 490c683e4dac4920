"""The benchmark runs and prints its ratios. No test checks how fast anything is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_quick_run_prints_the_ratios():
    command = [sys.executable, "scripts/benchmark.py", "--quick"]
    command += ["--models", "mlp", "--strategies", "one_device,mirrored"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split()[-3:] == ["fit/distlaunch", "loop/distlaunch", "repeat/distlaunch"]
    assert [row.split()[2] for row in rows] == ["one_device", "mirrored"], done.stdout
    assert all(row.count("x (") == 3 for row in rows), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("row", ["sentiment_spatial_parallel", "mnist_mlp_jax"])
def test_quick_run_on_a_mesh(row: str):
    command = [sys.executable, "scripts/benchmark_meshes.py", "--quick", "--rows", row]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.splitlines()
    assert header.split()[-1] == "hand"
    assert line.split()[0] == row


@pytest.mark.slow
def test_one_round_of_starts() -> None:
    command = [sys.executable, "scripts/benchmark_start.py", "--rounds=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    assert len(rows) == 8
    for row in rows[:6]:
        seconds = [float(word) for word in row.split() if word.replace(".", "").isdigit()]
        assert len(seconds) == 7
        assert seconds == sorted(seconds)


@pytest.mark.slow
def test_a_quick_checkpoint() -> None:
    command = [
        sys.executable,
        "scripts/benchmark_checkpoint.py",
        "--megabytes=8",
        "--saves=2",
        "--strategies=one_device",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: beyond the limits, which mean nothing for so small a state
    header, row = done.stdout.splitlines()
    assert header.split()[-2:] == ["while", "writing"]
    assert row.split()[0] == "one_device"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "row", "options"),
    [
        ("loop", "mlp 128  multi_worker_mirrored", ["--avx2"]),
        ("schedule", "mlp 128", []),
        ("fit", "mlp 128", []),
        ("ddp", "mlp 512", []),
    ],
)
def test_quick_run_against_peers(peer: str, row: str, options: list[str]) -> None:
    if peer == "ddp":
        pytest.importorskip("torch")
    command = [sys.executable, "scripts/benchmark_peers.py", "--quick", "--peers", peer, "--only", row, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    cpu, header, line = done.stdout.splitlines()
    assert ("limited to AVX2" in cpu) == ("--avx2" in options)
    assert header.split()[-3:] == ["ours", "/", "peer"]
    assert line.split()[:3] == [peer, *row.split()[:2]]
