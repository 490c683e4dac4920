"""Jobs through agents, with a program in place of `ssh` that runs commands here. Real hosts: `tests/cluster`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from limits import with_open_files
from supervised import wait_until

from distlaunch.base.errors import ExitCode
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import INJECTED, ONEDNN

_SSH = """#!/bin/sh
echo "$@" >> {calls}
for word; do last=$word; done
exec sh -c "$last"
"""
_MARK = "DISTLAUNCH_TEST"
_ENTRY = "from distlaunch.cli.main import main; main()"


def _config(folder: Path, **engine: Any) -> Path:
    path = folder / "tiny.yaml"
    config = {
        "runs_dir": str(folder / "runs"),
        "model": {"function": "distlaunch.workloads.images:mlp"},
        "data": {"function": "distlaunch.workloads.images:fashion_mnist", "global_batch": 32, "train_examples": 64},
        "compile": {"loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}},
        "train": {"epochs": 1},
        "validation": None,
        "cluster": {"workers": 2},
        "strategy": {"kind": "multi_worker_mirrored"},
        "engine": {"kind": "ssh", **engine},
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(_SSH.format(calls=tmp_path / "calls"))
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TF_SECRET_OF_MINE": "hidden-from-ps"}


def _run(
    environ: dict[str, str], *words: str, cwd: Path | None = None, open_files: int | None = None
) -> subprocess.CompletedProcess[str]:
    mark = uuid.uuid4().hex
    environ = {**environ, _MARK: mark}
    argv = [sys.executable, "-c", _ENTRY, *words]
    if open_files is not None:
        argv = with_open_files(open_files, argv)
    done = subprocess.run(argv, env=environ, cwd=cwd, capture_output=True, text=True)
    # those of other tests, which run beside this one, count for nothing
    left = [
        process for process in psutil.process_iter(["environ"]) if (process.info["environ"] or {}).get(_MARK) == mark
    ]
    assert not psutil.wait_procs(left, 10)[1]
    return done


@pytest.mark.slow  # in CI real hosts do: tests/cluster/test_training.py
def test_two_hosts_train_and_one_is_a_spare(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "hosts.txt").write_text("first  # the chief's\nme@second:2222\nthird slots=2\n")
    done = _run(environ, "train", str(_config(tmp_path, hostfile="hosts.txt")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("connecting to first, second:2222, third\n")
    assert "no task runs on third; a restart may use it" in done.stdout
    run = RunDir(tmp_path / "runs" / "tiny")
    assert run.checkpoint_steps() == [2]
    assert len(run.tasks(0)) == 2
    assert '"engine": "ssh"' in run.plan.read_text()
    calls = (tmp_path / "calls").read_text()
    assert "-p 2222 -l me -- second exec" in calls
    assert calls.count("BatchMode=yes") == 3
    # what tasks get of the environment is on no command line
    assert "hidden-from-ps" not in calls + run.plan.read_text()


_SCRIPT = """
import json, os, pathlib, sys
task, attempt = os.environ["DISTLAUNCH_TASK"], os.environ["DISTLAUNCH_ATTEMPT"]
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
print(task, "of", len(cluster["chief"]), len(cluster["worker"]), sys.argv[1:])
if (task, attempt) == ("worker:1", "0"):
    raise ValueError("once")
pathlib.Path(os.environ["DISTLAUNCH_RUN_DIR"], task).touch()
"""


def test_proxies_of_a_host_do_not_stand_between_tasks(tmp_path: Path, environ: dict[str, str]) -> None:
    """Profiles of clusters set them: the agent's environment has them, and the controller's has not."""
    program = tmp_path / "bin" / "ssh"
    program.write_text(program.read_text().replace("#!/bin/sh", "#!/bin/sh\nexport https_proxy=http://proxy:1"))
    (tmp_path / "job.py").write_text("import os; print('direct:', os.environ['no_grpc_proxy'])")
    words = ("--workers", "2", "--runs-dir", str(tmp_path / "runs"), str(tmp_path / "job.py"))
    done = _run(environ, "run", "--hosts", "first, second", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = json.loads(RunDir(tmp_path / "runs" / "job").plan.read_text())["cluster"]["worker"]
    hosts = ["localhost", "127.0.0.1", "::1", *(address.rpartition(":")[0].strip("[]") for address in cluster)]
    direct = ",".join(dict.fromkeys(hosts))
    assert done.stdout.count(f"direct: {direct}\n") == 2, done.stdout


def test_a_script_runs_on_hosts_and_again_after_a_failure(tmp_path: Path, environ: dict[str, str]) -> None:
    script = tmp_path / "job.py"
    script.write_text(_SCRIPT)
    runs = str(tmp_path / "runs")
    words = ("--workers", "2", "--chief", "--restarts", "1", "--runs-dir", runs, str(script), "-x")
    done = _run(environ, "run", "--hosts", "first, me@second slots=2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1: worker:1 on second ValueError: once" in done.stdout
    assert "[worker:1] worker:1 of 1 2 ['-x']" in done.stdout
    run = RunDir(tmp_path / "runs" / "job")
    # a chief that computes has a slot of its own
    assert [task["host"] for task in json.loads(run.plan.read_text())["tasks"]] == ["first", "second", "second"]
    assert all((run.path / str(task)).exists() for task in run.tasks(1))
    # the agents of the first attempt served the second as well
    assert (tmp_path / "calls").read_text().count("BatchMode=yes") == 2
    refused = _run(environ, "run", "--hosts", "first", "--workers", "2", "--runs-dir", runs, str(script))
    assert refused.returncode == 2
    assert "2 workers need 2 slots, but the hosts have 1 (first: 1)" in refused.stderr


_KILLS_ITS_AGENT = """
import os, signal, time
if (os.environ["DISTLAUNCH_TASK"], os.environ["DISTLAUNCH_ATTEMPT"]) == ("worker:1", "0"):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""


def test_an_agent_that_was_killed_is_started_again_and_warned_of_once(tmp_path: Path, environ: dict[str, str]) -> None:
    script = tmp_path / "job.py"
    script.write_text(_KILLS_ITS_AGENT)
    words = ("--workers", "2", "--restarts", "1", "--runs-dir", str(tmp_path / "runs"), str(script))
    done = _run(environ, "run", "--hosts", "first,second", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1: the host second was lost: the connection to its agent has ended\n" in done.stdout
    # both are this machine, in both attempts
    assert done.stdout.count("are the same machine") == 1


def test_more_hosts_and_tasks_than_the_shell_allows_files_for(tmp_path: Path, environ: dict[str, str]) -> None:
    """A run may need more open files than the soft limit of the shell, up to the hard limit of the system."""
    script = tmp_path / "job.py"
    script.write_text("import os; print('I am', os.environ['DISTLAUNCH_TASK'])")
    hosts = ",".join(["a slots=20", "b slots=20", *(f"host{number}" for number in range(18))])
    words = ("--workers", "58", "--runs-dir", str(tmp_path / "runs"), str(script))
    done = _run(environ, "run", "--hosts", hosts, *words, open_files=64)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {name: files.stdout_log.read_text() for name, files in RunDir(tmp_path / "runs" / "job").tasks(0).items()}
    assert logs == {f"worker:{number}": f"I am worker:{number}\n" for number in range(58)}


_BAD_HOST = """
import os, signal
if os.getcwd().endswith("bad") and int(os.environ["DISTLAUNCH_ATTEMPT"]) < {dies}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("hosts", "dies", "used"), [("first,{bad},third", 9, "third"), ("first,{bad}", 3, "second")])
def test_a_host_that_lets_the_job_down_is_used_last(
    tmp_path: Path, environ: dict[str, str], hosts: str, dies: int, used: str
) -> None:
    """Also a third time, if there is no other."""
    for folder in ("bad", "work"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "job.py"
    script.write_text(_BAD_HOST.format(dies=dies))
    hosts = hosts.format(bad=f"second folder={tmp_path / 'bad'}")
    words = ("--workers", "2", "--restarts", "3", "--runs-dir", str(tmp_path / "runs"), str(script))
    done = _run(environ, "run", "--hosts", hosts, *words, cwd=tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed by SIGKILL") == (1 if used == "third" else 3)
    plan = json.loads(RunDir(tmp_path / "runs" / "job").plan.read_text())
    assert [task["host"] for task in plan["tasks"]] == ["first", used]
    assert "left out" not in done.stdout


_REBOOTS = """
import os, signal
from pathlib import Path
if os.environ["DISTLAUNCH_TASK"] == "worker:1" and os.environ["DISTLAUNCH_ATTEMPT"] == "0":
    Path("away-1").touch()
    Path("away-2").touch()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
"""
# each start asks it twice: also when it is a host that has failed which would do
_AWAY = """#!/bin/sh
for word; do last=$word; done
case "$*" in *second*) if rm {away}-1 2>/dev/null || rm {away}-2 2>/dev/null; then
  echo "ssh: connect to host second port 22: Connection refused" >&2; exit 255
fi;; esac
exec sh -c "$last"
"""


@pytest.mark.parametrize("restarts", ["1", "2"])
def test_a_host_may_be_back_at_a_later_restart(tmp_path: Path, environ: dict[str, str], restarts: str) -> None:
    (tmp_path / "job.py").write_text(_REBOOTS)
    (tmp_path / "bin" / "ssh").write_text(_AWAY.format(away=tmp_path / "away"))
    words = ("--workers", "2", "--restarts", restarts, "--backoff", "0.01", "job.py")
    done = _run(environ, "run", "--hosts", "first,second", *words, cwd=tmp_path)
    why = "2 workers need 2 slots, but the hosts have 1 (first: 1); "
    told = done.stdout + done.stderr
    assert f"restart 1 of {restarts} in 0.01 s: " in told
    assert "second is left out: " in told
    if restarts == "1":
        assert done.returncode == ExitCode.TEMPORARY, told
        assert f"warning: runs/job: cannot be restarted: {why}" in told
    else:
        assert done.returncode == 0, told
        assert f"restart 2 of 2 in 0.02 s: the last one could not start the tasks: {why}" in told


def test_too_few_slots_start_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    done = _run(environ, "train", str(_config(tmp_path, hosts=["only"])))
    assert done.returncode == 2
    assert "2 workers need 2 slots, but the hosts have 1 (only: 1)" in done.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.slow  # in CI a job that goes on with fewer workers
def test_a_span_begins_with_as_many_workers_as_there_is_room_for(tmp_path: Path, environ: dict[str, str]) -> None:
    config = str(_config(tmp_path, hosts=["only"]))
    done = _run(environ, "train", config, "--set", "cluster.workers={min: 1, max: 3}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is room for 1 of 3 workers" in done.stdout
    assert len(RunDir(tmp_path / "runs" / "tiny").tasks(0)) == 1


def test_the_doctor_warns_and_checks_ports(tmp_path: Path, environ: dict[str, str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "table.csv").touch()
    config = str(_config(tmp_path, hosts=["first", f"second folder={elsewhere}"]))
    words = ("doctor", config, "--set", "data.args.path=./table.csv")
    done = _run(environ, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: second has no ./table.csv, which this machine has (data.args.path)" in done.stdout
    assert "disk left" in done.stdout
    assert "open to users of these hosts and to all hosts that can reach them" in done.stdout
    assert "driver" not in done.stdout
    with socket.create_server(("", 0)) as taken:
        ports = f"cluster.ports=[{taken.getsockname()[1]}, 1]"
        done = _run(environ, *words, "--set", ports, cwd=tmp_path)
    assert done.returncode == 2
    assert "port" in done.stderr, done.stderr


_OTHER_HARDWARE = """#!/bin/sh
case "$*" in *second*)
  export DISTLAUNCH_TEST_HARDWARE='{"cpu": "EPYC 7763", "features": ["avx2"], "usable_cores": [0, 1, 2, 3, 4]}' ;;
esac
"""


def test_hosts_with_other_hardware_round_alike(tmp_path: Path, environ: dict[str, str]) -> None:
    """The decision is made from the facts of all hosts, and shares the cores of each."""
    program = tmp_path / "bin" / "ssh"
    program.write_text(program.read_text().replace("#!/bin/sh\n", _OTHER_HARDWARE))
    environ = {name: value for name, value in environ.items() if name != ONEDNN}
    environ[INJECTED] = '{"cpu": "EPYC 9654", "features": ["avx2", "avx512_vnni"], "usable_cores": [0, 1]}'
    script = "import os; print('got', *(os.environ.get(name, '-') for name in ('TF_ENABLE_ONEDNN_OPTS', 'NPROC')))"
    (tmp_path / "job.py").write_text(script)
    runs = tmp_path / "runs"
    words = ("--workers", "4", "--runs-dir", str(runs), str(tmp_path / "job.py"))
    done = _run(environ, "run", "--hosts", "first slots=2, second slots=2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [done.stdout.count(f"got {values}\n") for values in ("1 1", "1 2")] == [2, 2], done.stdout
    rows = json.loads(RunDir(runs / "job").environment.read_text())["settings"]
    assert (rows[0]["name"], rows[0]["value"]) == (ONEDNN, "1")
    assert "the CPU of second has AVX2, for which" in rows[0]["reason"]
    assert {tuple(row["hosts"]) for row in rows[1:]} == {("first",), ("second",)}


@pytest.mark.parametrize("sync", ["none", "code"])
def test_all_that_is_wrong_with_hosts_is_told_at_once(tmp_path: Path, environ: dict[str, str], sync: str) -> None:
    nowhere = tmp_path / "nowhere"
    hosts = [f"a python={nowhere}", "b", f"c folder={nowhere}", "d"]
    config = str(_config(tmp_path, hosts=hosts, interface="ib0", sync=sync))
    done = _run(environ, "doctor", config)
    assert done.returncode == 2
    lines = done.stderr.removeprefix("error: ").splitlines()
    assert [line.partition(":")[0] for line in lines] == [*"abc", *("c" if sync == "none" else ""), "d"]
    assert "there is no Python" in lines[0]
    assert all("engine.interface: got 'ib0'; it has " in lines[number] for number in (1, 2, -1))
    # the code is not sent while a host cannot be used, and with it the folder would be made
    assert sync == "code" or f"No such file or directory: {nowhere}" in lines[3]
    assert not nowhere.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
@pytest.mark.parametrize("command", ["train", "run"])
def test_a_start_that_waits_for_hosts_can_be_ended(
    tmp_path: Path, environ: dict[str, str], command: str, number: signal.Signals | None
) -> None:
    """By a signal, or by `distlaunch stop`."""
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\necho begun >> {tmp_path}/calls\nexec sleep 600\n")
    (tmp_path / "job.py").touch()
    config = str(_config(tmp_path, hosts=["a", "b"]))
    runs = ("--runs-dir", str(tmp_path / "runs"))
    words = {"train": (config,), "run": ("--hosts", "a,b", "--workers", "2", *runs, str(tmp_path / "job.py"))}[command]
    job = subprocess.Popen(
        [sys.executable, "-c", _ENTRY, command, *words], env=environ, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: (tmp_path / "calls").exists() and (tmp_path / "calls").read_text().count("begun") == 2)
    hanging = psutil.Process(job.pid).children(recursive=True)
    if number is None:
        stopped = _run(environ, "stop", str(next((tmp_path / "runs").iterdir())))
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.endswith("stopped before any task was started\n")
    else:
        # as `timeout` does, which signals its child and then their group
        for _ in range(2 if number == signal.SIGTERM else 1):
            job.send_signal(number)
    _, told = job.communicate(timeout=20)
    name = (number or signal.SIGTERM).name
    run = tmp_path / "runs" / {"train": "tiny", "run": "job"}[command]
    expected = f"{run}: stopped ({name}) before any task was started; run the same command again\n"
    assert (job.returncode, told) == (4, expected)
    assert not psutil.wait_procs(hanging, 10)[1]
    assert not list((tmp_path / "runs").iterdir())


def test_ssh_that_is_missing_is_told(tmp_path: Path, environ: dict[str, str]) -> None:
    done = _run({**environ, "PATH": "/nowhere"}, "train", str(_config(tmp_path, hosts=["a", "b"])))
    assert done.returncode == 2
    assert "engine.kind: ssh needs the program `ssh`, but it is not on PATH" in done.stderr
