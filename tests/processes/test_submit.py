"""`distlaunch submit` with a Slurm that only pretends, and its batch script under signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from supervised import wait_until
from test_commands import CONFIG

from distlaunch.base.errors import ExitCode, UsageError
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import RunEnded
from distlaunch.base.protocol import HELD_CODE
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import Submission
from distlaunch.cli.main import cli
from distlaunch.cluster.machine import Machine
from distlaunch.config.read.load import load_resolved
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Start
from distlaunch.engines.slurm.script import batch_script
from distlaunch.jobs.choose_run import JobRequest, choose

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
_LAUNCHER = """#!/bin/bash
[ ! -f {told}.code ] || {{ echo "$@" > {told}; exit "$(cat {told}.code)"; }}
trap 'echo stopped; exit 4' TERM
trap 'echo interrupted; exit 4' INT
echo "$@" > {told}
while :; do sleep 0.05; done
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, with the commands of Slurm on PATH."""
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "m.py").write_text("def model():\n    pass\n\n\ndef data():\n    pass\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).symlink_to(Path(__file__).with_name("fake_slurm.sh"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "jobs"))
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def submit(*words: str) -> Result:
    return call("submit", "--engine", "slurm", *words)


def statuses(folder: Path) -> dict[str, str]:
    listed = json.loads(call("runs", "--json").stdout)
    return {Path(run["run"]).name: run["status"] for run in listed}


def test_a_pending_job(folder: Path) -> None:
    done = submit("job.yaml", "-p", "gpu", "--account", "12")
    assert done.exit_code == 0, done.output
    assert done.stdout == "runs/job\n"
    told = "job        1\nscript     runs/job/job.sh\n"
    told += "follow it  distlaunch logs runs/job -f\nstop it    distlaunch stop runs/job\n"
    assert done.stderr == told
    run = RunDir(folder / "runs/job")
    script = run.batch_script.read_text()
    assert "#SBATCH --account=12\n#SBATCH --partition=gpu\n" in script
    assert f"python={sys.executable}\n" in script
    again = submit("job.yaml", "--json")
    assert json.loads(again.stdout)["run"] == str(folder / "runs/job-2")
    assert statuses(folder) == {"job": "pending", "job-2": "pending"}
    refused = submit("runs/job", "--resume")
    assert "runs/job is already in the queue: job 1, PENDING (Priority)" in str(refused.exception)
    assert "job 1: PENDING (Priority); `logs -f` waits" in str(call("logs", "runs/job").exception)
    assert "pending" in call("report", "runs/job").stdout
    stopped = call("stop", "runs/job")
    assert stopped.stdout.startswith("runs/job: cancelled before the first step\n")
    assert "distlaunch submit runs/job --resume" in stopped.stdout
    assert statuses(folder) == {"job": "cancelled", "job-2": "pending"}
    # now it may be submitted again, with other settings
    assert submit("runs/job", "--resume", "--set", "train.epochs=7").exit_code == 0
    assert "epochs: 7" in run.config.read_text()
    assert statuses(folder)["job"] == "pending"


def test_resume_submits_what_train_would_resume(folder: Path) -> None:
    assert submit("job.yaml").exit_code == 0
    assert call("stop", "runs/job").exit_code == 0
    run = RunDir(folder / "runs/job")
    again = submit("job.yaml", "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout == "runs/job\n"
    assert again.stderr.startswith("resuming runs/job\n")
    assert call("stop", "runs/job").exit_code == 0
    epochs = load_resolved(run.config).train.epochs
    run.attempt_config(0).parent.mkdir(parents=True)
    run.attempt_config(0).write_text(run.config.read_text())
    writer = EventWriter(run.events, attempt=0, task="worker:0")
    writer.write(RunEnded(status="done", step=4, epochs_done=epochs, seconds=1.0))
    run.write_json(run.environment, {"config_folder": str(folder), "directory": str(folder)})
    finished = submit("job.yaml", "--resume")
    assert (finished.exit_code, finished.stdout) == (0, ""), finished.exception
    assert (
        finished.stderr
        == "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`\n"
    )
    assert json.loads(submit("job.yaml", "--resume", "--json").stdout) == {
        "run": str(run.path), "engine": None, "job": None, "script": None
    }  # fmt: skip
    other = submit("job.yaml", "--resume", "--set", "seed=7")
    assert other.exit_code == ExitCode.USAGE or isinstance(other.exception, UsageError)
    more = submit("job.yaml", "--resume", "--set", f"train.epochs={epochs + 1}")
    assert more.exit_code == 0, more.output
    # what the job executes
    assert not choose(JobRequest(str(run.path), resume=True), Machine({})).finished


def test_a_machine_without_a_configuration_of_slurm(folder: Path) -> None:
    program = folder / "bin" / "sbatch"
    program.unlink()
    program.write_text("#!/bin/sh\necho 'sbatch: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    program.chmod(0o755)
    refused = submit("job.yaml")
    assert "Slurm is not configured on this machine; use a login node" in str(refused.exception)
    assert not list((folder / "runs").glob("*"))


def test_without_its_queue_a_run_says_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit("job.yaml").exit_code == 0
    monkeypatch.setenv("PATH", str(folder / "runs"))
    assert statuses(folder) == {"job": "submitted"}
    refused = submit("job.yaml")
    assert "there is no `sbatch` on this machine's PATH" in str(refused.exception)
    assert statuses(folder) == {"job": "submitted"}


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    refused = call("submit", "job.yaml", "--dry-run", "--json")
    assert refused.stdout == ""
    assert "--dry-run prints the script as it is; leave out --json" in str(refused.exception)
    before = sorted(folder.rglob("*"))
    done = submit("job.yaml", "--dry-run", "--time", "4:00:00")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=job\n")
    assert "#SBATCH --time=4:00:00\n" in done.stdout
    assert sorted(folder.rglob("*")) == before


def test_the_job_offers_metrics(folder: Path) -> None:
    offered = ("--metrics-port", "0.0.0.0:9400", "--metrics-file", "it's.prom")
    script = submit("job.yaml", "--dry-run", *offered).stdout
    (line,) = [each for each in script.splitlines() if "-m distlaunch train" in each]
    words = shlex.split(line)
    assert words[words.index("--resume") + 1 :] == [*offered[:3], str(folder / "it's.prom"), "&"]
    for wrong in (("--metrics-port", "host"), ("--metrics-file", "no/x.prom"), ("--metrics-file", "x.txt")):
        assert str(submit("job.yaml", *wrong).exception).startswith(f"{wrong[0]}: ")
    assert not (folder / "runs").exists()


def test_what_is_refused_leaves_nothing(folder: Path) -> None:
    refused = submit("job.yaml", "-p", "nowhere")
    said = "Slurm rejected the job: sbatch: invalid partition specified: nowhere"
    assert str(refused.exception) == said
    assert not list((folder / "runs").iterdir())


def test_all_mistakes_are_told_before_anything_is_submitted(folder: Path) -> None:
    settings = "engine: {kind: slurm, setup: ['true', 'echo \"'], flags: [--part=x], mem: 3Q}\n"
    (folder / "job.yaml").write_text(CONFIG + settings)
    line = (CONFIG + settings).count("\n")
    said = str(submit("job.yaml", "--time", "1h").exception).splitlines()
    assert f"job.yaml:{line}: engine.mem: got '3Q'; expected megabytes, or a number with K, M, G or T" in said[-2]
    assert f"job.yaml:{line}: engine.flags[0]: got '--part=x'; use engine.partition" in said
    assert any(each.startswith("--time: engine.time: got '1h'; expected minutes") for each in said)
    assert "--engine" in submit("job.yaml", "--engine", "slrm").stderr


def test_whose_queue_it_is_may_be_in_the_config(folder: Path) -> None:
    assert call("submit", "job.yaml", "--dry-run", "--set", "engine.kind=slurm").stdout.startswith("#!/bin/bash")
    undecided = call("submit", "job.yaml", "--dry-run")
    assert "the config's engine.kind is auto, which has no queue; add --engine slurm" in str(undecided.exception)
    assert not (folder / "runs").exists()
    assert not list((folder / "jobs").iterdir())


class Batch:
    """A batch script that runs, with a launcher that only waits to be stopped."""

    def __init__(self, folder: Path, state: str = "RUNNING", restarts: str = "0", **slurm: Any) -> None:
        self.run = RunDir(folder / "runs" / "batch")
        self.run.path.mkdir(parents=True, exist_ok=True)
        self.run.write_submission(Submission("slurm", "1", 0.0))
        self.state = folder / "jobs" / "1"
        self.state.write_text(f"{state}\n")
        self.told = folder / "told"
        launcher = folder / "launcher"
        launcher.write_text(_LAUNCHER.format(told=self.told))
        launcher.chmod(0o755)
        plain = {"model": {"function": "m:model"}, "data": {"function": "m:data", "global_batch": 8}}
        config = RunConfig.model_validate({**plain, "engine": {"kind": "slurm", **slurm}})
        self.run.batch_script.write_text(batch_script(config, Start(self.run, str(launcher), folder)))
        env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": restarts}
        self.process = subprocess.Popen(
            ["bash", str(self.run.batch_script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def signal(self, *numbers: signal.Signals) -> tuple[int, str]:
        """Sends signals once the launcher is up; returns the exit code and what was printed."""
        wait_until(lambda: self.told.exists() and self.told.read_text())
        for number in numbers:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_before_the_end_the_job_is_queued_again(folder: Path, number: signal.Signals) -> None:
    batch = Batch(folder, restarts="1", requeues=2)
    code, output = batch.signal(number)
    assert (code, batch.state.read_text()) == (4, "PENDING\n")
    assert "distlaunch: requeueing job 1 to resume (2 of 2)" in output
    assert batch.told.read_text() == f"-P -m distlaunch train {batch.run.path} --resume\n"
    # it has not ended
    assert batch.run.job_exit_code() is None


@pytest.mark.parametrize(
    ("number", "state", "restarts", "said"),
    [
        (signal.SIGUSR2, "RUNNING", "0", "stopped\n"),  # `distlaunch stop`
        (signal.SIGTERM, "COMPLETING", "0", "stopped\n"),  # `scancel`
        (signal.SIGUSR1, "RUNNING", "2", "stopped\ndistlaunch: not requeued: engine.requeues is 2\n"),
    ],
)
def test_it_is_over(folder: Path, number: signal.Signals, state: str, restarts: str, said: str) -> None:
    batch = Batch(folder, state, restarts, requeues=2)
    assert batch.signal(number) == (4, said)
    assert batch.run.job_exit_code() == 4
    assert batch.state.read_text() == f"{state}\n"


_RESUME = "; to resume: distlaunch submit {run} --resume"


@pytest.mark.parametrize(
    ("busy", "state", "said"),
    [
        (["squeue"] * 2 + ["scontrol"] * 6, "PENDING", ""),
        (["squeue"] * 7, "RUNNING", "not requeued: squeue does not report the state of job 1" + _RESUME),
        (["scontrol"] * 7, "RUNNING", "not requeued: scontrol requeue failed" + _RESUME),
    ],
)
def test_a_busy_controller_is_asked_again(folder: Path, busy: list[str], state: str, said: str) -> None:
    (folder / "jobs.busy").write_text("".join(f"{name}\n" for name in busy))
    # the script pauses for a minute
    (folder / "bin" / "sleep").symlink_to("/bin/true")
    batch = Batch(folder)
    code, output = batch.signal(signal.SIGUSR1)
    assert (code, batch.state.read_text()) == (4, f"{state}\n")
    assert batch.run.job_exit_code() == (4 if said else None)
    assert said.format(run=batch.run.path) in output
    assert ("not requeued" in output) == bool(said)


@pytest.mark.parametrize(
    ("code", "restarts", "again", "ends_with"),
    [(75, "0", True, 75), (75, "2", False, 75), (HELD_CODE, "0", False, 75), (3, "0", False, 3), (2, "0", False, 2)],
)
def test_a_cause_outside_the_job_queues_it_again(
    folder: Path, code: int, restarts: str, again: bool, ends_with: int
) -> None:
    (folder / "told.code").write_text(str(code))
    before = time.time()
    batch = Batch(folder, restarts=restarts, requeues=2)
    output, _ = batch.process.communicate(timeout=60)
    assert batch.process.returncode == ends_with, output
    assert (batch.state.read_text() == "PENDING\n") == again
    assert batch.run.job_exit_code() == (None if again else ends_with)
    assert batch.run.may_run_again() == (ends_with == 75)
    if again:  # a minute later
        assert before + 59 <= int(batch.run.batch_not_before.read_text()) <= time.time() + 61
    else:
        assert not batch.run.batch_not_before.exists()


def test_a_job_that_was_started_too_early_waits(folder: Path) -> None:
    run = RunDir(folder / "runs" / "batch")
    (folder / "told.code").write_text("0")
    until = int(time.time()) + 2
    run.path.mkdir(parents=True)
    run.batch_not_before.write_text(f"{until}\n")
    batch = Batch(folder)
    output, _ = batch.process.communicate(timeout=60)
    assert (batch.process.returncode, output) == (0, "")
    assert time.time() >= until
    assert not run.batch_not_before.exists()


def test_stop_now_is_ctrl_c_twice(folder: Path) -> None:
    batch = Batch(folder)
    assert batch.signal(signal.SIGINT) == (4, "interrupted\n")
    assert batch.run.job_exit_code() == 4


@pytest.mark.parametrize(
    ("restarts", "setup", "code", "said"),
    [
        ("0", ["true", "cat /nowhere"], 2, "this line of engine.setup failed: cat /nowhere"),
        ("3", [], 4, "distlaunch: not restarted: engine.requeues is 2"),
    ],
)
def test_it_does_not_start(folder: Path, restarts: str, setup: list[str], code: int, said: str) -> None:
    batch = Batch(folder, restarts=restarts, requeues=2, setup=setup)
    output, _ = batch.process.communicate(timeout=60)
    assert batch.process.returncode == batch.run.job_exit_code() == code
    assert said in output
    assert not batch.told.exists()


def test_setup_lines_with_secrets_are_read_when_the_job_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script contains no secrets; the lines work, even in a requeue without the variable."""
    password, fallback = "p4ss'w rd$HOME-\\x", "Zq81.default.77"
    monkeypatch.setenv("DB_PASSWORD", password)
    monkeypatch.setenv("WHERE", "some_folder")
    lines = [
        f'printf %s "${{DB_PASSWORD}}" > {folder}/seen',
        f"echo '${{API_KEY:{fallback}}}' > {folder}/fallback; export MINE=1",
        f"echo ${{WHERE}} $MINE > {folder}/where",
        "cat /nowhere '${API_KEY:" + fallback + "}'",
    ]
    (folder / "job.yaml").write_text(CONFIG + f"engine: {{kind: slurm, setup: {json.dumps(lines)}}}\n")
    printed = submit("job.yaml", "--dry-run").stdout
    assert submit("job.yaml").exit_code == 0
    run = RunDir(folder / "runs" / "job")
    for text in (printed, *(path.read_text() for path in run.path.iterdir() if path.name not in (".secrets", ".lock"))):
        assert password not in text
        assert fallback not in text or text == run.config.read_text()
    assert "echo some_folder $MINE" in printed
    monkeypatch.delenv("DB_PASSWORD")
    script = run.batch_script.read_text()
    env = {**os.environ, "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    # a shell's own rules for what stands in double quotes
    assert (folder / "seen").read_text() == password.replace("$HOME", os.environ["HOME"])
    assert (folder / "fallback").read_text() == f"{fallback}\n"
    assert (folder / "where").read_text() == "some_folder 1\n"
    assert "this line of engine.setup failed: cat /nowhere ${API_KEY}" in done.stderr.replace("'", "")
    run.forget_secrets()
    again = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "DB_PASSWORD is not set" in again.stderr
    assert "this line of engine.setup failed: printf %s" in again.stderr
