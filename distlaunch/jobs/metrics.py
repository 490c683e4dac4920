"""Starts the process that offers a run's state as OpenMetrics, and ends it with the run."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from distlaunch.base.errors import UsageError, reason_of
from distlaunch.base.protocol import PROBLEM, SAFE_MODULE
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.ports import find_holder

_DEADLINE_S = 5.0
"""Time at the end of a run in which the text file can be written."""
_LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Metrics:
    """The places at which a run's state is offered.

    Attributes:
        listening: a socket for scrapes; None if nothing listens.
        url: the URL to scrape; empty if nothing listens.
        file: the text file; None if none is written.
    """

    listening: socket.socket | None = None
    url: str = ""
    file: Path | None = None

    @classmethod
    def open(cls, address: str | None, file: str | None) -> Self:
        """Listen on an address and check the folder of a file.

        Args:
            address: `PORT` or `HOST:PORT`; 0 chooses a free port. Without a host, only this machine is served.

        Raises:
            UsageError: the address or the file cannot be used, or the package prometheus_client is missing.
        """
        path = _check_file(address, file)
        if address is None:
            return cls(file=path)
        listening = _listen(address)
        host, port = listening.getsockname()[:2]
        return cls(listening, f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics", path)


def metrics_options(address: str | None, file: str | None) -> tuple[str, ...]:
    """Return the options of `train` for a job that starts later; see `Metrics.open` for the arguments and errors.

    Whether the address is free shows when the job starts.
    """
    path = _check_file(address, file)
    if address is not None:
        _parse(address)
    return (
        *(("--metrics-port", address) if address is not None else ()),
        *(("--metrics-file", str(path)) if path is not None else ()),
    )


def _check_file(address: str | None, file: str | None) -> Path | None:
    """Check the package and the text file; return the absolute path of the file, or None without a file."""
    if (address or file) and importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("metrics need the package prometheus_client: pip install 'distlaunch[metrics]'")
    if file is None:
        return None
    path = Path(file).absolute()
    if path.suffix != ".prom":
        raise UsageError(f"--metrics-file: got '{file}'; node_exporter reads only files whose names end with .prom")
    if not path.parent.is_dir():
        raise UsageError(f"--metrics-file: there is no folder {path.parent}")
    return path


def _parse(address: str) -> tuple[str, int]:
    """Return the host and the port of an address."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--metrics-port: got '{address}'; expected a port from 0 to 65535, or HOST:PORT")
    return host.strip("[]") or _LOCAL, int(port)


def _listen(address: str) -> socket.socket:
    host, port = _parse(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()
    except OSError as error:
        holder = find_holder(port)
        held = f"; {holder} has it" if holder else ""
        raise UsageError(f"--metrics-port: cannot listen on {host}:{port}: {reason_of(error)}{held}") from error
    return listening


@contextlib.contextmanager
def offering_metrics(
    run: RunDir, metrics: Metrics, environ: Mapping[str, str], note: Callable[[str], None]
) -> Generator[None]:
    """Offer the state of a run in this context.

    Args:
        note: called with the URL, and with warnings; it may be called in any thread.
    """
    if metrics.listening is None and metrics.file is None:
        yield
        return
    descriptors = [] if metrics.listening is None else [metrics.listening.fileno()]
    words = [*(["--socket", str(descriptors[0])] if descriptors else [])]
    words += ["--file", str(metrics.file)] if metrics.file else []
    process = subprocess.Popen(
        [sys.executable, *SAFE_MODULE, "distlaunch.runs.metrics", str(run.path), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="locale", env=dict(environ),
        pass_fds=descriptors, start_new_session=True,
    )  # fmt: skip
    if metrics.listening is not None:
        note(f"metrics at {metrics.url}")
        metrics.listening.close()
    given_up = threading.Event()
    watching = threading.Thread(target=_watch, args=(process, note, given_up), name="metrics", daemon=True)
    watching.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the process then writes the last values
        try:
            process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            note(f"warning: metrics: the last values were not written in {_DEADLINE_S:g} s")
            given_up.set()
            process.kill()
        watching.join()


def _watch(process: subprocess.Popen[str], note: Callable[[str], None], given_up: threading.Event) -> None:
    """Report the problems of the process when they occur, and why it has failed, unless the launcher kills it."""
    assert process.stdout is not None
    last = ""
    for line in map(str.rstrip, process.stdout):
        if line.startswith(PROBLEM):
            note(f"warning: metrics: {line.removeprefix(PROBLEM)}")
        last = line or last
    if process.wait() and not given_up.is_set():
        note(f"warning: metrics: {last or f'exit code {process.returncode}'}")
