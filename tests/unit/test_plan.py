"""Plans as users read them, whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.config.run import RunConfig
from distlaunch.plan.train import (
    LaunchPlan,
    cluster_at,
    fit_config,
    plan_json,
    plan_launch,
    preload_for,
    render_plan,
    task_run_name,
)

TF_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 1}})


def config(strategy: dict[str, Any], **cluster: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "mnist",
            "model": {"function": "m:f"},
            "data": {"function": "m:d", "global_batch": 128},
            "strategy": strategy,
            "cluster": cluster,
        }
    )


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python")


def _places(gpus: tuple[str, ...]) -> list[Place]:
    """Any number of them on one host."""
    return [Place(gpus=gpus)] * 8


def _cluster(run_config: RunConfig, ports: Sequence[int | str]) -> ClusterSpec:
    return cluster_at(run_config.strategy.processes(run_config.cluster), [f"127.0.0.1:{port}" for port in ports])


CASES: dict[str, tuple[RunConfig, dict[str, Any]]] = {
    "one_device": (config({"kind": "one_device"}), {}),
    "mirrored_4_gpus": (config({"kind": "mirrored", "replicas": 2}), {"places": _places(("0", "1", "2", "3"))}),
    "multi_worker": (config({"kind": "multi_worker_mirrored"}, workers=2, ports=[5001, 5002]), {}),
    "multi_worker_4_gpus": (
        config({"kind": "multi_worker_mirrored"}, workers=2),
        {"places": _places(("0", "1", "2", "3"))},
    ),
    "mesh_4_gpus": (
        config({"kind": "jax", "mesh": {"batch": 2}}, workers=2, ports=[5001, 5002]),
        {"places": _places(("0", "1", "2", "3"))},
    ),
    "parameter_server": (config({"kind": "parameter_server"}, workers=2, ps=1), {}),
    "evaluator": (config({"kind": "one_device"}, evaluator=True), {"places": _places(("0", "1"))}),
    "parameter_server_evaluator": (
        config({"kind": "parameter_server"}, workers=2, ps=1, evaluator=True),
        {"places": _places(("0", "1"))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str, golden: Callable[[str, str], None]) -> None:
    run_config, arguments = CASES[case]
    ports = run_config.cluster.ports
    cluster = _cluster(run_config, ports if ports != "auto" else ["(picked at start)"] * 4)
    plan = plan_launch(run_config, RunDir("/runs/mnist"), 0, "train", cluster, **arguments)
    golden(f"plan/{case}.txt", render_plan(plan, run_config) + "\n")
    golden(f"plan/{case}.json", plan_json(plan) + "\n")


def test_one_task_of_a_given_cluster(golden: Callable[[str, str], None]) -> None:
    spec, here = from_tf_config(TF_CONFIG)
    run_config = config({"kind": "multi_worker_mirrored"}, workers=3)
    name = task_run_name("mnist", spec, here)
    plan = plan_launch(run_config, RunDir(Path("/runs") / name), 2, "train", spec, here=here, engine="tf_config")
    golden("plan/tf_config.txt", render_plan(plan, run_config) + "\n")
    assert plan.lead == Task("worker", 1)


def given(job: str, evaluator: bool = False) -> LaunchPlan:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    spec, here = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}}))
    run_config = config({"kind": "parameter_server"}, workers=2, ps=1, evaluator=evaluator)
    return plan_launch(run_config, RunDir("/r"), 0, "train", spec, here=here, places=_places(("0",)))


@pytest.mark.parametrize(("job", "waits"), [("chief", False), ("worker", True), ("ps", True)])
def test_a_server_of_a_given_cluster_waits_for_its_chief(job: str, waits: bool) -> None:
    (task,) = given(job, evaluator=True).tasks
    assert ("--wait-for-chief" in task.argv, task.serves) == (waits, waits)
    assert "TF_CONFIG" in task.env


def test_an_evaluator_beside_a_given_cluster() -> None:
    (task,) = given("evaluator").tasks
    assert (str(task.task), task.address, task.serves) == ("evaluator:0", None, False)
    assert "TF_CONFIG" not in task.env
    assert task.env["CUDA_VISIBLE_DEVICES"] == "-1"


def test_only_training_has_an_evaluator() -> None:
    run_config = config({"kind": "one_device"}, evaluator=True)
    plan = plan_launch(run_config, RunDir("/r"), 0, "evaluate", ClusterSpec({}))
    assert [str(task.task) for task in plan.tasks] == ["worker:0"]


def test_extra_arguments_reach_the_worker() -> None:
    run_config = config({"kind": "one_device"})
    plan = plan_launch(run_config, RunDir("/r"), 3, "evaluate", ClusterSpec({}), extra=["--checkpoint", "7"])
    assert plan.tasks[0].argv[-4:] == ("--mode", "evaluate", "--checkpoint", "7")


def test_the_given_cluster_decides_how_many_workers_there_are() -> None:
    spec, _ = from_tf_config(TF_CONFIG)
    kind = {"kind": "multi_worker_mirrored"}
    assert fit_config(config(kind, workers=2), spec).cluster.workers == 3


@pytest.mark.parametrize(("ps", "given"), [(0, 2), (1, 2), (3, 1)])
def test_the_given_cluster_decides_how_many_parameter_servers_there_are(ps: int, given: int) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": [f"d:{index + 1}" for index in range(given)]}
    spec, _ = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}))
    fitted = fit_config(config({"kind": "parameter_server"}, ps=ps), spec)
    assert (fitted.cluster.workers, fitted.cluster.ps) == (2, given)


@pytest.mark.parametrize(
    ("cluster", "task"),
    [({"master": ["a:1"], "worker": ["b:1"]}, "worker"), ({"worker": ["b:1"]}, "master")],
)
def test_the_master_of_tensorflow_1_is_a_chief(cluster: dict[str, list[str]], task: str) -> None:
    with pytest.raises(UsageError, match="'master', the name of the chief in TensorFlow 1; write 'chief'"):
        from_tf_config(json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}}))


def test_the_given_cluster_shares_the_mesh() -> None:
    spec, here = from_tf_config(TF_CONFIG)
    mesh = config({"kind": "jax", "mesh": {"batch": 2, "model": 3}})
    fitted = fit_config(mesh, spec)
    assert fitted.cluster.workers == 3
    plan = plan_launch(fitted, RunDir("/r"), 0, "train", spec, here=here, engine="tf_config")
    assert json.loads(plan.tasks[0].env["TF_CONFIG"])["cluster"]["worker"] == ["a:1", "b:1", "c:1"]
    with pytest.raises(ConfigError, match=r"cluster.workers: got 3, which cannot share the mesh's 4 devices equally"):
        fit_config(config({"kind": "dtensor", "mesh": {"batch": 4}}, workers=2), spec)


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("jax", None, ("jax",)),
        ("jax", "map", ("jax", "tensorflow")),
        ("jax", "augment", ("jax", "tensorflow")),
        ("one_device", "map", ("tensorflow",)),
    ],
)
def test_tasks_are_forked_from_imports_that_their_data_needs(
    kind: str, key: str | None, words: tuple[str, ...]
) -> None:
    mesh = {"mesh": {"batch": 1}} if kind == "jax" else {}
    made = config({"kind": kind, **mesh})
    made = made if key is None else made.model_copy(update={"data": made.data.model_copy(update={key: "m:f"})})
    assert preload_for(made, Task("worker", 0), "train").arguments == words


def test_too_few_gpus() -> None:
    run_config = config({"kind": "multi_worker_mirrored"}, workers=2)
    with pytest.raises(UsageError, match="2 workers do not fit on 1 GPU"):
        plan_launch(run_config, RunDir("/r"), 0, "train", _cluster(run_config, [1, 2]), places=_places(("0",)))
    mesh = config({"kind": "jax", "mesh": {"batch": 8}}, workers=2)
    with pytest.raises(UsageError, match="2 workers with 4 GPUs each do not fit on 4 GPU"):
        plan_launch(mesh, RunDir("/r"), 0, "train", _cluster(mesh, [1, 2]), places=_places(("0", "1", "2", "3")))


def test_names() -> None:
    spec, here = from_tf_config(TF_CONFIG)
    assert task_run_name("x", spec, here) == "x-worker-1"
    assert task_run_name("x", spec, Task("worker", 0)) == "x"
    assert task_run_name("x", spec, None) == "x"
    assert task_run_name("x", spec, Task("evaluator", 0)) == "x"


def _plan_on(hosts: Sequence[tuple[str, int, int]], kind: str, **strategy: Any) -> LaunchPlan:
    """The plan on hosts with these names, numbers of workers and numbers of GPUs."""
    places = [
        Place(host, f"{host}:{worker}", tuple(map(str, range(gpus))))
        for host, workers, gpus in hosts
        for worker in range(workers)
    ]
    run_config = config({"kind": kind, **strategy}, workers=len(places))
    cluster = cluster_at(run_config.strategy.processes(run_config.cluster), [place.address for place in places])
    return plan_launch(run_config, RunDir("/r"), 0, "train", cluster, places=places)


def _visible(plan: LaunchPlan) -> list[str | None]:
    return [task.env.get("CUDA_VISIBLE_DEVICES") for task in plan.tasks]


def test_each_host_shares_out_its_own_gpus() -> None:
    plan = _plan_on([("a", 2, 2), ("b", 1, 1)], "multi_worker_mirrored")
    assert [(task.host, task.env.get("CUDA_VISIBLE_DEVICES")) for task in plan.tasks] == [
        ("a", "0"),
        ("a", "1"),
        ("b", None),  # alone there, it sees all
    ]
    assert [task["host"] for task in plan.to_plain()["tasks"]] == ["a", "a", "b"]
    assert not plan.warnings


@pytest.mark.parametrize(
    ("hosts", "visible", "warning"),
    [
        ([("a", 4, 4), ("b", 1, 4)], ["0", "1", "2", "3", "0"], "b: 1 of 4 GPUs are used"),
        ([("a", 1, 4), ("b", 1, 8)], [None, "0,1,2,3"], "b: 4 of 8 GPUs are used"),
        ([("a", 2, 8), ("b", 1, 3)], ["0,1,2", "3,4,5", None], "a: 6 of 8 GPUs are used"),
    ],
)
def test_workers_in_lockstep_have_the_same_number_of_gpus(
    hosts: list[tuple[str, int, int]], visible: list[str | None], warning: str
) -> None:
    plan = _plan_on(hosts, "multi_worker_mirrored")
    assert _visible(plan) == visible
    assert plan.warnings == (f"{warning}, since all workers need the same number of GPUs",)


def test_a_worker_has_the_devices_of_its_part_of_the_mesh() -> None:
    assert _visible(_plan_on([("a", 1, 2), ("b", 1, 4)], "jax", mesh={"batch": 4})) == [None, "0,1"]


@pytest.mark.parametrize("strategy", [{"kind": "multi_worker_mirrored"}, {"kind": "jax", "mesh": {"batch": 3}}])
def test_hosts_with_and_without_gpus_are_refused(strategy: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="there are GPUs on a, c, but none on b, and all workers need the same number"):
        _plan_on([("a", 1, 2), ("b", 1, 0), ("c", 1, 2)], **strategy)
