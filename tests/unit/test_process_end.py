"""The end of a task's process: exit hooks run, and nothing holds it up or changes its exit code. Real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = """
import atexit, logging, logging.handlers, os, signal, sys, tempfile, threading
from distlaunch.tasks.process_end import end_process
never = threading.Event()
atexit.register(print, "earlier")
end_process.skip_earlier_hooks()
atexit.register(print, "hook")
"""
LIMIT_S = 20


def ended(script: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that runs the script."""
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script],
        cwd=cwd,
        env={"PYTHONPATH": repository, "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("code", [0, 2, 3, 4])
def test_hooks_of_the_user_run_and_no_others(tmp_path: Path, code: int) -> None:
    assert ended(f"end_process({code})", tmp_path) == (code, "hook\n", "")


def test_a_hook_that_raises_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    code, out, err = ended("atexit.register(lambda: 1 / 0)\natexit.register(sys.exit, 7)\nend_process(4)", tmp_path)
    assert (code, out) == (4, "hook\n")
    assert "ZeroDivisionError" in err


def test_a_hook_that_hangs_is_cut_short(tmp_path: Path) -> None:
    code, out, err = ended("atexit.register(never.wait)\nprint('printed')\nend_process(4)", tmp_path)
    assert (code, out) == (4, "printed\n")
    assert err == "exit hooks (atexit) took longer than 3 s; the task ends without the rest of them\n"


def test_threads_do_not_hold_the_end_up(tmp_path: Path) -> None:
    assert ended("threading.Thread(target=never.wait).start()\nend_process(3)", tmp_path)[:2] == (3, "hook\n")


def test_what_python_itself_does_at_exit_is_done(tmp_path: Path) -> None:
    """Buffered log lines are written, and temporary directories deleted."""
    script = """
memory = logging.handlers.MemoryHandler(99, target=logging.FileHandler("log"))
logging.getLogger().addHandler(memory)
logging.warning("buffered")
folder = tempfile.TemporaryDirectory()
end_process(0)
"""
    assert ended(script, tmp_path)[0] == 0
    assert (tmp_path / "log").read_text() == "buffered\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_signal_ends_it_once(tmp_path: Path) -> None:
    """A process that exits in its signal handler does so once, even if a second signal comes while exit hooks run.

    A task has such a handler before it has something to save.
    """
    script = """
signal.signal(signal.SIGTERM, lambda *_: end_process(4))
atexit.register(signal.raise_signal, signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
"""
    assert ended(script, tmp_path) == (4, "hook\n", "")


def test_a_fork_ends_as_python_does(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
end_process(0)
"""
    assert ended(script, tmp_path) == (0, "hook\nearlier\n5\nhook\n", "")


def test_a_reader_that_is_gone_does_not_change_the_code(tmp_path: Path) -> None:
    script = (
        "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nos.close(write)\nprint('lost')\nend_process(3)"
    )
    assert ended(script, tmp_path)[0] == 3
