"""Tests of how Slurm's environment is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import UsageError
from distlaunch.cluster.hosts import Host
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.slurm import Slurm, is_in_allocation, is_one_of_many
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import HostFiles
from distlaunch.engines.slurm.allocation import (
    node_counts,
    node_gpus,
    node_names,
    slurm_engine,
    srun_agent_command,
)
from distlaunch.jobs.choose_run import config_for_use


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2),8", [4, 4, 8]), ("1", [1]), ("2(x3)", [2, 2, 2]), ("", []), ("nonsense", [])]
)
def test_counts_of_nodes(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


def test_names_without_a_range_need_no_program() -> None:
    assert node_names("n10,n8") == ["n10", "n8"]


_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({**_JOB, "SLURM_JOB_NUM_NODES": "2"}, True),
        ({**_JOB, "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}, True),
        # on the only node of a job, that is this machine
        ({**_JOB, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}, False),
        # `salloc` on a login host
        ({**_JOB, "SLURM_JOB_NUM_NODES": "1"}, True),
        # a container was given one of the variables
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, False),
    ],
)
def test_an_allocation_is_recognised(environ: dict[str, str], expected: bool) -> None:
    assert is_in_allocation(environ) is expected


def test_only_the_first_task_of_a_step_trains() -> None:
    assert not is_one_of_many({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    assert is_one_of_many({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
    assert not is_one_of_many({"SLURM_PROCID": "0"})


def test_the_agents_step_is_beside_that_of_the_command() -> None:
    command = srun_agent_command(Host("n1"), "/opt/py", 8, 4, {"SLURM_LABELIO": "1", "SLURM_GPUS": "8"})
    assert command[:6] == ["env", "-u", "SLURM_LABELIO", "-u", "SLURM_GPUS", "srun"]
    assert {"--overlap", "--nodelist=n1", "--cpus-per-task=8", "--gpus=4", "--ntasks=1"} <= set(command)
    assert command[-4:] == ["/opt/py", "-P", "-m", "distlaunch.agent.remote"]
    assert srun_agent_command(Host("n1"), "/opt/py", None, None, {})[0] == "srun"


_SCONTROL = """\
#!/bin/sh
case "$*" in
"show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
"--details show job 7") cat <<END
JobId=7 JobName=train
   JOB_GRES=gpu:11
     Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:2),nic:4
     Nodes=n3 CPU_IDs=0-7 Mem=0 GRES=gpu:5(IDX:0-4)
     Nodes=n4 CPU_IDs=0-7 Mem=0 GRES=
   TresPerJob=gres:gpu:11
END
;;
*) exit 1 ;;
esac
"""


def test_gpus_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text(_SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert node_gpus("7") == {"n1": 3, "n2": 3, "n3": 5, "n4": 0}
    assert node_gpus("8") == {}


@pytest.mark.parametrize(
    ("settings", "environ", "slots"),
    [
        ({}, {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, [None, None]),
        ({}, {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "4,1"}, [4, None]),
        ({}, {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS_PER_NODE": "1"}, [1, 1]),
        # `sbatch -N2 --exclusive` on nodes with 64 CPUs
        ({}, {"SLURM_TASKS_PER_NODE": "64(x2)"}, [None, None]),
        ({"workers_per_node": 1}, {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, [1, 1]),
        ({"workers_per_node": 2}, {}, [2, 2]),
    ],
)
def test_a_node_gets_the_workers_that_were_requested(
    settings: dict[str, Any], environ: dict[str, str], slots: list[int | None]
) -> None:
    """None stands for one for each GPU."""
    machine = Machine({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", **environ})
    engine = slurm_engine(Slurm(kind="slurm", **settings), machine, HostFiles())
    assert [host.slots for host in engine._hosts] == slots


def test_without_an_allocation_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="does not run in a Slurm allocation; start it with `sbatch` or `salloc`"):
        slurm_engine(Slurm(kind="slurm"), Machine({}), HostFiles())


@pytest.mark.parametrize(
    ("environ", "where"),
    [({}, ("local", "one_device", 1)), ({"SLURM_JOB_ID": "7"}, ("slurm", "multi_worker_mirrored", 16))],
)
def test_a_login_node_evaluates_on_one_device(environ: dict[str, str], where: tuple[str, str, int]) -> None:
    raw: dict[str, Any] = {
        "model": {"function": "m:f"},
        "data": {"function": "m:d", "global_batch": 64},
        "strategy": {"kind": "multi_worker_mirrored"},
        "cluster": {"workers": 16},
        "engine": {"kind": "slurm"},
    }
    found = config_for_use(RunConfig.model_validate(raw), Machine(environ))
    assert (found.engine.kind, found.strategy.kind, found.cluster.num_workers) == where
    alone = {**raw, "strategy": {"kind": "mirrored", "replicas": 8}, "cluster": {}}
    found = config_for_use(RunConfig.model_validate(alone), Machine(environ))
    assert found.strategy.kind == ("mirrored" if environ else "one_device")
