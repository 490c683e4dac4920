"""Tests of the plan of a script's tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distlaunch.base.errors import UsageError
from distlaunch.base.protocol import SCRIPT_ENTRY
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Place
from distlaunch.jobs.script import find_program, run_name
from distlaunch.plan.script import ScriptJob, plan_script
from distlaunch.plan.train import LaunchPlan


def places(gpus: tuple[str, ...] = ()) -> list[Place]:
    return [Place("", f"127.0.0.1:{port}", gpus) for port in range(1000, 1010)]


def plan(gpus: tuple[str, ...] = (), environ: dict[str, str] | None = None, **job: object) -> LaunchPlan:
    return plan_script(ScriptJob("script", "a.py", ("--x",), **job), RunDir("/r"), 2, places(gpus), environ or {})  # type: ignore[arg-type]


def variable(plan: LaunchPlan, name: str) -> dict[str, str | None]:
    return {str(task.task): task.env.get(name) for task in plan.tasks}


def test_a_single_worker() -> None:
    (task,) = plan().tasks
    own = ("--task-dir=/r/attempts/2/worker-0", "--attempt=2", "--task=worker:0", "--kind=script")
    wrapped = (*own, "--", "a.py", "--x")
    assert task.argv == (sys.executable, "-c", SCRIPT_ENTRY, *wrapped)
    assert task.env == {
        "TF_CONFIG": '{"cluster": {"worker": ["127.0.0.1:1000"]}, "task": {"type": "worker", "index": 0}}',
        "TF_GRPC_REUSE_PORT": "1",
        "DISTLAUNCH_RUN_DIR": "/r",
        "DISTLAUNCH_ATTEMPT": "2",
        "DISTLAUNCH_TASK": "worker:0",
        "PYTHONUNBUFFERED": "1",
    }


def test_who_serves_whom() -> None:
    made = plan(workers=2, ps=1, evaluator=True)
    assert str(made.chief) == "chief:0"
    assert {str(task.task): task.serves for task in made.tasks} == {
        "chief:0": False, "worker:0": True, "worker:1": True, "ps:0": True, "evaluator:0": False,
    }  # fmt: skip
    cluster = {"chief": ["127.0.0.1:1000"], "worker": ["127.0.0.1:1001", "127.0.0.1:1002"], "ps": ["127.0.0.1:1003"]}
    assert all(json.loads(task.env["TF_CONFIG"])["cluster"] == cluster for task in made.tasks)
    quiet = {"chief:0": None, "worker:0": "1", "worker:1": "1", "ps:0": "1", "evaluator:0": None}
    assert variable(made, "TF_CPP_MIN_LOG_LEVEL") == quiet
    own = plan(workers=1, ps=1, environ={"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert set(variable(own, "TF_CPP_MIN_LOG_LEVEL").values()) == {None}


def test_a_chief_beside_workers_is_the_first_of_them() -> None:
    made = plan(workers=2, chief=True)
    assert [str(task.task) for task in made.tasks] == ["chief:0", "worker:0", "worker:1"]
    assert not any(task.serves for task in made.tasks)


def test_processes_of_jax() -> None:
    made = plan(workers=2, jax=True)
    assert variable(made, "JAX_PROCESS_ID") == {"worker:0": "0", "worker:1": "1"}
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "KERAS_DISTRIBUTION_JOB_ADDRESSES"):
        assert set(variable(made, name).values()) == {"127.0.0.1:1000"}
    assert set(variable(made, "JAX_NUM_PROCESSES").values()) == {"2"}
    assert set(variable(made, "TF_CONFIG").values()) == {None}
    assert all("--jax-processes=yes" in task.argv for task in made.tasks)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"workers": 1}, {"worker:0": None}),
        ({"workers": 2}, {"worker:0": "0,1", "worker:1": "2,3"}),
        ({"workers": 1, "chief": True}, {"chief:0": "0,1", "worker:0": "2,3"}),
        ({"workers": 2, "ps": 1}, {"chief:0": "-1", "worker:0": "0,1", "worker:1": "2,3", "ps:0": "-1"}),
        ({"workers": 1, "evaluator": True}, {"worker:0": "0,1,2,3", "evaluator:0": "-1"}),
    ],
)
def test_gpus_are_shared(job: dict[str, object], expected: dict[str, str | None]) -> None:
    assert variable(plan(("0", "1", "2", "3"), **job), "CUDA_VISIBLE_DEVICES") == expected  # type: ignore[arg-type]


def test_too_few_gpus() -> None:
    with pytest.raises(UsageError, match="3 workers do not fit on 2 GPU"):
        plan(("0", "1"), workers=3)


def test_a_program_is_called_as_it_is() -> None:
    (task,) = plan_script(ScriptJob("program", "sh", ("-c", "true")), RunDir("/r"), 0, places()).tasks
    assert (task.argv, task.unsupervised) == (("sh", "-c", "true"), True)


@pytest.mark.parametrize(
    ("target", "module", "kind"),
    [("a.py", False, "script"), ("sh", False, "program"), ("timeit", True, "module"), ("pytest", True, "module"),
     ("here", True, "module"), ("unittest.mock", True, "module")],
)  # fmt: skip
def test_what_can_be_run(target: str, module: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "here.py"):
        (tmp_path / name).touch()
    assert find_program(target, module=module) == (kind, target)


def test_an_executable_file_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").touch(mode=0o755)
    assert find_program("job.sh", module=False) == ("program", str(tmp_path / "job.sh"))


@pytest.mark.parametrize(
    ("target", "module", "message"),
    [
        ("nope.py", False, "nope.py: there is no such script"),
        ("nope", False, "nope: there is no such script or program"),
        ("data.txt", False, r"data.txt is neither a Python script \(.py\) nor executable"),
        (".", False, r"\. is a folder"),
        ("no_such_module", True, "-m no_such_module: there is no such module"),
        ("json.nope", True, "-m json.nope: there is no such module"),
        ("timeit.x", True, "-m timeit.x: there is no such module"),
        ("json", True, "-m json: it is a package without a module __main__"),
        ("a.py", True, "-m a.py: there is no such module"),
        ("a/b", True, "-m a/b: expected the name of a module"),
    ],
)
def test_what_cannot_be_run(
    target: str, module: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").touch()
    with pytest.raises(UsageError, match=message):
        find_program(target, module=module)


@pytest.mark.parametrize(
    ("program", "name"),
    [("train.py", "train"), ("x/my job.py", "my_job"), ("pack.mod", "pack.mod"), ("/bin/sh", "sh"), ("__.py", "run")],
)
def test_the_run_is_called_after_the_program(program: str, name: str) -> None:
    assert run_name(program) == name
