"""Agents that are still being started when the job must end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from distlaunch.cluster.hosts import Host
from distlaunch.engines.remote import link
from distlaunch.engines.remote.fleet import Fleet
from distlaunch.engines.remote.link import Command


class _Stopped(Exception):  # noqa: N818 (no error)
    pass


def _stop(*_: Any) -> None:
    raise _Stopped


def test_a_signal_within_a_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the process is there, and nobody has been told its number."""
    main, made = threading.main_thread().ident, []
    assert main is not None
    start = subprocess.Popen

    def interrupted(argv: Any, **options: Any) -> Any:
        process = start(argv, **options)
        if argv[0] == "sleep":
            made.append(process)
            signal.pthread_kill(main, signal.SIGUSR1)
        return process

    monkeypatch.setattr(link.subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGUSR1, _stop)
    fleet = Fleet([Host("a")], lambda host: Command(["sleep", "600"], lambda told, code: "ended"), 15.0)
    try:
        fleet.open()
        with contextlib.closing(fleet), pytest.raises(_Stopped):
            fleet.connect()
        (process,) = made
        assert process.wait(10) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGUSR1, before)
        for process in made:
            process.kill()


def test_a_lost_agent_is_reported_at_once() -> None:
    """Whoever waits for its tasks looks seldom if they are many, and is woken."""
    agent = [sys.executable, "-m", "distlaunch.agent.remote"]
    fleet, lost = Fleet([Host("a")], lambda host: Command(agent, lambda told, code: "ended"), 600.0), threading.Event()
    fleet.open()
    with contextlib.closing(fleet):
        assert fleet.connect() == {}
        fleet.links["a"].on_lost = lost.set
        os.kill(fleet.links["a"].facts["pid"], signal.SIGKILL)
        assert lost.wait(10)
        assert fleet.links["a"].lost == "the connection to its agent has ended"
