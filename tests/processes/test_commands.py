"""The commands as users run them, with a worker that only pretends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from limits import with_open_files
from real import launchers
from supervised import REPOSITORY, processes_of, wait_until

pytest.importorskip("distlaunch.config.read.load")

from distlaunch.base.run_dir import RunDir
from tests.conftest import is_cold

CONFIG = """\
model: {function: "m.py:model"}
data:
  function: m.py:data
  global_batch: 4
compile: {optimizer: sgd, loss: mse}
train: {epochs: 2}
export: [keras]
"""


class Shell:
    """Runs the command in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("TF_CONFIG", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
            },
            "PYTHONPATH": REPOSITORY,
            "MARKER": str(directory),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        if not is_cold():
            return launchers().start_command("tests.processes.fake_cli", words, self.directory, {**self.env, **env})
        return self._popen(self._argv(words), env)

    def start_with_open_files(self, soft: int, *words: str) -> subprocess.Popen[str]:
        """Start the command from a shell with this soft limit on open files."""
        return self._popen(with_open_files(soft, self._argv(words)), {})

    def run_in_ascii(self, *words: str, **env: str) -> tuple[int, str, str]:
        """Run the command where files without a named encoding are read as ASCII."""
        locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        process = self._popen(self._argv(words), {**env, **locale})
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def _argv(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("fake_cli.py")), *words]

    def _popen(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(argv, cwd=self.directory, env={**self.env, **env}, text=True, **pipes)

    def __call__(self, *words: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "m.py").write_text("def model():\n    pass\n\n\ndef data():\n    pass\n")
    return Shell(tmp_path)


def test_train(shell: Shell, golden: Callable[[str, str], None]) -> None:
    code, out, err = shell("train", "job.yaml")
    assert (code, err) == (0, "")
    golden("train/done.txt", out)
    run = RunDir(shell.directory / "runs/job")
    assert run.finished()
    for path in (run.config, run.plan, run.environment, run.attempt_config(0), run.task(0, "worker:0").stdout_log):
        assert path.is_file()
    assert "noise" in run.task(0, "worker:0").stderr_log.read_text()


def test_a_failure(shell: Shell, golden: Callable[[str, str], None]) -> None:
    code, out, err = shell("train", "job.yaml", FAKE="fail")
    assert code == 3
    out = re.sub(r"in \d+\.\d s", "in N s", out)
    golden("train/failed.txt", out + "--- stderr\n" + re.sub(r"on \S+:", "on HOST:", err))


def test_no_control_codes_outside_a_terminal(shell: Shell) -> None:
    _, out, err = shell("train", "job.yaml", FAKE="fail", NO_COLOR="1")
    assert "\x1b" not in out + err
    assert not any(len(line) > 80 for line in (out + err).splitlines() if "runs/" not in line)


@pytest.mark.parametrize(
    ("words", "fake", "expected", "text"),
    [
        (("train", "job.yaml"), "", 0, "export      runs/job/export/keras"),
        (("train", "job.yaml"), "fail", 3, "ValueError: boom"),
        (("run", "false"), "", 3, "runs/false failed: ended with exit code 1"),
    ],
)
def test_signals_after_the_end_change_nothing(
    shell: Shell, words: tuple[str, ...], fake: str, expected: int, text: str
) -> None:
    code, out, err = shell(*words, FAKE=fake, FAKE_CLOSING=f"{int(signal.SIGINT)} 2")
    assert code == expected
    assert text in out + err
    assert "the job has already ended; its result follows (SIGINT)\n" in err
    assert "run the same command again" not in err


def test_a_third_signal_after_the_end_ends_the_process() -> None:
    code = "import os, signal; from distlaunch.supervise.late_signals import LateSignals; late = LateSignals()\n"
    code += "late.take_over(); late.exit_code = 3\n"
    code += "for _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, "the job has already ended; its result follows (SIGTERM)\n")


def test_json_is_nothing_but_events(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", "--json")
    assert (code, err) == (0, "")
    kinds = [json.loads(line)["event"] for line in out.splitlines()]
    assert kinds[:2] == ["CommandStarted", "TaskStarted"]
    assert kinds[-2:] == ["RunEnded", "CommandEnded"]


def test_quiet_is_silent(shell: Shell) -> None:
    assert shell("train", "job.yaml", "--quiet") == (0, "", "")
    code, out, err = shell("train", "job.yaml", "--quiet", FAKE="fail")
    assert (code, out) == (3, "")
    assert "ValueError: boom" in err


def test_runs_never_mix(shell: Shell) -> None:
    for _ in range(2):
        shell("train", "job.yaml", "-q")
    shell("train", "job.yaml", "-q", "--name", "other")
    assert sorted(path.name for path in (shell.directory / "runs").iterdir()) == ["job", "job-2", "other"]


def test_resume_goes_on_with_what_is_not_finished(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    code, out, _ = shell("train", "job.yaml", "--resume")
    assert code == 0
    assert "resuming runs/job" in out
    assert "restored  step 4" in out
    assert RunDir(shell.directory / "runs/job").next_attempt() == 2
    finished = "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`\n"
    assert shell("train", "job.yaml", "--resume")[:2] == (0, finished)
    assert shell("train", "job.yaml", "--set", "resume=auto")[:2] == (0, finished)
    assert shell("train", "runs/job", "--resume")[:2] == (0, finished)


@pytest.mark.parametrize("how", ["config", "raise_early"])
def test_what_a_resume_in_vain_has_changed_is_put_back(shell: Shell, how: str) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    config = RunDir(shell.directory / "runs/job").config
    before = config.read_text()
    code, out, _ = shell("train", "runs/job", "--resume", "--set", "seed=7", FAKE=how)
    assert code == (2 if how == "config" else 3)
    assert "no step was made: restored the earlier" in out
    assert config.read_text() == before
    assert shell("train", "runs/job", "--resume", "--set", "seed=7", "-q", FAKE="raise")[0] == 3
    assert "seed: 7" in config.read_text()


def test_a_resume_in_vain_where_text_is_not_utf8(shell: Shell) -> None:
    (shell.directory / "job.yaml").write_text(
        CONFIG.replace('"m.py:model"', '"m.py:model", args: {width: größe ✓}'), encoding="utf-8"
    )
    (shell.directory / "m.py").write_text("def model(width): ...\ndef data(): ...\n")
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    config = RunDir(shell.directory / "runs/job").config
    before = config.read_bytes()
    assert "größe ✓".encode() in before
    code, out, err = shell.run_in_ascii("train", "runs/job", "--resume", "--set", "seed=7", FAKE="config")
    assert code == 2, err
    assert "no step was made: restored the earlier" in out
    assert config.read_bytes() == before


def test_secrets_are_kept_until_the_run_is_done(shell: Shell) -> None:
    """Restarts and requeues work where the variable is not set, such as in another shell."""
    secret = "wk-abcdefgh123456"
    (shell.directory / "job.yaml").write_text(
        CONFIG.replace('"m.py:model"', '"m.py:model", args: {width: 3, depth: "${MY_TOKEN}"}')
    )
    (shell.directory / "m.py").write_text("def model(width, depth): ...\ndef data(): ...\n")
    run = RunDir(shell.directory / "runs/job")

    def holders() -> set[str]:
        return {path.name for path in run.path.rglob("*") if path.is_file() and secret in path.read_text()}

    assert shell("train", "job.yaml", "-q", "--set", "restarts.max=1", MY_TOKEN=secret, FAKE="fail")[0] == 3
    assert holders() == {".secrets"}
    assert shell("train", "job.yaml", "-q", "--resume", FAKE="fail")[0] == 3
    assert shell("train", "runs/job", "-q", "--resume")[0] == 0
    assert holders() == set()
    more = ("train", "runs/job", "-q", "--resume", "--set", "train.epochs=99")
    assert shell(*more, MY_TOKEN=secret, FAKE="raise_early")[0] == 3
    assert holders() == set(), "it is still finished"
    code, _, err = shell("evaluate", "runs/job")
    assert code == 2
    assert "the environment variable MY_TOKEN is not set" in err
    assert shell("evaluate", "runs/job", MY_TOKEN=secret)[0] == 0


def test_resume_auto_in_the_config(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", "--set", "resume=auto", FAKE="fail")[0] == 3
    assert shell("train", "job.yaml", "-q", "--set", "resume=auto")[0] == 0
    assert [path.name for path in (shell.directory / "runs").iterdir()] == ["job"]


def test_a_run_is_no_config_to_smoke(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q")[0] == 0
    code, _, err = shell("train", "runs/job", "--smoke")
    assert code == 2
    assert "runs/job is a run: --smoke tests a config" in err


def test_more_epochs_for_a_finished_run(shell: Shell) -> None:
    shell("train", "job.yaml", "-q")
    code, out, _ = shell("train", "runs/job", "--resume", "--set", "train.epochs=3")
    assert code == 0
    assert "restored  step 8" in out


def test_more_epochs_in_the_config_of_a_finished_run(shell: Shell) -> None:
    shell("train", "job.yaml", "-q")
    code, out, _ = shell("train", "job.yaml", "--resume", "--set", "train.epochs=3")
    assert code == 0
    assert out.startswith("resuming runs/job; changed settings: train.epochs: 2 -> 3\n")
    assert "restored  step 8" in out
    finished = "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`\n"
    assert shell("train", "job.yaml", "--resume", "--set", "train.epochs=3")[:2] == (0, finished)
    code, out, err = shell("train", "job.yaml", "--resume")
    assert (code, out) == (2, "")
    assert "this config would give other numbers: train.epochs: 3 -> 2" in err


def test_resume_of_nothing(shell: Shell) -> None:
    code, out, _ = shell("train", "job.yaml", "--resume")
    assert code == 0
    assert out.startswith("there is no run called job yet: starting it\n")


def test_resume_takes_the_older_unfinished_run_and_no_other_experiment(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    assert shell("train", "job.yaml", "-q")[0] == 0
    assert shell("train", "job.yaml", "-q", "--name", "job-3", FAKE="fail")[0] == 3
    resume = ("job.yaml", "--resume", "--set", "seed=4")
    planned = shell("plan", *resume, "--no-variables")[1]
    assert planned.startswith("resuming runs/job, which is unfinished; runs/job-2 is newer and finished: ")
    assert "--run-dir" in planned
    code, out, err = shell("train", *resume)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == planned.splitlines()[0]
    runs = {name: RunDir(shell.directory / "runs" / name).next_attempt() for name in ("job", "job-2", "job-3")}
    assert runs == {"job": 2, "job-2": 1, "job-3": 1}


def test_resume_makes_the_exports_that_a_finished_run_lacks(shell: Shell) -> None:
    resume = ("train", "job.yaml", "--resume", "--set", "export=[keras]")
    assert shell("train", "job.yaml", "-q", "--set", "export=[keras]", FAKE="fail_export")[0] == 3
    (shell.directory / "runs/job/checkpoints/step-00000008").mkdir()  # which the fake worker has only told
    for _ in range(2):
        code, out, _ = shell(*resume, FAKE="fail_export")
        assert (code, out.splitlines()[0]) == (3, "runs/job has finished but lacks its export as keras: adding that")
    plan = json.loads(shell("plan", *resume[1:], "--json", "--no-variables")[1])
    assert plan["mode"] == "export"
    assert "lacks its export as keras" in plan["note"]
    code, out, err = shell(*resume)
    assert (code, err) == (0, "")
    assert "exported  keras" in out
    finished = "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`"
    assert shell(*resume)[:2] == (0, finished + "\n")
    assert shell("plan", *resume[1:])[:2] == (0, finished + "\n")
    plan = json.loads(shell("plan", *resume[1:], "--json")[1])
    assert (plan["tasks"], plan["note"]) == ([], finished)


@pytest.mark.slow  # in CI test_preemption.py resumes such a cluster
def test_tasks_of_a_given_cluster_follow_the_run_of_their_chief(shell: Shell) -> None:
    two = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]

    def planned(index: int, *overrides: str) -> list[str]:
        task = {"type": "worker", "index": index}
        tf_config = json.dumps({"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": task})
        words = [word for each in overrides for word in ("--set", each)]
        code, out, err = shell("plan", "job.yaml", "--resume", "--no-variables", *two, *words, TF_CONFIG=tf_config)
        return [str(code), *(out or err).splitlines()]

    assert planned(1)[1] == "there is no run called job-worker-1 yet: starting it"
    for name in ("job", "job-worker-1", "job-worker-1"):
        assert shell("train", "job.yaml", "-q", "--name", name)[0] == 0
    assert planned(0)[1] == "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`"
    assert planned(1)[1] == "runs/job, the run of the chief, has finished; to train longer, increase `train.epochs`"
    assert planned(1, "seed=1")[0] == "2"
    assert planned(1, "train.epochs=3")[1] == "resuming runs/job-worker-1"  # with the number of the chief's run
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    assert planned(0)[1] == "resuming runs/job-2"
    assert planned(1)[1] == "resuming runs/job-worker-1-2"


def test_config_problems_of_workers_have_lines(shell: Shell) -> None:
    code, _, err = shell("train", "job.yaml", FAKE="config")
    assert code == 2
    assert err == "error: runs/job: job.yaml:4: data.global_batch: does not fit\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nope.yaml"], "nope.yaml: there is no such config file"),
        (["train", "runs/x", "--resume"], "runs/x: there is no such run or config file"),
        (["train", "runs"], "runs: expected a config file, or a run directory"),
        (["evaluate", "runs/x"], "runs/x: there is no such run"),
        (["predict", "runs/x"], "runs/x: there is no such run"),
        (["train", "job.yaml", "--name", "a/b"], "a/b"),
        (["train", "job.yaml", "--smoke", "--resume"], "--resume: not possible with --smoke"),
        (["train", "name=x"], "write --set name=x"),
    ],
)
def test_bad_usage(shell: Shell, words: list[str], message: str) -> None:
    (shell.directory / "runs").mkdir()
    code, out, err = shell(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert not list((shell.directory / "runs").iterdir())


def test_what_cannot_start_leaves_nothing(shell: Shell) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        kind = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]
        code, out, err = shell("train", "job.yaml", *kind, "--set", f"cluster.ports=[{port}, 1]")
    assert (code, out) == (2, "")
    setting = f"--set cluster.ports=[{port}, 1]: cluster.ports[0]"
    assert f"error: {setting}: port {port} is in use by process {os.getpid()}" in err
    assert not list(shell.directory.glob("runs/*"))


def test_a_tracker_that_is_not_installed_is_told_at_the_start(shell: Shell) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    code, out, err = shell("train", "job.yaml", "--set", "tracking=[wandb]")
    assert code == 0, out + err
    warning = "warning: --set tracking=[wandb]: tracking[0]: wandb is not installed: pip install 'distlaunch[wandb]'"
    assert warning in (out + err).splitlines()[0]


def test_a_run_in_use(shell: Shell) -> None:
    first = shell.start("train", "job.yaml", FAKE="wait")
    wait_until(lambda: (shell.directory / "runs/job/waiting-worker:0").exists())
    code, out, err = shell("train", "runs/job", "--resume")
    assert (code, out) == (75, "")
    assert f"this run is still running (process {first.pid})" in err
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=20)
    assert first.returncode == 4
    assert "stopping after the current step; press Ctrl-C again to end at once" in out
    assert "next" in out
    assert "distlaunch train runs/job --resume" in out
    wait_until(lambda: not processes_of(shell.directory))


def test_a_reader_that_goes_away_does_not_end_the_job(shell: Shell) -> None:
    process = shell.start("train", "job.yaml")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert RunDir(shell.directory / "runs/job").finished()


def test_plan_touches_nothing(shell: Shell) -> None:
    code, out, _ = shell(
        "plan", "job.yaml", "--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"
    )
    assert code == 0
    assert "runs/job, attempt 0" in out
    assert "127.0.0.1:(picked at start)" in out
    assert not (shell.directory / "runs").exists()
    assert len(json.loads(shell("plan", "job.yaml", "--json")[1])["tasks"]) == 1


def test_several_workers(shell: Shell) -> None:
    kind = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]
    code, out, _ = shell("train", "job.yaml", *kind)
    assert code == 0
    assert "[worker:0] hello" in out
    assert "[worker:1] hello" in out


def test_more_tasks_than_the_shell_allows_files_for(shell: Shell) -> None:
    """A run may need more open files than the soft limit of the shell, up to the hard limit of the system."""
    kind = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=20"]
    process = shell.start_with_open_files(100, "train", "job.yaml", "-q", *kind, "--set", "data.global_batch=20")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


def test_one_task_of_a_given_cluster(shell: Shell) -> None:
    tf_config = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": 1}}
    kind = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=4"]
    code, out, _ = shell("train", "job.yaml", *kind, TF_CONFIG=json.dumps(tf_config))
    assert code == 0, out
    assert [path.name for path in (shell.directory / "runs").iterdir()] == ["job-worker-1"]
    run = RunDir(shell.directory / "runs/job-worker-1")
    assert "workers: 2" in run.config.read_text()
    assert run.finished()


def test_evaluate_and_export(shell: Shell, golden: Callable[[str, str], None]) -> None:
    shell("train", "job.yaml", "-q")
    (shell.directory / "runs/job/checkpoints/step-00000008").mkdir(parents=True)  # which the fake worker has only told
    code, out, err = shell("evaluate", "runs/job", "--checkpoint", "8")
    assert (code, err) == (0, "")
    golden("train/evaluate.txt", out)
    assert (
        "exported  keras,saved_model" in shell("export", "runs/job", "--format", "keras", "--format", "saved_model")[1]
    )
    assert RunDir(shell.directory / "runs/job").finished()


def test_predict(shell: Shell) -> None:
    shell("train", "job.yaml", "-q")
    code, out, err = shell("predict", "runs/job")
    assert (code, err) == (0, "")
    told = "predicted validation at step 8 to runs/job/predictions/validation-00000008.npz: label 4 x 10, total 4 x 1"
    assert told in out.splitlines()
    code, out, _ = shell("predict", "runs/job", "--split", "train", "--output", "some.npy", "--json")
    event = next(e for e in map(json.loads, out.splitlines()) if e["event"] == "Predicted")
    assert (code, event["split"], event["path"]) == (0, "train", str(shell.directory / "some.npy"))
    assert "predict: done" in shell("report", "runs/job")[1]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a.txt", "--output a.txt: expected a name that ends in .npz, or in .npy for a single array"),
        ("folder.npz", "--output folder.npz is a folder; give a file in it"),
        ("none/a.npz", "--output none/a.npz: there is no folder"),
    ],
)
def test_predictions_that_could_not_be_written(shell: Shell, output: str, message: str) -> None:
    shell("train", "job.yaml", "-q")
    (shell.directory / "folder.npz").mkdir()
    code, out, err = shell("predict", "runs/job", "--output", output)
    assert (code, out) == (2, "")
    assert message in err
    assert RunDir(shell.directory / "runs/job").attempts() == [0]


def test_smoke(shell: Shell, golden: Callable[[str, str], None]) -> None:
    code, out, err = shell("train", "job.yaml", "--smoke")
    assert (code, err) == (0, "")
    golden("train/smoke.txt", out)


def test_smoke_says_what_does_not_work(shell: Shell) -> None:
    code, out, _ = shell("train", "job.yaml", "--smoke", FAKE="fail")
    assert code == 3
    assert " no   validation ran: not reached" in out
