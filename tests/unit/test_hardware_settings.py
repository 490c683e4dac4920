"""Variables and cores of tasks follow from the hardware of their hosts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.helper_process import Answer
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import GPU_THREADS, INJECTED, ONEDNN, POOL_SIZES, XLA_FLAGS, Hardware
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import (
    LATENCY_HIDING,
    Cores,
    RunSettings,
    Setting,
    decide,
    kept_variables,
    numa_shares,
    settings_in_effect,
)
from distlaunch.cluster.spec import Place, Task
from distlaunch.config.run import RunConfig
from distlaunch.jobs.predict_export import PredictRequest, predict_export
from distlaunch.plan.script import ScriptJob, plan_script
from distlaunch.plan.train import LaunchPlan, cluster_at, plan_launch, render_plan

ZEN3 = Hardware("linux", "x86_64", "EPYC 7763", ("avx2",), 4, 4, range(4))
ZEN4 = ZEN3._replace(cpu="EPYC 9654", features=("avx2", "avx512_vnni", "avx512_bf16"))
OLD = ZEN3._replace(cpu="Xeon E5-2670", features=())
ALDER = ZEN3._replace(features=("avx2", "avx_vnni"))
ARM = ZEN3._replace(architecture="aarch64", features=())
MAC = ZEN3._replace(system="darwin", architecture="arm64", features=())


def _user(hardware: Hardware, **environ: str) -> Hardware:
    return hardware._replace(environ=environ)


def _onednn(settings: RunSettings) -> dict[str, str | None]:
    return {host: each.variables.get(ONEDNN) for host, each in settings.hosts.items()}


def _setting(settings: RunSettings, host: str, name: str) -> Setting:
    (found,) = [each for each in settings.of(host).settings if each.name == name]
    return found


@pytest.mark.parametrize(
    ("hosts", "expected", "fact"),
    [
        ([ZEN3], "1", "the CPU of a has AVX2, for which oneDNN's kernels are faster; TensorFlow alone"),
        ([ZEN4], "1", "the CPU of a has AVX512-VNNI, for which TensorFlow turns oneDNN on"),
        ([ALDER], "1", "AVX-VNNI"),
        ([ALDER, ZEN4], "1", "the CPUs of a, b have AVX-VNNI or AVX512-VNNI"),
        ([ZEN4, ZEN3, ZEN3], "1", "the CPUs of b, c have AVX2, for which"),
        ([OLD], "0", "the CPU of a has no AVX2"),
        ([ZEN4, OLD], "0", "the CPU of b has no AVX2"),
        ([ARM], None, ""),
        ([MAC], None, ""),
        ([ZEN4, ARM], None, ""),
    ],
)
def test_all_hosts_round_alike(hosts: list[Hardware], expected: str | None, fact: str) -> None:
    settings = decide(dict(zip("abc", hosts, strict=False)), {})
    assert set(_onednn(settings).values()) == {expected}
    assert not settings.warnings
    if expected is not None:
        setting = _setting(settings, "a", ONEDNN)
        assert fact in setting.reason
        assert setting.source == "hardware"


@pytest.mark.parametrize(
    ("hosts", "recorded", "expected", "source"),
    [
        ([ZEN3], "0", "0", "run"),  # trained by a user who had turned it off, perhaps on another machine
        ([OLD], "1", "1", "run"),
        ([ARM], "1", "1", "run"),
        ([ZEN4], "1", "1", "hardware"),
        ([ZEN4], "TRUE", "1", "hardware"),
        ([ZEN4], "what?", "1", "hardware"),  # a damaged record
        ([_user(ZEN4, **{ONEDNN: "0"})], "0", "0", "environment"),
    ],
)
def test_a_run_keeps_how_it_rounds(hosts: list[Hardware], recorded: str, expected: str, source: str) -> None:
    settings = decide({"": hosts[0]}, {}, recorded={ONEDNN: recorded, "OMP_NUM_THREADS": "17"})
    assert settings.of("").variables == {ONEDNN: expected}
    assert _setting(settings, "", ONEDNN).source == source
    assert not settings.warnings
    assert kept_variables(hosts[0], {ONEDNN: recorded}) == {ONEDNN: expected}


def test_what_the_user_sets_wins_with_a_warning() -> None:
    settings = decide({"": _user(ZEN4, **{ONEDNN: "0"})}, {}, recorded={ONEDNN: "1"})
    assert _setting(settings, "", ONEDNN) == Setting(ONEDNN, "0", "your environment sets it", "environment")
    (warning,) = settings.warnings
    assert "your environment sets TF_ENABLE_ONEDNN_OPTS=0, but the run was trained with 1" in warning


def test_what_one_host_sets_all_get() -> None:
    settings = decide({"a": ZEN4, "b": _user(ZEN4, **{ONEDNN: "0"})}, {})
    assert _onednn(settings) == {"a": "0", "b": "0"}
    assert "the environment of b sets it" in _setting(settings, "a", ONEDNN).reason
    assert not settings.warnings


def test_hosts_whose_environments_contradict_each_other() -> None:
    settings = decide({"a": _user(ZEN4, **{ONEDNN: "1"}), "b": _user(ZEN4, **{ONEDNN: "0"}), "c": ZEN4}, {})
    assert _onednn(settings) == {"a": "1", "b": "0", "c": "1"}
    (warning,) = settings.warnings
    assert "1 on a, 0 on b" in warning


def test_a_value_that_tensorflow_ignores_is_nobody_elses() -> None:
    settings = decide({"a": _user(ZEN4, **{ONEDNN: "yes"}), "b": ZEN3}, {})
    assert _onednn(settings) == {"a": "yes", "b": "1"}


@pytest.mark.parametrize(
    ("hardware", "num_tasks", "share", "reason"),
    [
        (ZEN3, 1, None, ""),
        (ZEN3, 2, "2", "2 tasks share 4 cores"),
        (ZEN3, 3, "1", "3 tasks share 4 cores"),
        (ZEN3, 1000, "1", "1,000 tasks share 4 cores"),
        (ZEN3._replace(cpu_limit=2), 1, "2", "the task may use 2 cores, the container's limit on a host that shows 4"),
        (ZEN3._replace(cpu_limit=2), 2, "1", "2 tasks share 2 cores, the container's limit on a host that shows 4"),
        (ZEN3._replace(cpu_limit=64), 2, "2", "2 tasks share 4 cores"),
        (ZEN3._replace(usable_cores=(1,)), 1, None, ""),
        (ZEN3._replace(usable_cores=(1,)), 4, None, ""),  # libraries see one core by themselves
        (ZEN3._replace(usable_cores=(0, 2)), 2, "1", "2 tasks share 2 cores"),
    ],
)
def test_tasks_share_the_cores_of_their_host(
    hardware: Hardware, num_tasks: int, share: str | None, reason: str
) -> None:
    settings = decide({"a": hardware, "b": ZEN3}, {"a": num_tasks, "b": 1})
    assert settings.of("b").variables == {ONEDNN: "1"}
    variables = settings.of("a").variables
    assert variables == {ONEDNN: "1", **({} if share is None else dict.fromkeys(POOL_SIZES, share))}
    if share is not None:
        assert _setting(settings, "a", "NPROC").reason == reason
        assert all(hosts == ("a",) for setting, hosts in settings.rows if setting.name != ONEDNN)


def test_what_the_user_says_of_a_pool_stays() -> None:
    settings = decide({"": _user(ZEN3, OMP_NUM_THREADS="7")}, {"": 2})
    assert settings.of("").variables == {ONEDNN: "1", **dict.fromkeys(POOL_SIZES, "2"), "OMP_NUM_THREADS": "7"}
    assert _setting(settings, "", "OMP_NUM_THREADS").source == "environment"


@pytest.mark.parametrize(
    ("num_gpus", "backend", "expected"),
    [
        ([0], "tensorflow", set()),
        ([1], "tensorflow", {GPU_THREADS}),
        ([2], "tensorflow", {GPU_THREADS}),
        ([1], "jax", set()),
        ([2], "jax", {XLA_FLAGS}),
        ([1, 1], "jax", {XLA_FLAGS}),
        ([0, 0], "jax", set()),
        ([2], None, {GPU_THREADS}),
    ],
)
def test_settings_for_gpus(num_gpus: list[int], backend: str | None, expected: set[str]) -> None:
    hosts = {name: ZEN4._replace(gpus=[*map(str, range(n))]) for name, n in zip("ab", num_gpus, strict=False)}
    settings = decide(hosts, {}, backend=backend)
    for host in hosts:
        assert settings.of(host).variables.keys() - {ONEDNN} == expected
    own = {name: _user(each, XLA_FLAGS="--mine", TF_GPU_THREAD_MODE="global") for name, each in hosts.items()}
    values = {GPU_THREADS: "global", XLA_FLAGS: "--mine"}
    assert decide(own, {}, backend=backend).of("a").variables == {ONEDNN: "1", **{n: values[n] for n in expected}}


@pytest.mark.parametrize(
    ("hardware", "recorded", "expected", "warns"),
    [
        (ZEN4, {}, "1", False),
        (ZEN3, {}, "0", False),  # nobody has set the variable before TensorFlow was imported
        (ZEN3, {ONEDNN: "1"}, "0", True),
        (_user(ZEN3, **{ONEDNN: "1"}), {ONEDNN: "1"}, "1", False),
        (_user(ZEN3, **{ONEDNN: "what?"}), {}, "0", False),
        (ARM, {ONEDNN: "1"}, None, False),
    ],
)
def test_a_process_that_has_imported_tensorflow_already(
    hardware: Hardware, recorded: dict[str, str], expected: str | None, warns: bool
) -> None:
    settings = settings_in_effect(hardware, recorded)
    assert settings.of("").variables.get(ONEDNN) == expected
    assert bool(settings.warnings) is warns


# other processes


def test_an_export_is_used_with_the_settings_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[Mapping[str, str]] = []

    def run_helper(argv: Sequence[str], env: Mapping[str, str], **_: Any) -> Answer:
        environments.append(env)
        return Answer(0, {"shapes": {}}, ())

    monkeypatch.setattr("distlaunch.jobs.predict_export.run_helper", run_helper)
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    for export in (run.exported("saved_model"), tmp_path / "elsewhere" / "model"):
        export.mkdir(parents=True)
        (export / "saved_model.pb").touch()
    run.config.touch()
    run.write_json(run.environment, {"settings": [{"name": ONEDNN, "value": "0"}]})
    (tmp_path / "rows.npy").touch()
    machine = Machine({INJECTED: json.dumps(ZEN4._replace(usable_cores=[0, 1])._asdict())})
    for target in ("run", "run/export/saved_model", str(tmp_path / "elsewhere" / "model")):
        predict_export(PredictRequest(target, "rows.npy", None, None, None, 8), machine)
    assert [env[ONEDNN] for env in environments] == ["0", "0", "1"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"settings": 3}', '{"settings": [3]}', '{"settings": [{"name": [], "value": "1"}]}',
     '{"settings": [{"name": "TF_ENABLE_ONEDNN_OPTS", "value": {}}]}', '{"settings": {"a": 1}}'],
)  # fmt: skip
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.environment.write_text(text)
    assert run.recorded_settings() == {}


# cores


def _cores(first: int, last: int) -> Cores:
    return frozenset(range(first, last + 1))


TWO = [_cores(0, 3), _cores(4, 7)]
ALL = _cores(0, 7)


def _nodes(nodes: list[Cores], usable: Cores, num_cores: int) -> Hardware:
    return ZEN3._replace(
        numa_nodes=[sorted(each) for each in nodes], usable_cores=sorted(usable), logical_cores=num_cores
    )


@pytest.mark.parametrize(
    ("num_tasks", "nodes", "usable", "expected"),
    [
        (2, TWO, ALL, TWO),
        (4, TWO, ALL, [TWO[0], TWO[0], TWO[1], TWO[1]]),
        (1, TWO, ALL, []),
        (3, TWO, ALL, []),
        (2, [ALL], ALL, []),
        (2, [], ALL, []),
        (2, TWO, _cores(0, 5), []),  # a scheduler has bound this process
        (2, [_cores(0, 1), _cores(2, 7)], ALL, []),
        (2, [*TWO, frozenset()], ALL, TWO),  # a node with memory only
    ],
)
def test_nodes_are_shared_out_equally_or_not_at_all(
    num_tasks: int, nodes: list[Cores], usable: Cores, expected: list[Cores]
) -> None:
    assert numa_shares(num_tasks, _nodes(nodes, usable, 8)) == expected


@given(num_nodes=st.integers(1, 8), size=st.integers(1, 16), num_tasks=st.integers(0, 64))
def test_each_core_has_as_many_tasks_as_each_other(num_nodes: int, size: int, num_tasks: int) -> None:
    nodes = [_cores(number * size, (number + 1) * size - 1) for number in range(num_nodes)]
    dealt = numa_shares(num_tasks, _nodes(nodes, _cores(0, num_nodes * size - 1), num_nodes * size))
    if dealt:
        assert [dealt.count(node) for node in nodes] == [num_tasks // num_nodes] * num_nodes


# plans


def _config(kind: str, **cluster: Any) -> RunConfig:
    given = {"name": "a", "model": {"function": "a:b"}, "data": {"function": "a:c", "global_batch": 4}}
    return RunConfig.model_validate({**given, "strategy": {"kind": kind}, "cluster": cluster})


def _plan(config: RunConfig, *hosts: tuple[str, Hardware | None]) -> LaunchPlan:
    places = [Place(name, f"{name or 'here'}:{5000 + n}", hardware=each) for n, (name, each) in enumerate(hosts)]
    cluster = cluster_at(config.strategy.processes(config.cluster), [place.address for place in places])
    return plan_launch(config, RunDir("/r"), 0, "train", cluster, places=places)


def _of_each(plan: LaunchPlan, variable: str) -> dict[str, str | None]:
    return {str(task.task): task.env.get(variable) for task in plan.tasks}


def test_each_task_gets_the_settings_of_its_host() -> None:
    plan = _plan(_config("multi_worker_mirrored", workers=3), ("a", ZEN4), ("a", ZEN4), ("b", ZEN3))
    assert _of_each(plan, ONEDNN) == dict.fromkeys(("worker:0", "worker:1", "worker:2"), "1")
    assert _of_each(plan, "NPROC") == {"worker:0": "2", "worker:1": "2", "worker:2": None}
    text = render_plan(plan, _config("multi_worker_mirrored", workers=3))
    assert "\n  TF_ENABLE_ONEDNN_OPTS=1: the CPU of b has AVX2, for which" in text
    assert "\n  OMP_NUM_THREADS=2 on a: 2 tasks share 4 cores\n" in text
    rows = plan.to_plain()["settings"]
    assert [row["name"] for row in rows] == [ONEDNN, *POOL_SIZES]
    assert all(row["reason"] and row["value"] for row in rows)
    assert rows[1]["hosts"] == ["a"]


def test_servers_do_not_count_among_those_that_compute() -> None:
    nodes = ZEN4._replace(numa_nodes=[[0, 1], [2, 3]])
    config = _config("parameter_server", workers=2, ps=1)
    plan = _plan(config, *[("", nodes)] * 4)
    assert {task.task.job: sorted(task.cores) for task in plan.tasks if task.task.job != "worker"} == {
        "chief": [],
        "ps": [],
    }
    assert [sorted(task.cores) for task in plan.tasks if task.task.job == "worker"] == [[0, 1], [2, 3]]
    assert set(_of_each(plan, "NPROC").values()) == {"2"}
    assert "  bound to the cores 2, 3\n" in render_plan(plan, config)


def test_other_launchers_start_workers_on_this_host_too() -> None:
    config = _config("multi_worker_mirrored", workers=3)
    cluster = cluster_at({"worker": 3}, ["a:1", "a:2", "b:1"])
    plan = plan_launch(config, RunDir("/r"), 0, "train", cluster, here=Task("worker", 1), places=[Place(hardware=ZEN3)])
    assert _of_each(plan, "NPROC") == {"worker:1": "2"}


def test_hosts_that_are_not_known_yet() -> None:
    config = _config("multi_worker_mirrored", workers=2)
    plan = _plan(config, ("a", None), ("b", None))
    assert set(_of_each(plan, ONEDNN).values()) == {None}
    assert "settings  decided at the start, from the hardware of a, b\n" in render_plan(plan, config)
    assert "settings" not in plan.to_plain()


@pytest.mark.parametrize(("chief", "ps", "share"), [(False, 0, "2"), (True, 0, "1"), (True, 1, "2")])
def test_scripts_get_settings_too(chief: bool, ps: int, share: str) -> None:
    job = ScriptJob("script", "a.py", workers=2, chief=chief, ps=ps)
    places = [Place("", f"here:{number}", hardware=ZEN3) for number in range(job.num_tasks)]
    plan = plan_script(job, RunDir("/r"), 0, places)
    assert set(_of_each(plan, "NPROC").values()) == {share}
    assert set(_of_each(plan, ONEDNN).values()) == {"1"}


def test_references_of_tests_round_as_tasks_do(virtual_devices: None) -> None:
    port: Any = importlib.import_module("tensorflow.python.util._pywrap_util_port")
    if (value := kept_variables(Machine.here().hardware).get(ONEDNN)) is None:
        pytest.skip("TensorFlow has no oneDNN for this processor")
    assert port.IsMklEnabled() == (value == "1")


@pytest.mark.parametrize(
    ("package", "library", "word"),
    [
        ("tensorflow", "libtensorflow_framework.so.2", GPU_THREADS),
        ("jaxlib", "libjax_common.so", LATENCY_HIDING.removeprefix("--").partition("=")[0]),
    ],
)
def test_the_frameworks_know_what_is_set_for_gpus(package: str, library: str, word: str) -> None:
    """XLA ends the process at a flag that it does not know."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    with (Path(spec.origin).parent / library).open("rb") as file:
        assert mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(word.encode()) >= 0
