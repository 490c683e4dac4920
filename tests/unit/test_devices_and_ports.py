"""GPUs and ports of this machine."""

from __future__ import annotations

import os
import socket

import pytest

from distlaunch.cluster.devices import find_gpus, parse_listing, share_gpus
from distlaunch.cluster.ports import find_holder, hold_ports, pick_ports
from distlaunch.errors import UsageError

MIG = """GPU 0: NVIDIA H200 (UUID: GPU-1111)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.18gb     Device  1: (UUID: MIG-bbbb)
GPU 1: NVIDIA H200 (UUID: GPU-2222)
"""


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", ()),
        ("0,1", ("0", "1")),
        ("-1", ()),
        ("1,-1,2", ("1",)),
        ("GPU-ab, MIG-cd", ("GPU-ab", "MIG-cd")),
        ("x", ()),
    ],
)
def test_visible_devices(listed: str, expected: tuple[str, ...]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": listed}) == expected


def test_listing() -> None:
    assert parse_listing(MIG) == ("MIG-aaaa", "MIG-bbbb", "1")
    assert parse_listing("No devices found.\n") == ()


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
