"""Manages the agents of a job. One thread does the I/O of all connections without blocking on any of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from distlaunch.agent.open_files import allow_open_files
from distlaunch.agent.process import Lifeline
from distlaunch.base.plural import count
from distlaunch.cluster.hosts import Host
from distlaunch.engines.remote.answers import unanswered
from distlaunch.engines.remote.host_failures import HostFailures
from distlaunch.engines.remote.link import Command, Link

_FILES_PER_HOST = 4
"""Open files per host: three pipes, and a file that is being sent."""
_SELECT_TIMEOUT_S = 1.0
_KEEP_ALIVE_S = 2.0
_START_S = 60.0
"""Time allowed for an agent's first message. ssh itself gives up earlier, but start-up files of a shell may be slow."""
_BUSY_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before an agent is started again on a server that accepted no more logins."""
_BYE_S = 5.0
_MANY_LINKS, _LITTLE_BYTES, _BATCHING_PAUSE_S = 16, 16 * 1024, 0.15
"""With many hosts, heartbeats arrive constantly. A pause after little data avoids waking up for each of them."""
_NOT_NEEDED = "it is no longer needed"


class Fleet:
    """Starts agents, keeps their connections alive, and ends them.

    Args:
        command_of: returns the command that starts the agent of a host.
        timeout_s: seconds without a message after which a host is lost.
    """

    def __init__(self, hosts: Sequence[Host], command_of: Callable[[Host], Command], timeout_s: float) -> None:
        self.hosts, self._command_of, self._timeout_s = tuple(hosts), command_of, timeout_s
        self.links: dict[str, Link] = {}
        self.failures = HostFailures()
        self.missing: dict[str, str] = {}
        """Reasons why hosts could not be used in the last start, by host."""
        self.warned: set[str] = set()
        """Warnings that have been printed and are not repeated."""
        self.not_sent = ""
        """Files that are not sent to hosts, and why."""
        self.num_starts = 0
        """Number of attempts whose hosts reached each other."""
        self._lifeline: Lifeline | None = None
        self._thread: threading.Thread | None = None
        self._ending, self._posted = threading.Event(), threading.Event()
        self._wake_read = self._wake_write = -1
        self._lock = threading.Lock()
        self._dropped: list[tuple[Link, threading.Event]] = []
        self._beat_at = self._turn_at = 0.0
        self._is_open = False

    def open(self) -> None:
        """Allow connections. No agent is started yet."""
        self._is_open = True

    def connect(self) -> dict[str, str]:
        """Start all missing agents at once; return the reason for each host whose agent did not start.

        Raises UsageError if the system does not allow this process enough open files.
        """
        assert self._is_open, "call `open` first"
        allow_open_files(_FILES_PER_HOST * len(self.hosts), count(len(self.hosts), "host"))
        self._start_thread()
        missing = [host for host in self.hosts if host.label not in self.links or self.links[host.label].lost]
        failed: dict[str, str] = {}
        for pause_s in (*_BUSY_PAUSES_S, None):
            started = [self._start(host) for host in missing]
            failed = unanswered({link.name: link.greeted for link in started}, _START_S)
            for name in failed:
                self.links[name].lose(failed[name])
            missing = [link.host for link in started if link.failed_temporarily]
            if not missing or pause_s is None:
                break
            self._ending.wait(pause_s)
        # hosts that were busy at first may have an agent now
        return {host.label: self.links[host.label].lost for host in self.hosts if self.links[host.label].lost}

    def _start_thread(self) -> None:
        if self._thread is None:
            self._lifeline = Lifeline()
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_woken = False
            self._ending.clear()
            self._starts = ThreadPoolExecutor(1, "starts")
            self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
            self._thread.start()

    def _start(self, host: Host) -> Link:
        assert self._lifeline is not None
        if (old := self.links.get(host.label)) is not None:
            self._drop(old)
        # use another thread: a signal may raise an exception in this one, and the new process would not be recorded
        return self._starts.submit(self._make, host, self._lifeline).result()

    def _make(self, host: Host, lifeline: Lifeline) -> Link:
        link = Link(host, self._command_of(host), lifeline, self._wake)
        link.received_at = time.monotonic()
        with self._lock:
            self.links[host.label] = link
        self._wake()
        return link

    def _drop(self, link: Link) -> None:
        """Detach a connection from the thread, then close its descriptors."""
        gone = threading.Event()
        with self._lock:
            self.links.pop(link.name, None)
            self._dropped.append((link, gone))
        self._wake()
        gone.wait(_BYE_S)
        link.lose(_NOT_NEEDED)
        link.close(0.0)

    def close(self) -> None:
        """End the agents, and forget the facts about their hosts."""
        self._is_open = False
        if self._thread is None or self._lifeline is None:
            return
        self._starts.shutdown()
        until = time.monotonic() + _BYE_S
        for link in self.links.values():
            if link.facts:
                # an agent removes its copy of the run directory if all of its files have been copied here
                link.post("bye", remove=not link.keeps_copies)
            else:
                link.lose(_NOT_NEEDED)  # an agent that has not sent its greeting would not read the message
        for link in self.links.values():
            while not link.lost and time.monotonic() < until:
                self._ending.wait(0.01)
        self._ending.set()
        self._wake()
        self._thread.join()
        self._thread = None
        for link in self.links.values():
            link.lose(_NOT_NEEDED)
            link.close(0.0)
        self.links.clear()
        self._lifeline.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def _wake(self) -> None:
        self._posted.set()
        if not self._is_woken:
            self._is_woken = True
            # if the pipe is full, the thread wakes up anyway
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"+")

    def _run(self) -> None:
        """Do the I/O of all connections; the body of the thread."""
        try:
            self._serve()
        except BaseException as error:
            # callers must not wait for answers that will never come
            for link in list(self.links.values()):
                link.lose(f"the connections of this machine have failed: {error!r}")
            raise

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            watched: dict[int, Link] = {}
            # with many hosts, most messages do not change the set of descriptors to watch
            has_changed = True
            while not self._ending.is_set():
                if has_changed:
                    self._watch_links(selector, watched)
                ready = selector.select(_SELECT_TIMEOUT_S)
                has_changed, now, num_bytes = not ready, time.monotonic(), 0
                for key, _ in ready:
                    if key.fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                        self._is_woken, has_changed = False, True  # reset it before handling changes
                    elif (link := watched.get(key.fd)) is not None:
                        num_bytes += _pump(link, key.fd, now)
                        has_changed = has_changed or bool(link.lost) or key.fd != link.fds[1]
                has_changed = self._keep_alive(now) or has_changed
                if not has_changed and num_bytes < _LITTLE_BYTES and self._may_pause():
                    self._posted.wait(_BATCHING_PAUSE_S)
                self._posted.clear()

    def _may_pause(self) -> bool:
        """Return True if there are many links and no answer is awaited."""
        return len(self.links) > _MANY_LINKS and not any(link.awaits_answer for link in list(self.links.values()))

    def _watch_links(self, selector: selectors.BaseSelector, watched: dict[int, Link]) -> None:
        """Register the descriptors to read and write, and remove those that were dropped or lost."""
        with self._lock:
            links, dropped = list(self.links.values()), self._dropped
            self._dropped = []
        for link in [*links, *(link for link, _ in dropped)]:
            stdin, stdout, stderr = link.fds
            gone = bool(link.lost) or link not in links
            for fd, wanted in ((stdin, link.has_pending), (stdout, True), (stderr, not link.is_silent)):
                is_watched = fd in watched and watched[fd] is link
                if wanted and not gone and not is_watched:
                    watched[fd] = link
                    selector.register(fd, selectors.EVENT_WRITE if fd == stdin else selectors.EVENT_READ)
                elif is_watched and (gone or not wanted):
                    del watched[fd]
                    selector.unregister(fd)
        for _, gone_event in dropped:
            gone_event.set()

    def _keep_alive(self, now: float) -> bool:
        """Send keep-alive messages; return True if links may have been lost."""
        # if this process was suspended for a while, that time does not count as silence of the hosts
        pause, self._turn_at = now - (self._turn_at or now), now
        if now - self._beat_at < _KEEP_ALIVE_S:
            return False
        self._beat_at = now
        with self._lock:
            links = list(self.links.values())
        for link in links:
            if link.lost:
                continue
            if pause > 2 * _SELECT_TIMEOUT_S:
                link.received_at += pause
            if link.takes_beats:
                link.post("beat")
                if now - link.received_at > self._timeout_s:
                    link.lose(f"it has sent no heartbeat for {self._timeout_s:g} s (engine.host_timeout_s)")
        return True


def _pump(link: Link, fd: int, now: float) -> int:
    """Read and write what is ready; return the number of bytes received."""
    stdin, stdout, _ = link.fds
    if fd == stdout:
        return link.pump_in(now)
    if fd == stdin:
        link.pump_out()
    else:
        link.pump_errors()
    return 0
