"""Whole jobs on hosts that share no disk for their runs: the same numbers as on one machine, and one run directory."""

from __future__ import annotations

import json
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import COMMAND, HAS_IPV6, NETWORK_6, Job, Lab

from distlaunch.base.event_files import read_events, read_events_of
from distlaunch.base.events import EpochEnded, NumbersChecked
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HOSTS = ["host1", "host2", "host3"]
ENDLESS = {"epochs": 5000}
"""Longer than any test: how far a job comes before a failure is noticed is the machine's to say."""


def write_config(folder: Path, runs: Path, name: str, **changes: Any) -> str:
    config: dict[str, Any] = {
        "name": name,
        "runs_dir": str(runs),
        "model": {"function": "distlaunch.workloads.images:mlp"},
        "data": {"function": "distlaunch.workloads.images:fashion_mnist", "global_batch": 48, "train_examples": 480},
        "compile": {
            "optimizer": {"name": "SGD", "args": {"learning_rate": 0.05}},
            "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
        },
        "train": {"epochs": 2},
        "validation": None,
        "cluster": {"workers": 3},
        "strategy": {"kind": "multi_worker_mirrored"},
        "engine": {"kind": "ssh", "hosts": HOSTS},
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def logs(run: RunDir) -> list[dict[str, float]]:
    """Return the logs of each epoch."""
    return [event.logs for event in read_events(run.events) if isinstance(event, EpochEnded)]


def planned_hosts(run: RunDir) -> dict[str, str]:
    """Return the host that was planned for each task."""
    return {task["task"]: task["host"] for task in json.loads(run.plan.read_text())["tasks"]}


def goes_on(job: Job, lab: Lab) -> None:
    """Wait until a job trains again after a restart, and then interrupt it."""
    job.wait_for("restored", 240)
    before = job.output.count("/5000")
    job.wait_until(lambda: job.output.count("/5000") > before)
    lab.launcher(job).send_signal(signal.SIGINT)
    assert job.end() == 4, job.output


def losses(run: RunDir) -> list[float]:
    return [each["loss"] for each in logs(run)]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"kind": "multi_worker_mirrored"}, marks=pytest.mark.short),
        {"kind": "jax", "mesh": {"batch": 3}},
        {"kind": "dtensor", "mesh": {"batch": 3}},
    ],
    ids=lambda strategy: strategy["kind"],
)
def test_three_hosts_give_the_losses_of_one_machine(
    lab: Lab, own_disk: Path, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    train = {"epochs": 2, "check": "strict"}
    config = write_config(tmp_path, own_disk, strategy["kind"], strategy=strategy, export=["keras"], train=train)
    job = lab.start("train", config)
    assert job.end(180) == 0, job.output
    run = RunDir(own_disk / strategy["kind"])
    # the chief has received the rows that the others have read
    assert [event.status for event in read_events_of(run.events, NumbersChecked)] == ["equal"], job.output
    hosts = RunFacts.of(read_events(run.events)).now.hosts
    assert hosts.get("worker:0") == "host1"
    # everything is here, although each host has a disk of its own
    assert run.exported("keras").is_file()
    assert run.checkpoint_steps() == [10, 20]
    assert all(files.stderr_log.exists() for files in run.tasks(0).values())
    assert len(run.tasks(0)) == 3
    # and nothing is left there
    for number in (1, 2, 3):
        assert not lab.files(number, own_disk)
    local = lab.start("train", config, "--name", f"{strategy['kind']}-local", "--set", "engine.kind=local")
    assert local.end(180) == 0, local.output
    assert losses(run) == pytest.approx(losses(RunDir(own_disk / f"{strategy['kind']}-local")), rel=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"kind": "multi_worker_mirrored"}, marks=pytest.mark.short),
        {"kind": "jax", "mesh": {"batch": 3}},
        {"kind": "parameter_server"},
    ],
    ids=lambda strategy: strategy["kind"],
)
def test_hosts_reach_each_other_past_a_proxy(
    lab: Lab, own_disk: Path, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """Every host has a proxy in the environment of its tasks, which answers nobody, and a list that does not help."""
    cluster = {"workers": 2, "ps": 1} if strategy["kind"] == "parameter_server" else {"workers": 3}
    variables = {"http_proxy": "http://192.0.2.1:3128", "https_proxy": "http://127.0.0.1:9", "NO_PROXY": ".corp"}
    engine = {"kind": "ssh", "hosts": HOSTS, "env": list(variables)}
    name = f"proxy-{strategy['kind']}"
    config = write_config(tmp_path, own_disk, name, strategy=strategy, cluster=cluster, engine=engine)
    job = lab.run(0, [*COMMAND, "train", config], **variables)
    assert job.end(180) == 0, job.output
    assert len(losses(RunDir(own_disk / name))) == 2


@pytest.mark.skipif(not HAS_IPV6, reason="needs IPv6")
@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "multi_worker_mirrored"},
        {"kind": "jax", "mesh": {"batch": 2}},
        {"kind": "dtensor", "mesh": {"batch": 2}},
    ],
    ids=lambda strategy: strategy["kind"],
)
def test_hosts_reach_each_other_by_ipv6(lab: Lab, own_disk: Path, tmp_path: Path, strategy: dict[str, Any]) -> None:
    lab.add_ipv6()
    engine = {"kind": "ssh", "hosts": HOSTS[:2], "interface": f"{NETWORK_6}/64"}
    name = f"six-{strategy['kind']}"
    config = write_config(tmp_path, own_disk, name, strategy=strategy, engine=engine, cluster={"workers": 2})
    job = lab.start("train", config)
    assert job.end(180) == 0, job.output
    run = RunDir(own_disk / name)
    addresses = [task["address"] for task in json.loads(run.plan.read_text())["tasks"]]
    assert [address.rpartition(":")[0] for address in addresses] == [f"[{NETWORK_6}11]", f"[{NETWORK_6}12]"]
    local = lab.start("train", config, "--name", f"{name}-local", "--set", "engine={kind: local}")
    assert local.end(180) == 0, local.output
    assert losses(run) == pytest.approx(losses(RunDir(own_disk / f"{name}-local")), rel=1e-6)


@pytest.mark.parametrize("workers", [1, 3])
def test_parameter_servers_on_hosts(lab: Lab, own_disk: Path, tmp_path: Path, workers: int) -> None:
    """A single worker gives the losses of one device. With three, the accuracy is less than one point lower."""
    name = f"servers-{workers}"
    data = {"function": "distlaunch.workloads.images:fashion_mnist", "global_batch": 48, "train_examples": 4800}
    config = write_config(
        tmp_path,
        own_disk,
        name,
        data=data,
        # four epochs ended in the middle of the climb, where one step more or less is two points
        train={"epochs": 12},
        validation={},
        compile={
            "optimizer": {"name": "SGD", "args": {"learning_rate": 0.05}},
            "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
            "metrics": ["accuracy"],
        },
        strategy={"kind": "parameter_server"},
        cluster={"workers": workers, "ps": 2},
    )
    job = lab.start("train", config)
    assert job.end(250) == 0, job.output
    hosts = planned_hosts(RunDir(own_disk / name))
    assert [hosts[f"ps:{number}"] for number in range(2)] == ["host1", "host2"]
    one = ("engine.kind=local", "strategy.kind=one_device", "cluster={}")
    local = lab.start("train", config, "--name", f"{name}-local", *(word for each in one for word in ("--set", each)))
    assert local.end(250) == 0, local.output
    there, here = (logs(RunDir(own_disk / each)) for each in (name, f"{name}-local"))
    if workers == 1:
        assert [each["loss"] for each in there] == pytest.approx([each["loss"] for each in here], rel=1e-5)
    assert _last_accuracy(there) > _last_accuracy(here) - 0.01


def _last_accuracy(epochs: list[dict[str, float]]) -> float:
    """Return the mean of the last four epochs, because asynchronous steps make each one a little higher or lower."""
    return statistics.mean(each["val_accuracy"] for each in epochs[-4:])


_ASKS = """
import pathlib
import keras


def model(token, pin):
    # on its host, where the job's copy of the run is
    copies = [path for path in pathlib.Path({run!r}).rglob("*") if path.is_file()]
    files = [path for path in copies if token in path.read_text(errors="replace")]
    print("got", len(token), "and", len(pin), "characters, which", len(files), "files have:", token, pin)
    return keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10)])
"""


def test_secrets_reach_tasks_of_hosts_and_no_file_there(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_ASKS.format(run=str(own_disk / "secret")))
    model = {"function": "mine.py:model", "args": {"token": "${MY_TOKEN}", "pin": "${MY_API_KEY}"}}
    config = write_config(tmp_path, own_disk, "secret", model=model)
    secrets = {"MY_TOKEN": "tok-1234567890", "MY_API_KEY": "pin-0987654321"}
    job = lab.run(0, [*COMMAND, "train", config], **secrets)
    assert job.end(180) == 0, job.output
    run = RunDir(own_disk / "secret")
    for number, files in enumerate(run.tasks(0).values()):
        text = files.stdout_log.read_text()
        assert "got 14 and 14 characters, which 0 files have: *** ***" in text, number
    assert run.secrets() == {}
    for path in run.path.rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_text(errors="replace") for secret in secrets.values()), path
    assert not any(secret in job.output for secret in secrets.values())


@pytest.mark.short
def test_a_script_runs_on_all_hosts_and_what_it_wrote_comes_back(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, pathlib, socket\n"
        "run, task = os.environ['DISTLAUNCH_RUN_DIR'], os.environ['DISTLAUNCH_TASK']\n"
        "pathlib.Path(run, task.replace(':', '-')).write_text(socket.gethostname())\n"
    )
    job = lab.start("run", "--hosts", ",".join(HOSTS), "--workers", "3", "--runs-dir", str(own_disk), str(script))
    assert job.end(60) == 0, job.output
    run = RunDir(own_disk / "job")
    assert [(run.path / f"worker-{number}").read_text() for number in range(3)] == HOSTS
    for number in (1, 2, 3):
        assert not lab.files(number, own_disk)


@pytest.mark.short
def test_a_killed_task_is_named_with_its_host(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, own_disk, "killed", train={"epochs": 500})
    job = lab.start("train", config)
    job.wait_for("epoch   2/500")
    lab.task(2, "worker:1").kill()
    assert job.end() == 75
    assert "worker:1 on host2" in job.said
    assert "killed by SIGKILL" in job.said


def test_ctrl_c_leaves_a_checkpoint_here_and_nothing_there(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, own_disk, "stopped", train={"epochs": 500})
    job = lab.start("train", config)
    job.wait_for("epoch   2/500")
    lab.launcher(job).send_signal(signal.SIGINT)
    assert job.end() == 4, job.output
    run = RunDir(own_disk / "stopped")
    assert run.checkpoint_steps()
    resumed = lab.start("train", str(run.path), "--resume", "--set", "train.epochs=3")
    resumed.end()
    assert "restored" in resumed.said or "finished" in resumed.said, resumed.output


@pytest.mark.short
def test_a_host_without_power_is_replaced_by_a_spare(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    engine = {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": 8}
    config = write_config(
        tmp_path, own_disk, "lost", engine=engine, cluster={"workers": 2}, train=ENDLESS, restarts={"max": 1}
    )
    job = lab.start("train", config)
    job.wait_for("3/5000")
    lab.kill(1)  # the chief's
    # from what had been copied before
    goes_on(job, lab)
    assert "host1 is left out" in job.said
    assert len(losses(RunDir(own_disk / "lost"))) >= 3


def test_a_job_shrinks_when_no_host_is_left_in_place_of_a_lost_one(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    engine = {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": 6}
    workers = {"workers": {"min": 2, "max": 3}}
    config = write_config(tmp_path, own_disk, "shrinks", engine=engine, cluster=workers, train=ENDLESS)
    job = lab.start("train", config)
    job.wait_for("3/5000")
    lab.kill(3)
    goes_on(job, lab)
    assert "with 2 workers instead of 3" in job.said
    assert "host3 is left out" in job.said


def test_a_host_that_is_cut_off_is_named(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    engine = {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": 4}
    config = write_config(tmp_path, own_disk, "cut", engine=engine, train={"epochs": 500})
    job = lab.start("train", config)
    job.wait_for("epoch   2/500")
    lab.cut(3)
    assert job.end() == 75, job.output
    assert "worker:2 on host3" in job.said
    assert "sent no heartbeat for 4 s" in job.said


@pytest.mark.short
def test_a_cut_between_two_workers_is_found(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    """TensorFlow, whose heartbeats go to the first worker only, would wait for ever."""
    engine = {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": 4}
    config = write_config(tmp_path, own_disk, "parted", engine=engine, train={"epochs": 2000})
    job = lab.start("train", config)
    job.wait_for("epoch    2/2000")
    # the paths that work are tried when training begins
    job.wait_for("epoch   40/2000")
    lab.cut(2, 3)
    assert job.end() == 75, job.output
    assert "host2 can no longer reach host3 at 10.77.0.13:" in job.said or "host3 can no longer reach host2" in job.said


def test_a_restart_takes_a_spare_for_a_host_that_others_do_not_reach(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    """Both answer here, so that neither counts as lost."""
    engine = {"kind": "ssh", "hosts": HOSTS, "host_timeout_s": 4}
    config = write_config(
        tmp_path, own_disk, "around", engine=engine, cluster={"workers": 2}, train=ENDLESS, restarts={"max": 1}
    )
    job = lab.start("train", config)
    job.wait_for("3/5000")
    lab.cut(1, 2)
    lab.cut(2, 1)
    goes_on(job, lab)
    # who of the two is replaced depends on who complains first: the agents, or TensorFlow in either task
    hosts = set(planned_hosts(RunDir(own_disk / "around")).values())
    assert hosts in ({"host1", "host3"}, {"host2", "host3"}), job.output
    cut = ("host1 can no longer reach host2", "host2 can no longer reach host1",
           "worker:1 on host2 no longer reached each other",
           "worker:0 on host1 no longer reached each other",
           "worker:1 on host2 was running, but worker:0 on host1 no longer got its heartbeats",
           "worker:0 on host1 was running, but worker:1 on host2 no longer got its heartbeats")  # fmt: skip
    assert any(words in job.said for words in cut), job.output


@pytest.mark.short
def test_a_killed_controller_leaves_nothing(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, own_disk, "orphaned", train={"epochs": 500})
    job = lab.start("train", config)
    job.wait_for("epoch   2/500")
    lab.launcher(job).kill()
    job.end()


def test_code_is_sent_to_hosts_that_do_not_have_it(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    project = own_disk / "project"
    project.mkdir()
    (project / "mine.py").write_text(
        "import keras, numpy as np\n"
        "def model():\n    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])\n"
        "def data():\n    x = np.loadtxt('numbers.txt').reshape(-1, 1)\n    return {'train': (x, x)}\n"
    )
    (project / "numbers.txt").write_text("\n".join(map(str, range(64))))
    changes: dict[str, Any] = {
        "model": {"function": f"{project}/mine.py:model"},
        "data": {"function": f"{project}/mine.py:data", "global_batch": 16},
        "compile": {"optimizer": "SGD", "loss": "mse"},
        "cluster": {"workers": 2},
        "engine": {"kind": "ssh", "hosts": HOSTS[:2], "sync": "code"},
    }
    job = lab.start("train", write_config(tmp_path, own_disk, "sent", **changes), folder=project)
    assert job.end(180) == 0, job.output
    assert {"mine.py", "numbers.txt"} <= set(lab.files(1, project))
