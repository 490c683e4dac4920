"""Real jobs on machines with other hardware, whose facts are injected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_job import LOSSES, MODULE, losses, run_command, write_job

from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import INJECTED, ONEDNN, POOL_SIZES

TELLS = f"""{MODULE}

def tell():
    import os
    from tensorflow.python.util import _pywrap_util_port
    variables = [os.environ.get(name, "-") for name in ("{ONEDNN}", "NPROC", "OMP_NUM_THREADS")]
    print("got", *variables, "oneDNN", "on" if _pywrap_util_port.IsMklEnabled() else "off")

tell()
"""
X86 = {"system": "linux", "architecture": "x86_64", "usable_cores": [0, 1, 2, 3], "cpu_limit": None}


@pytest.fixture(autouse=True)
def _no_settings_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ONEDNN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def _with(features: list[str], **environ: str) -> dict[str, str]:
    return {INJECTED: json.dumps({**X86, "features": features}), "ONEDNN_MAX_CPU_ISA": "AVX2", **environ}


def _run(folder: Path, env: Mapping[str, str], *words: str) -> str:
    ended = run_command(*words, cwd=folder, env=env)
    assert ended.code == 0, ended.text
    return ended.text


def _recorded(folder: Path) -> dict[str, tuple[str, str]]:
    rows: list[dict[str, Any]] = json.loads(RunDir(folder / "runs" / "job").environment.read_text())["settings"]
    return {row["name"]: (row["value"], row["source"]) for row in rows}


def _plan(folder: Path, env: Mapping[str, str], *words: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the value and the source of each setting, and the warnings."""
    ended = run_command("plan", *words, "--no-variables", "--json", cwd=folder, env=env)
    assert ended.code == 0, ended.text
    plan = json.loads(ended.out)
    settings = {row["name"]: (row["value"], row["source"]) for row in plan["settings"]}
    for task in plan["tasks"]:
        assert {name: task["env"][name] for name in settings} == {name: value for name, (value, _) in settings.items()}
    return settings, ended.err


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_a_cpu_where_tensorflow_alone_leaves_onednn_off(tmp_path: Path, workers: int) -> None:
    cluster = {"cluster": {"workers": 2}, "strategy": {"kind": "multi_worker_mirrored"}} if workers > 1 else {}
    write_job(tmp_path, TELLS, **cluster)
    text = _run(tmp_path, _with(["avx2"], OMP_NUM_THREADS="3", KERAS_BACKEND="jax"), "train", "job.yaml")
    assert text.count("KERAS_BACKEND=jax is ignored: strategy ") == 1
    for index in range(workers):
        log = RunDir(tmp_path / "runs" / "job").task(0, f"worker:{index}").stdout_log.read_text()
        assert f"got 1 {2 if workers > 1 else '-'} 3 oneDNN on\n" in log, text
    assert losses(tmp_path) == LOSSES
    assert _recorded(tmp_path)[ONEDNN] == ("1", "hardware")
    if workers > 1:
        assert _recorded(tmp_path)["NPROC"] == ("2", "hardware")
        assert _recorded(tmp_path)["OMP_NUM_THREADS"] == ("3", "environment")
    # a resume keeps what changes how it rounds, on a machine for which it would be chosen otherwise
    resumed = ("runs/job", "--resume", "--set", "train.epochs=3")
    settings, warnings = _plan(tmp_path, _with([]), *resumed)
    assert settings == {ONEDNN: ("1", "run"), **dict.fromkeys(POOL_SIZES if workers > 1 else (), ("2", "hardware"))}
    assert "TF_ENABLE" not in warnings
    settings, warnings = _plan(tmp_path, _with([], **{ONEDNN: "0"}), *resumed)
    assert settings[ONEDNN] == ("0", "environment")
    assert warnings.count(f"warning: your environment sets {ONEDNN}=0, but the run was trained with 1") == 1


@pytest.mark.slow  # in CI the plan of a resume
def test_a_run_rounds_alike_on_another_machine(tmp_path: Path) -> None:
    write_job(tmp_path, TELLS, export=["saved_model"])
    _run(tmp_path, _with([]), "train", "job.yaml")
    logs = RunDir(tmp_path / "runs" / "job")
    assert "got 0 - - oneDNN off\n" in logs.task(0, "worker:0").stdout_log.read_text()
    newer = _with(["avx2", "avx512_vnni"])
    text = _run(tmp_path, newer, "train", "job.yaml", "--resume", "--set", "train.epochs=3")
    assert "got 0 - - oneDNN off\n" in logs.task(1, "worker:0").stdout_log.read_text(), text
    assert "TF_ENABLE" not in text
    assert _recorded(tmp_path)[ONEDNN] == ("0", "run")
    for number, command in enumerate(("evaluate", "predict", "export"), 2):
        split = ("--split", "train") if command != "export" else ()
        _run(tmp_path, newer, command, "runs/job", *split)
        assert "got 0 - - oneDNN off\n" in logs.task(number, "worker:0").stdout_log.read_text(), command
    # what the user sets wins
    text = _run(tmp_path, {**newer, ONEDNN: "1"}, "evaluate", "runs/job", "--split", "train")
    assert text.count(f"warning: your environment sets {ONEDNN}=1, but the run was trained with 0") == 1, text
    assert "got 1 - - oneDNN on\n" in logs.task(5, "worker:0").stdout_log.read_text()
    assert _recorded(tmp_path)[ONEDNN] == ("0", "run")


def test_the_plan_gives_each_reason(tmp_path: Path) -> None:
    write_job(tmp_path, cluster={"workers": 2}, strategy={"kind": "multi_worker_mirrored"})
    env = _with(["avx2"], NPROC="7")
    plan = json.loads(_run(tmp_path, env, "plan", "job.yaml", "--no-variables", "--json"))
    shown = {row["name"]: (row["value"], row["reason"]) for row in plan["settings"]}
    assert shown["OMP_NUM_THREADS"] == ("2", "2 tasks share 4 cores")
    assert shown["NPROC"] == ("7", "your environment sets it")
    assert "AVX2" in shown[ONEDNN][1]
    assert all({name: task["env"][name] for name in shown} == {name: value for name, (value, _) in shown.items()}
               for task in plan["tasks"])  # fmt: skip
    text = _run(tmp_path, env, "plan", "job.yaml", "--no-variables")
    assert f"\n  {ONEDNN}=1: {shown[ONEDNN][1]}\n" in text
    assert not (tmp_path / "runs").exists()
