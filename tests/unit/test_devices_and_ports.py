"""GPUs and ports of this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.cli.validate import command as validate
from distlaunch.cluster.devices import find_gpus, share_gpus
from distlaunch.cluster.ports import find_holder, hold_ports, pick_ports
from distlaunch.jobs import job
from distlaunch.verify.trials import plan_trials
from tests.unit.config_files import BASE, write_models

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-1111-aa)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.18gb     Device  1: (UUID: MIG-bbbb)
GPU 1: NVIDIA H200 (UUID: GPU-2222-bb)
GPU 2: NVIDIA H200 (UUID: GPU-3333-cc)
"""


def nvidia_smi(folder: Path, listing: str = LISTING, code: int = 0) -> str:
    """A PATH with a program of this name on it."""
    program = folder / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\ncat <<'END'\n{listing}END\nexit {code}\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


SELECTIONS = [
    (None, ("MIG-aaaa", "MIG-bbbb", "1", "2")),
    ("", ()),
    (" ", ()),
    ("-1", ()),
    ("x", ()),
    ("NoDevFiles", ()),
    ("1,2", ("1", "2")),
    ("1,-1,2", ("1",)),
    ("1,,2", ("1",)),
    ("2,1,7,0", ("2", "1")),
    ("7", ()),
    ("\u00b2", ()),
    ("GPU-2222, MIG-bbbb", ("GPU-2222", "MIG-bbbb")),
    ("GPU-2222-bb,GPU-9999,1", ("GPU-2222-bb",)),
    ("MIG-GPU-1111-aa/1/0,MIG-cccc", ("MIG-GPU-1111-aa/1/0",)),
]


@pytest.mark.parametrize(("selected", "expected"), SELECTIONS)
def test_every_command_counts_the_same_gpus(
    selected: str | None, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if selected is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    write_models(tmp_path)
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: mirrored}}\n".replace("64", "12"))
    assert find_gpus(os.environ) == expected
    replicas = len(expected) or 2  # without GPUs two parts of the CPU
    told = CliRunner().invoke(validate, ["run.yaml"]).stdout
    words = f"{replicas} replica" + "s" * (replicas > 1)
    assert told == f"run.yaml: ok (strategy mirrored, {words}, global batch 12)\n"
    one_device = job.Request("run.yaml", ("strategy.kind=one_device",))
    planned, choice = job.plan(one_device, os.environ)  # `train` executes this object
    assert planned.tasks[0].env.get("CUDA_VISIBLE_DEVICES") == (expected[0] if expected else None)
    (trial,) = plan_trials(choice.config, ("mirrored",), (2,), len(find_gpus(os.environ)))
    assert trial.verdict == ("cannot run" if len(expected) == 1 else ""), "in `verify`"
    workers = max(2, len(expected))
    shared = (
        f"strategy.kind=multi_worker_mirrored --set cluster.workers={workers} --set data.global_batch={12 * workers}"
    )
    told = CliRunner().invoke(validate, ["run.yaml", "--set", *shared.split()])
    if len(expected) == 1:
        assert told.exit_code == 2
        assert f"2 workers do not fit on 1 GPU(s) ({expected[0]})" in told.stderr
    else:
        assert told.exit_code == 0
    if expected:
        too_many = f"strategy.replicas={len(expected) + 1}"
        assert CliRunner().invoke(validate, ["run.yaml", "--set", too_many]).exit_code == 2
        with pytest.raises(ConfigError, match="replicas"):
            job.plan(job.Request("run.yaml", (too_many,)), os.environ)


@pytest.mark.parametrize(("selected", "expected"), [(None, ()), ("0,GPU-1", ("0", "GPU-1")), ("-1", ())])
def test_without_a_driver_to_ask(selected: str | None, expected: tuple[str, ...], tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)} | ({} if selected is None else {"CUDA_VISIBLE_DEVICES": selected})
    assert find_gpus(environ) == expected


@pytest.mark.parametrize("selected", [None, "0"])
@pytest.mark.parametrize(("listing", "code"), [("NVIDIA-SMI has failed\n", 9), ("No devices found.\n", 0)])
def test_a_driver_without_gpus(selected: str | None, listing: str, code: int, tmp_path: Path) -> None:
    environ = {"PATH": nvidia_smi(tmp_path, listing, code)}
    assert find_gpus(environ | ({} if selected is None else {"CUDA_VISIBLE_DEVICES": selected})) == ()


@pytest.mark.parametrize(
    ("gpus", "workers", "per_worker", "expected"),
    [
        ("", 2, None, [(), ()]),
        ("0123", 2, None, [("0", "1"), ("2", "3")]),
        ("012", 2, None, [("0",), ("1",)]),
        ("0123", 2, 1, [("0",), ("1",)]),
    ],
)
def test_shares(gpus: str, workers: int, per_worker: int | None, expected: list[tuple[str, ...]]) -> None:
    assert share_gpus(list(gpus), workers, per_worker) == expected


@pytest.mark.parametrize(("gpus", "workers", "per_worker"), [("0", 2, None), ("012", 2, 2)])
def test_too_few_gpus(gpus: str, workers: int, per_worker: int | None) -> None:
    with pytest.raises(UsageError, match="do not fit on"):
        share_gpus(list(gpus), workers, per_worker)


def test_picked_ports_are_held_for_those_who_share() -> None:
    held = pick_ports(3)
    assert len(set(held.numbers)) == 3
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("", held.numbers[0]))
    with socket.socket() as task:
        task.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        task.bind(("", held.numbers[0]))
        task.listen()
        held.release()
        socket.create_connection(("127.0.0.1", held.numbers[0])).close()


def test_a_busy_port_is_named_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as a left-over worker does
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use by process {os.getpid()}"):
            hold_ports([port])
        assert find_holder(port) is not None
    hold_ports([port]).release()
