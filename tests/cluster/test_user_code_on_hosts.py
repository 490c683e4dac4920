"""User code that disturbs its process: training on hosts still gives the numbers of one machine, in every process."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import COMMAND, Lab

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded
from distlaunch.base.run_dir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
MINE = (Path(__file__).parent / "user_code" / "user_code_on_hosts.py").read_text()
SHADOWS = ("random.py", "types.py", "queue.py", "logging.py", "keras.py", "yaml.py")
VARIABLES = {"KERAS_BACKEND": "torch", "http_proxy": "http://192.0.2.1:3128", "NO_PROXY": ".corp", "LC_ALL": "xx_YY.no"}
REPLICAS: dict[str, Any] = {"strategy": {"kind": "multi_worker_mirrored"}, "cluster": {"workers": 3}}
SERVERS: dict[str, Any] = {"strategy": {"kind": "parameter_server"}, "cluster": {"workers": 1, "ps": 1}}


def write(project: Path, name: str, runs: Path, **sections: Any) -> str:
    config = {
        "name": name,
        "runs_dir": str(runs),
        "model": {"function": "mine.py:model"},
        "data": {"function": "mine.py:data", "global_batch": 24, "shuffle": False},
        "train": {"epochs": 3},
        **sections,
    }
    (project / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return f"{name}.yaml"


def new_project(disk: Path, name: str) -> Path:
    project = disk / f"project-{name}"
    project.mkdir()
    (project / "mine.py").write_text(MINE)
    return project


def losses(run: RunDir) -> list[float]:
    return [event.logs["loss"] for event in read_events(run.events) if isinstance(event, EpochEnded)]


@pytest.mark.parametrize("job", [REPLICAS, SERVERS], ids=["replicas", "servers"])
def test_the_losses_of_one_machine(lab: Lab, own_disk: Path, job: dict[str, Any]) -> None:
    runs, project = own_disk / job["strategy"]["kind"], new_project(own_disk, job["strategy"]["kind"])
    for name in SHADOWS:
        (project / name).write_text("raise RuntimeError('nobody imports this')\n")
    alone = lab.run(0, [*COMMAND, "train", write(project, "alone", runs)], project, **VARIABLES)
    assert alone.end(120) == 0, alone.output
    engine = {"kind": "ssh", "hosts": ["host1", "host2", "host3"], "env": list(VARIABLES), "sync": "code"}
    config = write(project, "spread", runs, engine=engine, **job)
    spread = lab.run(0, [*COMMAND, "train", config], project, **VARIABLES)
    assert spread.end(180) == 0, spread.output
    expected = losses(RunDir(runs / "alone"))
    assert losses(RunDir(runs / "spread")) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 3


def test_a_stop_where_the_handler_was_replaced(lab: Lab, own_disk: Path) -> None:
    project = new_project(own_disk, "handler")
    engine = {"kind": "ssh", "hosts": ["host1", "host2"], "sync": "code"}
    job_of_two = {**REPLICAS, "cluster": {"workers": 2}, "train": {"epochs": 5000}}
    job = lab.run(0, [*COMMAND, "train", write(project, "stopped", own_disk, engine=engine, **job_of_two)], project)
    job.wait_for("epoch    2/5000")
    lab.launcher(job).send_signal(signal.SIGTERM)
    assert job.end() == 4, job.output
    assert RunDir(own_disk / "stopped").checkpoint_steps()


def test_what_has_left_its_task_on_a_host_ends_with_the_job(lab: Lab, own_disk: Path) -> None:
    leaves = (
        'd=$(mktemp -d); mkfifo "$d/up"; setsid sh -c "echo > $d/up; exec sleep 4711" > /dev/null 2>&1 & '
        'read -r _ < "$d/up"; rm -r "$d"'
    )
    hosts = ["--hosts", "host1,host2", "--workers", "2", "--set", "engine.sync=code"]
    job = lab.run(0, [*COMMAND, "run", *hosts, "sh", "-c", leaves], new_project(own_disk, "leaves"))
    assert job.end(60) == 0, job.output
    for host in ("host1", "host2"):
        told = rf"\[{host}\] ended processes that tasks had left running: \w+ \(\d+\)"
        assert re.search(told, job.said), job.said
    for number in (1, 2):
        assert not [each for each in lab.processes(number, everything=True) if "4711" in each.cmdline()]
