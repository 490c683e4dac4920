"""Tests of how long a server waits for its coordinator."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.errors import UsageError
from distlaunch.training.server import wait_for_chief_to_end


def test_the_time_that_a_connection_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def lose_packets(address: Any, timeout: float) -> None:
        nonlocal now
        now += timeout
        raise TimeoutError

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(socket, "create_connection", lose_packets)
    with pytest.raises(UsageError, match="did not start within 30 s"):
        wait_for_chief_to_end("10.0.0.1:99", 30.0, threading.Event(), [], clock=lambda: now, sleep=sleep)
    assert now - 100.0 <= 32.0
