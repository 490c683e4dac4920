"""A forked child answers over its pipe, inherits no other descriptor, and ends with its parent or when it is killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import pytest

from distlaunch.base.forked import fork


def test_a_child_has_only_its_pipe() -> None:
    read, write = os.pipe()

    def run(pipe: Connection) -> None:
        links = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if
                 os.path.exists(f"/proc/self/fd/{name}")}  # fmt: skip
        pipe.send((pipe.fileno(), links))
        print("nobody sees this")

    child = fork(run)
    os.close(write)
    assert os.read(read, 1) == b"", "the child would hold the other end"
    os.close(read)
    number, links = child.pipe.recv()
    assert {fd: link for fd, link in links.items() if link == "/dev/null"}.keys() == {0, 1, 2}
    assert links[number].startswith("socket:")
    assert len(links) == 4
    assert (child.wait(), child.wait()) == (0, 0)
    child.kill()  # nothing is killed that may have the number now
    child.pipe.close()


def test_ends() -> None:
    def fails(pipe: Connection) -> None:
        raise SystemExit(7)

    def waits(pipe: Connection) -> None:
        pipe.recv()

    assert fork(fails).wait() == 1
    child = fork(waits)
    child.pipe.close()
    assert child.wait() == 1, "its parent has gone"
    child = fork(waits)
    child.kill()
    assert child.wait() == -signal.SIGKILL


@pytest.mark.filterwarnings("error")
def test_a_child_that_somebody_else_has_waited_for() -> None:
    child = fork(lambda pipe: None)
    os.waitpid(child.pid, 0)
    assert child.wait() == 0
