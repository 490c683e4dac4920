"""The `distlaunch` command with fake_worker.py in place of the worker."""

import contextlib
import os
import signal
import sys
from pathlib import Path

from distlaunch.cli.main import main
from distlaunch.plan import train as plan
from distlaunch.supervise.supervisor import Supervisor

real_argv = plan.worker_argv


def fake_argv(*arguments, **options):  # type: ignore[no-untyped-def]
    return (sys.executable, str(Path(__file__).with_name("fake_worker.py")), *real_argv(*arguments, **options)[4:])


plan.worker_argv = fake_argv

if "FAKE_BETWEEN" in os.environ:
    real_run = Supervisor.run

    def run(self):  # type: ignore[no-untyped-def]
        outcome = real_run(self)
        os.kill(os.getpid(), int(os.environ["FAKE_BETWEEN"]))
        return outcome

    Supervisor.run = run

if "FAKE_ALLOCATING" in os.environ:
    from distlaunch.jobs import attempt

    def wait(*arguments, **options):  # type: ignore[no-untyped-def]
        Path(os.environ["FAKE_ALLOCATING"]).write_text(str(os.getpid()))
        while True:
            signal.pause()

    attempt.allocate_fitting = wait

if "FAKE_LOG" in os.environ:
    from distlaunch.jobs import detach

    real_fork = detach.fork_launcher
    detach.fork_launcher = lambda log: real_fork(Path(os.environ["FAKE_LOG"]))

if "FAKE_CLOSING" in os.environ:
    from distlaunch.jobs import job, script

    number, times = map(int, os.environ["FAKE_CLOSING"].split())

    @contextlib.contextmanager
    def signalled(*arguments):  # type: ignore[no-untyped-def]
        yield
        for _ in range(times):
            os.kill(os.getpid(), number)

    job.leaving_page = script.leaving_page = signalled
main()
