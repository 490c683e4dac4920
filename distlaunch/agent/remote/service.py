"""The agent's loop: executes requests, reports events, and ends all tasks when the launcher is gone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlaunch import __version__
from distlaunch.agent.host import HostTasks
from distlaunch.agent.host_state import host_state
from distlaunch.agent.messages import Order
from distlaunch.agent.open_files import allow_open_files
from distlaunch.agent.remote import file_transfer
from distlaunch.agent.remote.attempt import HostAttempt
from distlaunch.agent.remote.code_copy import CodeCopy, digest_of
from distlaunch.agent.remote.file_transfer import Incoming
from distlaunch.agent.remote.frames import GREETING, PROTOCOL, Frame, FrameError, FrameReader, encode
from distlaunch.agent.remote.host_facts import host_facts
from distlaunch.agent.remote.outbox import Outbox
from distlaunch.agent.remote.reach import Prober, Target
from distlaunch.agent.remote.run_copy import CopyFolder, CopyInUseError, RunCopy, is_shared
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.errors import UsageError
from distlaunch.base.plain_types import fits, is_list
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.ports import ReservedPorts, listening_ports, pick_ports, reserve_ports

_WAIT_S = 0.1
_WAIT_WHILE_ENDING_S = 0.01  # while the end of a task waits to be reported
_BEAT_S = 2.0
"""Interval of heartbeats while no task runs. A launcher that gets no messages may treat the host as lost."""
_READ_BYTES = 64 * 1024  # the size of a pipe's buffer
_OPENS_WITHIN_S = 45.0
"""Maximum time to wait until another agent no longer uses a copy. The launcher waits a little longer for the answer."""
_MAX_S = 10_000_000
_MAX_PORTS = 10_000
LEASE_S = 60.0
"""If no message arrives for this many seconds, the agent ends all tasks. The launcher can set another number."""


class Agent:
    """Serves one launcher.

    Args:
        reading: the descriptor from which messages are read.
        writing: the descriptor to which messages are written.
        clock: returns monotonic seconds.
    """

    def __init__(self, reading: int, writing: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._reading, self._writing, self._clock = reading, writing, clock
        os.set_blocking(reading, False)
        self._outbox = Outbox(writing)
        self._reader = FrameReader()
        self._warm = WarmStarts()
        self._prober = Prober(clock)
        self._ports = ReservedPorts((), ())
        self._tasks: HostTasks | None = None
        self._attempt: HostAttempt | None = None
        self._root: Path | None = None
        self._copies: dict[Path, CopyFolder] = {}
        self._copy: RunCopy | None = None
        self._opening: tuple[Frame, float] | None = None
        """A request to open a run whose copy another agent uses, and when to give up waiting for it."""
        self._code: CodeCopy | None = None
        self._incoming: Incoming | None = None
        """Writes received files."""
        self._cancelled: set[str] = set()
        """Tasks that were stopped before they were started."""
        self._lease_s, self._received_at, self._beat_at = LEASE_S, clock(), clock()
        self._greeted = self._over = self._writes = False

    def serve(self) -> None:
        """Serve until the session ends, and leave no task behind.

        The session ends when the launcher ends it, is gone, or sends an invalid message.
        """
        self._outbox.put(GREETING)
        self._outbox.put(encode("hello", protocol=PROTOCOL, **host_facts(os.environ)))
        try:
            with self._warm.kept():
                while not self._over:
                    with HostTasks(self._show, self._clock, self._warm) as tasks:
                        self._tasks = tasks
                        self._serve_attempt(tasks)
                    if self._over and self._attempt is not None:  # the launcher has not ended the attempt
                        self._attempt.end_leftover_processes()
                    self._attempt = None
        finally:
            self._prober.close()
            self._ports.release()

    def _serve_attempt(self, tasks: HostTasks) -> None:
        """Serve an attempt until its tasks must end. Leaving `HostTasks` ends them."""
        self._writes = False
        tasks.watch(self._reading)
        tasks.watch(self._prober.fileno())
        attempt_over = False
        while not (self._over or attempt_over):
            is_ending = self._attempt is not None and self._attempt.is_ending
            tasks.wait(_WAIT_WHILE_ENDING_S if is_ending else _WAIT_S)
            try:
                attempt_over = self._read()
                self._prober.turn()
                self._poll()
                self._outbox.flush()
            except OSError:  # the connection is gone
                self._over = True
            if self._writes != self._outbox.has_pending:
                self._writes = not self._writes
                tasks.watch(self._writing, writing=True) if self._writes else tasks.unwatch(self._writing)

    def _read(self) -> bool:
        """Handle received messages; return True if the attempt is over."""
        try:
            data = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            # check the lease only if there is nothing to read: after a suspension, messages may be waiting
            self._over = self._clock() - self._received_at > self._lease_s
            return False
        if not data:
            self._over = True
            return False
        self._received_at = self._clock()
        attempt_over = False
        try:
            for frame in self._reader.feed(data):
                attempt_over = self._take(frame) or attempt_over
        # a field is missing or has another type
        except (FrameError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            self._outbox.put(encode("refused", message=str(error)[:1000]))
            self._outbox.flush()
            self._over = True
        return attempt_over

    def _take(self, frame: Frame) -> bool:
        if not self._greeted:
            self._greet(frame)
        elif frame.kind in file_transfer.KINDS:
            self._receive(frame)
        elif frame.kind == "end":
            self._end(frame)
            return True
        elif (handler := getattr(self, f"_on_{frame.kind}", None)) is not None:
            try:
                handler(frame)
            except UsageError as error:
                self._reply(frame, error=str(error))
            except OSError as error:  # must not be taken for an error of the connection
                reason = error.strerror or str(error)
                message = f"{reason}: {error.filename}" if error.filename else reason
                if "id" not in frame.fields:
                    raise FrameError(f"{frame.kind}: {message}") from None
                self._reply(frame, error=message)
        else:
            raise FrameError(f"got a message of the kind {frame.kind!r:.40}, which this agent does not know")
        return False

    def _greet(self, frame: Frame) -> None:
        theirs = frame.fields.get("distlaunch"), frame.fields.get("protocol")
        if frame.kind != "hello" or theirs != (__version__, PROTOCOL):
            raise FrameError(f"this agent is distlaunch {__version__} (protocol {PROTOCOL}); "
                             f"the launcher is {theirs[0]} (protocol {theirs[1]})")  # fmt: skip
        self._lease_s = float(frame.number("lease_s", 1, _MAX_S))
        self._greeted = True
        self._reply(frame)

    def _on_code(self, frame: Frame) -> None:
        """Report whether the code is on this host. If not, prepare to write the files that the launcher sends next."""
        folder = Path(frame.text("folder"))
        self._code = CodeCopy(folder, json.loads(frame.payload))
        self._incoming = Incoming(folder) if not self._code.is_same else None
        self._reply(frame, same=self._code.is_same)

    def _on_code_sent(self, frame: Frame) -> None:
        self._incoming = None
        if self._code is not None:
            self._code.commit()
        self._reply(frame)

    def _on_enter(self, frame: Frame) -> None:
        try:
            os.chdir(frame.text("folder"))
        except OSError as error:
            advice = "create it, name another folder with folder=PATH, or use `engine.sync: code`"
            raise UsageError(f"{error.strerror}: {frame.text('folder')}; {advice}") from None
        self._reply(frame)

    def _on_state(self, frame: Frame) -> None:
        try:
            self._reply(frame, state=host_state(frame.fields["paths"]))
        except OSError as error:
            raise UsageError(f"its state cannot be read: {error}") from None

    def _on_beat(self, frame: Frame) -> None:
        """Do nothing, since receiving a message has already renewed the lease."""

    def _on_bye(self, frame: Frame) -> None:
        if frame.fields.get("remove"):
            for copy in self._copies.values():
                copy.remove()
        self._over = True

    def _on_compare(self, frame: Frame) -> None:
        """Report which files are missing or differ."""
        wrong = [name for name, digest in json.loads(frame.payload).items() if digest_of(Path(name)) != digest]
        self._reply(frame, wrong=wrong[:20], count=len(wrong))

    def _on_reserve(self, frame: Frame) -> None:
        self._ports.release()
        ports = frame.fields.get("ports")
        if is_list(ports):
            if len(ports) > _MAX_PORTS or not all(type(port) is int and 0 < port < 65536 for port in ports):
                raise FrameError(f"reserve: ports: got {ports!r:.80}; expected at most {_MAX_PORTS:,} from 1 to 65,535")
            self._ports = reserve_ports(ports)
        else:
            self._ports = pick_ports(frame.number("ports", 0, _MAX_PORTS))
        self._reply(frame, ports=list(self._ports.numbers))

    def _on_listen(self, frame: Frame) -> None:
        try:
            self._prober.listen(self._ports.numbers, frame.text("token"))
        except OSError as error:
            raise UsageError(str(error)) from None
        self._reply(frame)

    def _on_unlisten(self, frame: Frame) -> None:
        self._prober.close_listeners()
        self._reply(frame)

    def _on_probe(self, frame: Frame) -> None:
        if not fits(frame.fields.get("targets"), list[list[str | int]]):
            raise FrameError("probe: targets: expected a list of addresses, ports and tokens")
        targets = [Target(*each) for each in frame.fields["targets"]]
        if not all(type(port) is int and 0 < port < 65536 for _, port, _ in targets):
            raise FrameError("probe: targets: expected ports from 1 to 65,535")
        # the reserved ports are open files, too
        allow_open_files(len(targets) + len(self._ports.numbers), count(len(targets), "connection"))
        self._prober.probe(
            targets, frame.number("seconds", 0, _MAX_S), lambda missed: self._reply(frame, missed=missed)
        )

    def _on_listening(self, frame: Frame) -> None:
        self._reply(frame, ports=sorted(listening_ports()))

    def _on_release(self, frame: Frame) -> None:
        self._ports.release()

    def _on_open(self, frame: Frame) -> None:
        """Report whether the run directory is shared with the launcher. If not, make a copy."""
        root = Path(frame.text("root"))
        self._root, self._copy, self._incoming, self._opening = root, None, None, None
        if is_shared(root, frame.text("nonce")):
            self._reply(frame, shared=True, kept="")
            return
        self._opening = frame, self._clock() + min(self._lease_s, _OPENS_WITHIN_S)
        self._open_copy()

    def _open_copy(self) -> None:
        """Answer the request to open a run without a shared disk, unless another agent still uses the copy."""
        if self._opening is None or self._root is None:
            return
        (frame, until), root = self._opening, self._root
        is_first = root not in self._copies
        try:
            if is_first:
                self._copies[root] = CopyFolder(root)
        except UsageError as error:
            # an agent of the same job whose connection was lost ends when its lease is over
            if isinstance(error, CopyInUseError) and self._clock() < until:
                return
            self._opening = None
            self._reply(frame, error=str(error))
            return
        self._opening = None
        self._copy, self._incoming = RunCopy(root), Incoming(root)
        kept = self._copies[root].kept if is_first else None
        checkpoints = RunDir(root).checkpoint_steps()
        self._reply(frame, shared=False, checkpoints=checkpoints, kept="" if kept is None else str(kept))

    def _receive(self, frame: Frame) -> None:
        if self._incoming is None:
            raise FrameError(f"{frame.kind}: no folder is open")
        before = self._incoming.problem
        self._incoming.take(frame)
        if self._copy is not None and frame.kind == file_transfer.MOVE:
            self._copy.note_received(frame.text("to"))
        if self._incoming.problem != before:
            self._show("", self._incoming.problem)

    def _on_begin(self, frame: Frame) -> None:
        if self._root is None:
            raise FrameError("begin: no run directory is open")
        number = frame.number("attempt", 0)
        without, beat_s = frame.fields.get("without"), frame.number("beat_ms", 1, 1000 * _MAX_S) / 1000
        at_once: Any = frame.fields.get("at_once", ())
        if not fits(at_once, list[str]):
            raise FrameError(f"begin: at_once: got {at_once!r:.80}; expected names of files")
        self._attempt = HostAttempt(
            RunDir(self._root), number, self._copy, self._outbox, self._clock, list(without or []), beat_s, at_once
        )

    def _on_start(self, frame: Frame) -> None:
        if self._attempt is None or self._tasks is None or frame.number("attempt") != self._attempt.number:
            raise FrameError(f"start: attempt {frame.fields.get('attempt')} is not the current one")
        name = frame.text("task")
        if name in self._cancelled:
            return
        if self._incoming is not None and self._incoming.problem:
            self._attempt.refuse(name, self._incoming.problem)
        else:
            self._attempt.start(frame, self._tasks)

    def _on_order(self, frame: Frame) -> None:
        if self._attempt is not None and self._attempt.order(frame):
            return
        # the task has not been started, since its files are still being sent: report it as ended by the signal
        name, order = frame.text("task"), Order(frame.text("order"))
        if order is not Order.DUMP and name not in self._cancelled:
            self._cancelled.add(name)
            code = -(signal.SIGKILL if order is Order.KILL else signal.SIGTERM)
            self._outbox.put(encode("exit", task=name, code=code, oom=False))

    def _end(self, frame: Frame) -> None:
        attempt = self._attempt
        assert self._tasks is not None
        self._cancelled.clear()
        self._tasks.end_all()
        number = frame.number("id")

        def done(unsent: str) -> bytes:
            return encode("reply", id=number, unsent=unsent)

        if attempt is None:
            self._outbox.put(done(""))
            return
        attempt.poll()
        if left := attempt.end_leftover_processes():
            self._show("", left)
        attempt.close(done)

    def _poll(self) -> None:
        self._open_copy()
        now = self._clock()
        if self._attempt is not None:
            self._attempt.poll()
            if self._attempt.beats:
                self._beat_at = now
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self._outbox.put(encode("beat", liveness={}, suspended=[], pids={}))

    def _show(self, task: str, line: str) -> None:
        self._outbox.put(encode("line", task=task, text=line))

    def _reply(self, frame: Frame, **fields: Any) -> None:
        self._outbox.put(encode("reply", id=frame.number("id"), **fields))
