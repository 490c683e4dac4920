"""The connection to one agent: a child process whose standard streams carry the messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distlaunch.agent.process import Lifeline
from distlaunch.agent.remote.frames import Frame, FrameError, FrameReader, GreetingReader, encode
from distlaunch.agent.remote.outbox import Outbox
from distlaunch.cluster.hosts import Host
from distlaunch.engines.remote.replies import check_facts, check_reply

_READ_BYTES = 64 * 1024  # the size of a pipe's buffer
_KEPT_BYTES = 8000  # how much of the end of standard error is kept
_NO_AGENT = "it sent something that is not a message of an agent"


class LinkError(Exception):
    """The agent no longer answers, or refuses a request. The message says why."""


@dataclass(frozen=True)
class Command:
    """The command that starts an agent.

    Attributes:
        argv: a program whose standard streams become the agent's.
        explain: returns the reason of a failure from the text on standard error and the exit code.
        is_busy: returns True if the text on standard error shows a temporary failure.
    """

    argv: Sequence[str]
    explain: Callable[[str, int | None], str]
    is_busy: Callable[[str], bool] = field(default=lambda stderr: False)


class Link:
    """The connection to one agent. Any thread may post messages; only the I/O thread calls `pump_*`.

    Attributes:
        facts: the facts about the host in the agent's greeting; empty until the greeting.
        state: free resources of the host, see `host_state`; empty until the host has been checked.
        is_known: whether the warnings about the host have been printed.
        clock_s: seconds by which the host's clock is ahead of this machine's clock, minus the delay of the greeting.
        lost: why the agent is gone; empty while it works.
    """

    def __init__(self, host: Host, command: Command, lifeline: Lifeline, wake: Callable[[], None]) -> None:
        self.host, self._command, self._lifeline, self._wake = host, command, lifeline, wake
        self.facts: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.is_known = False
        self.lost = ""
        self.clock_s = 0.0
        self.received_at = 0.0
        self.is_ready = False
        """True if the host has passed the checks of this job."""
        self.takes_beats = False
        """True if the agent has been greeted, and may be sent keep-alive messages."""
        self.is_silent = False
        """True if the standard error of the agent has been closed."""
        self.keeps_copies = False
        """True if the host keeps files that could not be copied to the launcher's host."""
        self.take: Callable[[Link, Frame], None] | None = None
        """Handles messages that are not answers; called in the I/O thread."""
        self.on_lost: Callable[[], None] | None = None
        """Called in any thread when the agent is gone."""
        self.greeted: Future[None] = Future()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, Future[Frame]]] = {}
        self._stderr = b""
        self._greeting: GreetingReader | None = GreetingReader()
        self._reader = FrameReader()
        self._process = subprocess.Popen(
            list(command.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C must not reach it, and it must not ask for a password on the terminal
            start_new_session=True,
        )
        lifeline.guard(self._process.pid)
        assert self._process.stdin is not None
        self._outbox = Outbox(self._process.stdin.fileno())
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def name(self) -> str:
        return self.host.label

    @property
    def fds(self) -> tuple[int, int, int]:
        """Return the descriptors of the child's standard input, output and error."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()

    @property
    def has_pending(self) -> bool:
        with self._lock:
            return self._outbox.has_pending

    @property
    def awaits_answer(self) -> bool:
        """Return True if an answer or the greeting is awaited."""
        return bool(self._pending) or not self.greeted.done()

    def post(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send a message; it is dropped silently if the agent is gone."""
        with self._lock:
            self._outbox.put(encode(kind, payload, **fields))
        self._wake()

    def post_in_order(self, messages: Iterable[bytes]) -> None:
        """Send messages that are produced only when they can be written. Later calls are queued behind them."""
        with self._lock:
            self._outbox.put_files(messages)
        self._wake()

    def request(self, kind: str, payload: bytes = b"", *, after_files: bool = False, **fields: Any) -> Future[Frame]:
        """Send a message and return a future of the answer. Its `result()` may raise LinkError.

        Args:
            after_files: whether to send it behind everything given to `post_in_order`.
        """
        answer: Future[Frame] = Future()
        with self._lock:
            number = next(self._numbers)
            if self.lost:
                answer.set_exception(LinkError(self.lost))
                return answer
            self._pending[number] = kind, answer
            message = encode(kind, payload, id=number, **fields)
            self._outbox.put_files([message]) if after_files else self._outbox.put(message)
        self._wake()
        return answer

    def pump_out(self) -> None:
        """Write what can be written without waiting."""
        with self._lock, contextlib.suppress(OSError):  # `pump_in` notices the end of the child
            self._outbox.flush()

    def pump_in(self, now: float) -> int:
        """Read what has arrived; return the number of bytes."""
        stdout = self.fds[1]
        try:
            data = os.read(stdout, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        self.received_at, num_bytes = now, len(data)
        try:
            if self._greeting is not None:
                rest = self._greeting.feed(data)
                if rest is None:
                    return num_bytes
                self._greeting, data = None, rest
            for frame in self._reader.feed(data):
                self._take(frame)
        # a field is missing or has another type
        except (FrameError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.lose(f"{_NO_AGENT}: {error}")
        return num_bytes

    def pump_errors(self) -> None:
        """Read what the child prints to standard error."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fds[2], _READ_BYTES)
            self._stderr = (self._stderr + data)[-_KEPT_BYTES:]
            self.is_silent = not data

    def lose(self, reason: str) -> None:
        """Mark the link as lost: the agent has ended or no longer answers."""
        with self._lock:
            self.lost = self.lost or reason
            pending, self._pending = self._pending, {}
        error = LinkError(self.lost)
        for _, answer in pending.values():
            answer.set_exception(error)
        if not self.greeted.done():
            self.greeted.set_exception(error)
        self._kill()
        if (on_lost := self.on_lost) is not None:
            on_lost()

    @property
    def failed_temporarily(self) -> bool:
        """Return True if the agent failed to start for a temporary reason."""
        return not self.facts and self._command.is_busy(self._stderr.decode(errors="replace"))

    def close(self, wait_s: float) -> None:
        """Wait for the child to exit, and kill it if it does not. The I/O thread must have released the link."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _take(self, frame: Frame) -> None:
        if frame.kind == "hello":
            check_facts(frame)
            self.facts = frame.fields
            self.clock_s = float(self.facts.get("time") or 0.0) - time.time()
            if not self.greeted.done():
                self.greeted.set_result(None)
        elif frame.kind == "refused":
            self.lose(frame.text("message"))
        elif frame.kind == "reply":
            with self._lock:
                asked = self._pending.pop(frame.number("id"), None)
            if asked is not None:
                request, answer = asked
                try:
                    check_reply(request, frame)
                except FrameError as error:
                    # set the exception here, since `lose` only handles answers that are still pending
                    answer.set_exception(LinkError(f"{_NO_AGENT}: {error}"))
                    raise
                answer.set_result(frame)
        elif self.take is not None:
            self.take(self, frame)

    def _end(self) -> None:
        """Mark the link as lost after the end of the child, with a reason from its exit code and last output."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(2.0)
        self.pump_errors()
        reason = self._stderr.decode(errors="replace")
        if self.facts:
            last = [line for line in reason.splitlines() if line.strip()][-1:]
            self.lose("the connection to its agent has ended" + (f": {last[0]}" if last else ""))
        else:
            noise = self._greeting.noise.decode(errors="replace") if self._greeting else ""
            self.lose(self._command.explain(reason or noise, code))

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._lifeline.release(self._process.pid)
