"""Tests of how failures are found and described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlaunch.base.errors import ExitCode, Problem
from distlaunch.base.run_dir import RunDir, TaskDir
from distlaunch.base.run_files.task_error import write_signal
from distlaunch.cluster.spec import Task
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.diagnose.diagnosis import Traces, find_failure
from distlaunch.supervise.diagnose.exit_reason import (
    TaskError,
    describe_code,
    explain_exit,
    headline,
    last_lines,
    may_be_temporary,
    read_error,
)
from distlaunch.supervise.facts import ErrorRole
from distlaunch.supervise.state import Cause
from distlaunch.supervise.verdict import Verdict

GRAPH_ERROR = """Graph execution error:

Detected at node CollectiveReduceV2 defined at (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main

  File "x.py", line 3, in f

Collective ops is aborted by: recvmsg:Connection reset by peer
\t [[{{node CollectiveReduceV2}}]] [Op:__inference_call_1896]"""
SEVERAL = """Graph execution error:

Detected at node while/Reshape defined at (most recent call last):
  File "/home/me/x.py", line 2, in step
    if flag:
  File "/home/me/x.py", line 3, in step
    return tf.reshape(y, [3, 7])
2 root error(s) found.
  (0) INVALID_ARGUMENT:  Input to reshape has 16 values
\t [[{{node while/Reshape}}]]
  (1) INVALID_ARGUMENT:  Input to reshape has 16 values
0 successful operations."""
IN_A_GENERATOR = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
<stack traces unavailable>
KeyError: 'row 200'
Traceback (most recent call last):

  File "/home/me/x.py", line 6, in rows
    raise KeyError("row 200")
KeyError: 'row 200'
\t [[{{node PyFunc}}]]"""
OF_A_MESH = "{{function_node __inference_train_75__func_12_89}} assertion failed: [y is small] [x (a:0) = ]"
IN_A_MAP = (
    'in user code:\n\n    File "x.py", line 8, in add  *\n        f(y)\n\n    ValueError: y is small\n    [1 2]\n'
)
USER_CODE = 'in user code:\n\n    File "x.py", line 257, in share  *\n        return y\n\n    TypeError: no match\n'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no", "no"),
        ("first\nsecond", "first"),
        ("\nfirst", "first"),
        (GRAPH_ERROR, "Collective ops is aborted by: recvmsg:Connection reset by peer"),
        (USER_CODE, "TypeError: no match"),
        (SEVERAL, "Input to reshape has 16 values"),
        (IN_A_GENERATOR, "KeyError: 'row 200'"),
        (OF_A_MESH, "assertion failed: [y is small] [x (a:0) = ]"),
        (IN_A_MAP, "ValueError: y is small"),
        ("a value (Rows:{\n  0: [1, 2],\n}) of no use", "a value (Rows:{ ... }) of no use"),
    ],
)
def test_headline(message: str, expected: str) -> None:
    assert headline(message) == expected


@pytest.mark.parametrize(
    ("code", "oom", "part"),
    [
        (1, None, "exit code 1"),
        (127, None, "command not found"),
        (-11, None, "SIGSEGV"),
        (-9, None, "by another process, or by the kernel because memory ran out"),
        (-9, True, "out of memory"),
        (-9, False, "but not by the kernel's OOM killer"),
        (-63, None, "signal 63"),
    ],
)
def test_describe_code(code: int, oom: bool | None, part: str) -> None:
    assert part in describe_code(code, oom=oom)


@pytest.mark.parametrize(
    ("kind", "message", "summary"),
    [
        ("TypeError", USER_CODE, "TypeError: no match"),
        ("TypeError", "no match", "TypeError: no match"),
        ("AssertionError", "in user code:\n\n    assert x  *\n\n    AssertionError\n", "AssertionError"),
        ("RuntimeError", "TypeError: no match", "RuntimeError: TypeError: no match"),
        ("StopIteration", "", "StopIteration"),
    ],
)
def test_an_exception_is_named_once(kind: str, message: str, summary: str, tmp_path: Path) -> None:
    files = TaskDir(tmp_path)
    write(files, type=kind, message=message)
    error = read_error(files)
    assert error is not None
    assert error.summary == summary


def write(files: TaskDir, **data: object) -> None:
    files.error_json.write_text(json.dumps({"kind": "exception", "message": "", "traceback": "", "host": "h", **data}))


@pytest.mark.parametrize(
    ("kind", "message", "role"),
    [
        ("UnavailableError", "x", ErrorRole.CONSEQUENCE),
        ("DeadlineExceededError", "x", ErrorRole.CONSEQUENCE),
        ("InternalError", "Collective ops is aborted by: x", ErrorRole.CONSEQUENCE),
        ("JaxRuntimeError", "INTERNAL: Gloo all-reduce failed: Connection closed by peer", ErrorRole.CONSEQUENCE),
        ("JaxRuntimeError", "UNAVAILABLE: failed to connect to all addresses", ErrorRole.CONSEQUENCE),
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: out of memory", ErrorRole.CAUSE),
        ("ValueError", "bad shape", ErrorRole.CAUSE),
        ("ResourceExhaustedError", "OOM when allocating", ErrorRole.CAUSE),
    ],
)
def test_blame(tmp_path: Path, kind: str, message: str, role: ErrorRole) -> None:
    files = TaskDir(tmp_path)
    write(files, type=kind, message=message)
    error = read_error(files)
    assert error is not None
    assert error.role is role


HEARD_NOTHING = (
    ("UnavailableError", "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks "
     "are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed."),
    ("DeadlineExceededError", "Collective ops is aborted by: Deadline Exceeded\n\n"
     "RPC: /tensorflow.CoordinationService/Heartbeat\nThe error could be from a previous operation."),
)  # fmt: skip


@pytest.mark.parametrize(
    ("other", "parted"),
    [
        (HEARD_NOTHING[1], True),
        (("DeadlineExceededError", "reading from the bucket"), False),
        (("UnavailableError", "Collective ops is aborted by: reading from the bucket"), False),
        (None, False),
    ],
)
def test_tasks_that_lived_and_did_not_reach_each_other(
    tmp_path: Path, other: tuple[str, str] | None, parted: bool
) -> None:
    """Two tasks that each report the other as dead are said to have lost their connection.

    TensorFlow reports a cut between the chief's host and another host in this way.
    """
    run = RunDir(tmp_path)
    tasks = tuple(
        TaskPlan(Task("worker", index), (), {}, run.task(0, f"worker:{index}"), f"h{index}:1") for index in (0, 1)
    )
    for task, error in zip(tasks, (HEARD_NOTHING[0], other), strict=True):
        task.files.path.mkdir(parents=True)
        if error is not None:
            write(task.files, type=error[0], message=error[1])
    plan = LaunchPlan(tmp_path, 0, "train", tasks, 100, 30, chief=Task("worker", 0))
    verdict = Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit="worker:0")
    traces = Traces(codes={"worker:0": 3, "worker:1": 3}, hosts={"worker:0": "host1", "worker:1": "host2"})
    failure = find_failure(plan, verdict, traces)
    assert (failure.task, failure.host) == ("worker:0", "host1")
    told = "and worker:1 on host2 no longer reached each other, although all were running: UnavailableError: Collective"
    assert failure.reason.startswith(told) == parted
    assert "stopped sending heartbeats" in failure.reason


@pytest.mark.parametrize(
    ("beats", "suspended", "host", "told"),
    [
        (
            True,
            False,
            "host2",
            "was running, but worker:0 on host1 no longer got its heartbeats: UnavailableError: Collective",
        ),
        (False, False, "host2", "stopped answering; worker:0 noticed it: UnavailableError: Collective"),
        (True, True, "host2", "stopped answering (its process is suspended, as by SIGSTOP); worker:0 noticed it: "),
        (True, False, "host1", "stopped answering; worker:0 noticed it: UnavailableError: Collective"),
    ],
)
def test_a_task_that_lives_on_another_host_is_not_said_to_be_gone(
    tmp_path: Path, beats: bool, suspended: bool, host: str, told: str
) -> None:
    run = RunDir(tmp_path)
    tasks = tuple(TaskPlan(Task("worker", index), (), {}, run.task(0, f"worker:{index}"), "h:1") for index in (0, 1))
    for task in tasks:
        task.files.path.mkdir(parents=True)
    write(tasks[0].files, type=HEARD_NOTHING[0][0], message=HEARD_NOTHING[0][1])
    plan = LaunchPlan(tmp_path, 0, "train", tasks, 100, 30, chief=Task("worker", 0))
    verdict = Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit="worker:0", silent=("worker:1",))
    traces = Traces(
        suspended={"worker:1": suspended}, beating={"worker:1": beats}, hosts={"worker:0": "host1", "worker:1": host}
    )
    failure = find_failure(plan, verdict, traces)
    assert (failure.task, failure.host) == ("worker:1", host)
    assert failure.reason.startswith(told)


def test_heartbeats_of_nobody_have_no_peers(tmp_path: Path) -> None:
    task = TaskPlan(Task("worker", 0), (), {}, RunDir(tmp_path).task(0, "worker:0"), "h:1")
    task.files.path.mkdir(parents=True)
    write(task.files, type=HEARD_NOTHING[0][0], message=HEARD_NOTHING[0][1])
    plan = LaunchPlan(tmp_path, 0, "train", (task,), 100, 30, chief=task.task)
    failure = find_failure(plan, Verdict("failed", ExitCode.FAILED, Cause.FAILURE, culprit="worker:0"), Traces())
    assert failure.reason.startswith("UnavailableError: Collective")


def test_a_signal_after_an_exception_is_told_too(tmp_path: Path) -> None:
    files = TaskDir(tmp_path)
    write(files, type="ValueError", message="x")
    assert explain_exit(-6, read_error(files)) == "ValueError: x (killed by SIGABRT)"
    assert explain_exit(3, read_error(files)) == "ValueError: x"
    assert explain_exit(3, None) == "ended with exit code 3"


@pytest.mark.parametrize("seen", [True, False])
def test_a_process_that_jax_has_aborted_has_lost_a_peer(tmp_path: Path, seen: bool) -> None:
    """A process that JAX has aborted has lost a peer, whether or not the launcher has recorded how it ended."""
    files = TaskDir(tmp_path)
    if seen:
        write_signal(files, -6, 4, "here", oom=None)
    files.stderr_log.write_text("F1121 11:01:56.322086 5920 client.h:80] Terminating process because the JAX "
                                "distributed service detected fatal errors. This most likely ...")  # fmt: skip
    error = read_error(files)
    assert error is not None
    assert error.role is ErrorRole.CONSEQUENCE
    assert "another task is gone" in explain_exit(-6, error)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "exception"}', '{"kind": "config", "problems": 3}'])
def test_a_torn_error_file_is_none(tmp_path: Path, text: str) -> None:
    files = TaskDir(tmp_path)
    files.error_json.write_text(text)
    assert read_error(files) is None


def test_large_arrays_are_left_out(tmp_path: Path) -> None:
    rows = "\n".join(["          [0.        , 1.5e-3],", "          ...,", "           0.25  , 0.        ]]]"])
    files = TaskDir(tmp_path)
    write(
        files, type="ValueError", message="x", traceback=f'  File "x.py", line 3\n    f(2)\nValueError: {{\n{rows}\n}}'
    )
    assert last_lines(files, read_error(files)) == ('  File "x.py", line 3', "    f(2)", "ValueError: {", "}")


def test_the_place_in_ones_own_code_is_kept(tmp_path: Path) -> None:
    """Keras explains some errors at length."""
    own, keras = '  File "/home/me/x.py", line 3, in f', '  File "/v/lib/python3.12/site-packages/keras/y.py", line 4'
    long = [f"what helps: {number}" for number in range(30)]
    trace = "\n".join(["Traceback (most recent call last):", own, "    g(2)", keras, "    raise", *long])
    files = TaskDir(tmp_path)
    write(files, type="ValueError", message="x", traceback=trace)
    assert last_lines(files, read_error(files), 6) == (own, "    g(2)", "    ...", *long[-3:])


def test_a_graph_error_begins_where_the_operation_was_made(tmp_path: Path) -> None:
    """Once for each function; the frames of the call of the graph say nothing."""
    trace = (
        f'Traceback (most recent call last):\n  File "/home/me/y.py", line 1, in call\n    run()\nx.Error: {SEVERAL}'
    )
    files = TaskDir(tmp_path)
    write(files, type="Error", message=SEVERAL, traceback=trace)
    place, *rest = last_lines(files, read_error(files))
    assert [place, rest[0]] == ['  File "/home/me/x.py", line 3, in step', "    return tf.reshape(y, [3, 7])"]
    assert rest[1:3] == ["x.Error: Graph execution error:", "2 root error(s) found."]


def test_users_errors_need_no_traceback(tmp_path: Path) -> None:
    files = TaskDir(tmp_path)
    write(files, type="CheckpointError", message="none", traceback="Traceback ...\nx", user_error=True)
    assert last_lines(files, read_error(files)) == ()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TaskError("ValueError: no", step=4), True),
        (TaskError("ValueError: no"), False),  # before the first step
        (TaskError("ModuleNotFoundError: no", step=4), False),
        (TaskError("the loss is nan", step=4, user_error=True), False),
        (TaskError("the config is wrong", step=4, problems=(Problem(("data",), "no"),)), False),
        (None, False),
    ],
)
def test_what_may_be_gone_the_next_time(error: TaskError | None, passes: bool) -> None:
    assert may_be_temporary(error) == passes
