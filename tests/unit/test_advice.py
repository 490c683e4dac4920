"""Tests that the advice after a failure depends on its cause."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from distlaunch.supervise.diagnose.advice import Advice, advise
from distlaunch.supervise.diagnose.exit_reason import TaskError
from distlaunch.supervise.state import Cause

TRACEBACK = """Traceback (most recent call last):
  File "/home/u/first.py", line 3, in <module>
    raise KeyError
KeyError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/u/project/train.py", line 7, in step
    bug()
  File "/home/u/project/bug.py", line 15, in bug
    keras.ops.add(1)
  File "/x/site-packages/keras/src/ops.py", line 9, in add
    raise TypeError
TypeError: no"""
NOT_OURS = (
    'Traceback (most recent call last):\n  File "/x/site-packages/keras/src/ops.py", line 9, in add\n    x\nE: no'
)
RESUME = Advice()
LESS_MEMORY = Advice("use less memory (a smaller data.global_batch, more workers)")
JAX_ERROR = "JaxRuntimeError"


def error(kind: str = "TypeError", traceback: str = TRACEBACK, **more: Any) -> TaskError:
    return TaskError(f"{kind}: no", traceback, kind=kind, **more)


@pytest.mark.parametrize(
    ("found", "code", "expected"),
    [
        (error(), 3, Advice("fix bug.py:15")),
        (error("ModuleNotFoundError"), 3, Advice("fix bug.py:15")),
        (error(traceback=NOT_OURS), 3, Advice("fix the error above")),
        (error("UnavailableError", consequence=True), 3, RESUME),
        (error("CheckpointError", user_error=True), 3, Advice(resume=False)),
        (error("CheckpointWriteError", user_error=True), 3, Advice("make room")),
        (error("DataError", user_error=True), 3, Advice("correct the data")),
        (error("ResourceExhaustedError"), 3, LESS_MEMORY),
        (
            TaskError(f"{JAX_ERROR}: RESOURCE_EXHAUSTED: Out of memory allocating 400 bytes.", kind=JAX_ERROR),
            3,
            LESS_MEMORY,
        ),
        (TaskError(f"{JAX_ERROR}: INVALID_ARGUMENT: no", kind=JAX_ERROR), 3, Advice("fix the error above")),
        (error("UsageError", user_error=True), 3, Advice("fix that")),
        (None, -signal.SIGKILL, RESUME),
        (None, -signal.SIGTERM, RESUME),
        (None, 1, RESUME),
    ],
)
def test_failures(found: TaskError | None, code: int, expected: Advice) -> None:
    assert given(Cause.FAILURE, found, code) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("pandas", "install it (`pip install pandas`, "),
        ("sklearn", "install it (`pip install scikit-learn`, "),
        ("helpers", "fix bug.py:1"),
        ("helper", "fix bug.py:1"),
        ("kears", "fix bug.py:1"),
        ("keras.no", "fix bug.py:1"),
        ("_mine", "fix bug.py:1"),
    ],
)
def test_a_missing_module_is_installed_unless_it_looks_like_the_users_own(
    tmp_path: Path, module: str, expected: str
) -> None:
    for name in ("helpers.py", "nand.py"):  # the second is not that much like pandas
        (tmp_path / name).touch()
    summary = f"ModuleNotFoundError: No module named '{module}'"
    lines = f'Traceback (most recent call last):\n  File "{tmp_path}/bug.py", line 1, in <module>\n    import {module}'
    found = TaskError(summary, f"{lines}\n{summary}", kind="ModuleNotFoundError")
    assert given(Cause.FAILURE, found, 3).first.startswith(expected)


def test_a_missing_file_may_only_have_to_be_copied() -> None:
    summary = "FileNotFoundError: [Errno 2] No such file or directory: '/data/x y.npy'"
    lines = 'Traceback (most recent call last):\n  File "/home/u/d.py", line 3, in data\n    np.load(path)'
    found = TaskError(summary, f"{lines}\n{summary}", kind="FileNotFoundError")
    expected = "copy /data/x y.npy to that host if it is missing only there, otherwise fix d.py:3"
    assert given(Cause.FAILURE, found, 3, hosts=True) == Advice(expected)
    assert given(Cause.FAILURE, found, 3) == Advice("fix d.py:3")


def test_the_line_that_a_message_names_is_named() -> None:
    told = "/home/u/my code/st.py:49: breakpoint(): a task has no terminal; `distlaunch train --debug CONFIG` runs"
    assert given(Cause.FAILURE, TaskError(told, kind="NoTerminalError", user_error=True), 3) == Advice("fix st.py:49")


def test_memory_is_saved_first() -> None:
    assert "data.global_batch" in given(Cause.FAILURE, None, -signal.SIGKILL, oom=True).first
    assert "data.global_batch" in given(Cause.FAILURE, error("ResourceExhaustedError"), 3).first


def test_a_loss_that_is_not_finite_comes_again_with_the_same_values() -> None:
    advice = given(Cause.FAILURE, error("NonFiniteError", user_error=True), 3)
    assert "--set" in advice.first
    assert advice.resume


@pytest.mark.parametrize(
    ("why", "late", "key"),
    [
        (Cause.OVERDUE, False, "cluster.start_timeout_s (now 300)"),
        (Cause.STALLED, False, "cluster.stall_timeout_s (now 1800)"),
        (Cause.TERMINATE, True, "cluster.stop_timeout_s (now 30)"),
    ],
)
def test_what_took_too_long_may_take_longer(why: Cause, late: bool, key: str) -> None:
    assert key in given(why, None, -signal.SIGKILL, late=late).first


def test_what_cannot_start_is_mended() -> None:
    assert given(Cause.FAILURE, None, 127, unstartable=True).first == "fix what keeps the process from starting"


def given(why: Cause, found: TaskError | None, code: int, **more: Any) -> Advice:
    return advise(why, found, code, start_timeout_s=300, stall_timeout_s=1800, stop_timeout_s=30, **more)


@pytest.mark.parametrize(
    ("summary", "file", "is_named"),
    [
        ("ImportError: cannot import name 'KEY' from 'secrets' (/usr/lib/secrets.py)", "secrets.py", True),
        ("ImportError: cannot import name 'KEY' from 'secrets' (unknown location)", "secrets/__init__.py", True),
        ("ModuleNotFoundError: No module named 'queue.mine'; 'queue' is not a package", "queue/__init__.py", True),
        ("AttributeError: module 'types' has no attribute 'Mine'", "types.py", True),
        # the user's own module was imported, and does not have the name
        ("AttributeError: module 'helpers' has no attribute 'Mine'", "helpers.py", False),
        ("ImportError: cannot import name 'KEY' from 'secrets' (/usr/lib/secrets.py)", "other.py", False),
    ],
)
def test_a_module_of_the_users_whose_name_is_taken(tmp_path: Path, summary: str, file: str, is_named: bool) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    lines = f'Traceback (most recent call last):\n  File "{tmp_path}/bug.py", line 1, in <module>\n    x'
    found = TaskError(summary, f"{lines}\n{summary}", kind=summary.partition(":")[0])
    first = given(Cause.FAILURE, found, 3).first
    taken = f"rename {tmp_path / file}: another module with this name is already loaded"
    assert first == (taken if is_named else "fix bug.py:1")


def test_a_variable_that_jax_cannot_read() -> None:
    found = TaskError(
        "ValueError: invalid truth value 'x' for environment 'JAX_ENABLE_X64'", NOT_OURS, kind="ValueError"
    )
    assert given(Cause.FAILURE, found, 3).first == "correct JAX_ENABLE_X64 in the environment, or unset it"
