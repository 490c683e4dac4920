"""The scripts of docs/automation.md: with a `distlaunch` that only pretends, and, where marked slow, for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from supervised import processes_of, wait_until
from tiny_job import MODULE, environment, kill_all, write_job

from distlaunch.base.run_dir import RunDir
from distlaunch.runs.final_code import final_code
from tests.documents import snippets

_PAGE = "automation.md"
_SHELLS = [shell for shell in ("sh", "bash", "dash") if shutil.which(shell)]
_NAMES = (
    "retry.sh",
    "array.sh",
    "sweep.sh",
    "distlaunch runs",
    "seeds.sh",
    "run=$",
    "note.sh",
    "nightly.sh",
    "keep_going.sh",
)
_PRETENDS = """#!/bin/sh
# the next of `codes` is its exit code; `stop` waits to be stopped
printf '%s\\n' "$*" >> calls
code=$(sed -n "$(($(wc -l < calls)))p" codes)
if [ "$code" = stop ]; then
  trap 'echo stopped >> calls; exit 4' TERM
  touch up
  while :; do sleep 0.01; done
fi
exit "${code:-0}"
"""


def blocks(language: str = "bash") -> list[str]:
    return [one.text for one in snippets() if one.document == _PAGE and one.language == language]


def block(name: str) -> str:
    (found,) = [text for text in blocks() if f"# {name}" in text or text.startswith(name)]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the scripts of the page, and commands that pretend before all others on PATH."""
    for name in _NAMES:
        (tmp_path / name.partition(" ")[0]).write_text(block(name))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command(tmp_path, "distlaunch", _PRETENDS)
    (tmp_path / "codes").touch()
    return tmp_path


def command(folder: Path, name: str, text: str) -> None:
    path = folder / ".venv" / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def play(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    found = {**environment(**env), "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=folder, env=found, capture_output=True, text=True, timeout=300)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_every_block_has_a_name() -> None:
    assert len(blocks()) == len(_NAMES)
    assert all(block(name) for name in _NAMES)


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    if (shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")) is None:
        pytest.skip("shellcheck is not installed")
    for number, text in enumerate(blocks()):
        (tmp_path / f"{number}.sh").write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    done = subprocess.run(
        [shellcheck, *sorted(map(str, tmp_path.glob("*.sh")))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shell", _SHELLS)
@pytest.mark.parametrize(
    ("codes", "expected"), [([4, 75, 137, 0], 0), ([75, 3], 3), ([2], 2), ([0], 0), ([1], 1)], ids=str
)
def test_the_loop_tries_again_only_what_may_succeed(folder: Path, shell: str, codes: list[int], expected: int) -> None:
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    done = play(folder, shell, "retry.sh", "mine.yaml", "--name", "a b", PAUSE_S="0")
    assert done.returncode == expected, done.stderr
    assert calls(folder) == ["train mine.yaml --name a b --resume"] * len(codes)


@pytest.mark.parametrize("shell", _SHELLS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_loop_with_its_job(folder: Path, shell: str, number: signal.Signals) -> None:
    (folder / "codes").write_text("stop\n")
    env = {**environment(PAUSE_S="600"), "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    loop = subprocess.Popen([shell, "retry.sh", "mine.yaml"], cwd=folder, env=env)
    try:
        wait_until(lambda: (folder / "up").exists())
        loop.send_signal(number)
        assert loop.wait(15) == 4
        assert calls(folder) == ["train mine.yaml --resume", "stopped"]
    finally:
        kill_all(loop.pid)


@pytest.mark.parametrize("shell", _SHELLS)
def test_a_signal_ends_the_pause(folder: Path, shell: str) -> None:
    (folder / "codes").write_text("75\n")
    command(folder, "sleep", "#!/bin/sh\necho sleep >> calls\nexec /bin/sleep 600\n")
    env = {**environment(), "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    loop = subprocess.Popen([shell, "retry.sh", "mine.yaml"], cwd=folder, env=env)
    try:
        wait_until(lambda: calls(folder)[-1:] == ["sleep"])
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(15) == 4
    finally:
        kill_all(loop.pid)


@pytest.mark.parametrize(
    ("code", "number", "queued"),
    [
        ("0", None, False), ("3", None, False), ("75", None, True), ("4", None, False),
        ("stop", signal.SIGUSR1, True), ("stop", signal.SIGTERM, False),
    ],
)  # fmt: skip
def test_an_array_is_queued_again(folder: Path, code: str, number: signal.Signals | None, queued: bool) -> None:
    (folder / "codes").write_text(f"{code}\n")
    command(folder, "scontrol", '#!/bin/sh\necho "$*" > requeued\n')
    env = environment(SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="70")
    env["PATH"] = f"{folder}/.venv/bin:{os.environ['PATH']}"
    job = subprocess.Popen(["bash", "array.sh"], cwd=folder, env=env)
    try:
        if number is not None:
            wait_until(lambda: (folder / "up").exists())
            job.send_signal(number)
        assert job.wait(15) == (4 if code == "stop" else int(code))
    finally:
        kill_all(job.pid)
    words = "train mine.yaml --resume --name rate-0.03 --set compile.optimizer.args.learning_rate=0.03"
    assert calls(folder)[0] == words
    assert (folder / "requeued").exists() == queued
    if queued:
        assert (folder / "requeued").read_text() == "requeue 70_1\n"


@pytest.mark.parametrize(("codes", "expected"), [((0,) * 6, 0), ((3,) * 6 + (75,), 75), ((2,) * 6 + (0,), 2)], ids=str)
def test_a_sweep(folder: Path, codes: tuple[int, ...], expected: int) -> None:
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    done = play(folder, "sh", "sweep.sh")
    assert done.returncode == expected
    made = calls(folder)
    assert {call.partition("--name ")[2] for call in made[:6]} == {
        f"rate-{rate}-seed-{seed} --set compile.optimizer.args.learning_rate={rate} --set seed={seed}"
        for rate in ("0.1", "0.03", "0.01")
        for seed in (0, 1)
    }
    assert made[6:] == ([] if sum(codes) == 0 else ["wait --quiet runs/rate-*"])


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(("name", "code"), [("mine-2", 0), ("a b", 3), ("", 2)])
def test_where_a_run_is(folder: Path, name: str, code: int) -> None:
    run = f"/x/runs/{name}" if name else ""
    first, last = {"event": "CommandStarted", "run": run}, {"reason": f"{name}: no" if code else ""}
    (folder / "events").write_text(f"{json.dumps(first)}\n{{}}\n{json.dumps(last)}\n")
    command(folder, "distlaunch", f'#!/bin/sh\necho "$*" >> calls\ncat events\nexit {code}\n')
    assert play(folder, "sh", "note.sh", "mine.yaml", "--name", "a b").returncode == code
    assert calls(folder) == ["train mine.yaml --name a b --json"]
    assert (folder / "results.txt").read_text() == f"{code} {run or 'no run'} {last['reason']}\n"


def test_the_scripts_of_cron(folder: Path) -> None:
    (folder / "codes").write_text("0\n3\n75\n2\n")
    for name, code in (("nightly.sh", 0), ("nightly.sh", 3), ("keep_going.sh", 75), ("keep_going.sh", 2)):
        done = subprocess.run(["/bin/sh", str(folder / name)], cwd="/", env={"PATH": "/usr/bin:/bin"}, timeout=30)
        assert done.returncode == code
    nightly, keeps = calls(folder)[::2]
    assert nightly.startswith("train mine.yaml --resume --quiet --name nightly-2")
    assert keeps == "train mine.yaml --resume --quiet"


def steps_of_ci() -> list[dict]:
    (text,) = blocks("yaml")
    return yaml.safe_load(text)["jobs"]["train"]["steps"]


def test_the_ci_job_keeps_what_it_made(folder: Path) -> None:
    (text,) = blocks("yaml")
    assert list(yaml.safe_load(text)) == ["name", True, "jobs"]  # `on` is true in YAML 1.1, as GitHub knows
    steps = steps_of_ci()
    assert steps[-1]["if"] == "always()"
    assert steps[-1]["with"]["path"].split() == ["runs/ci", "reports"]
    ran = [step["run"] for step in steps if "run" in step]
    assert [line.split()[0] for line in ran] == ["pip", "./get_data.sh", *["distlaunch"] * 4]


# for real


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder in which the scripts start a job of four steps."""
    (folder / ".venv" / "bin" / "distlaunch").unlink()
    (folder / ".venv" / "bin" / "distlaunch").symlink_to(Path(sys.executable).with_name("distlaunch"))
    module = MODULE.replace(
        "return x, x.sum(1, keepdims=True)",
        "y = x.sum(1, keepdims=True)\n    return {'train': (x, y), 'validation': (x, y)}",
    )
    config = write_job(folder, module, compile={"optimizer": "sgd", "loss": "mse"})
    config.rename(folder / "mine.yaml")
    return folder


def codes_of(project: Path, names: str) -> dict[str, int]:
    return {path.name: final_code(RunDir(path)) for path in (project / "runs").glob(names)}


@pytest.mark.slow
def test_a_sweep_for_real(project: Path) -> None:
    for _ in range(2):
        done = play(project, "sh", "sweep.sh")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert list(codes_of(project, "rate-*").values()) == [0] * 6
    assert all(RunDir(path).attempts() == [0] for path in (project / "runs").iterdir())
    best = play(project, "bash", "distlaunch")
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    assert best.returncode == 0, best.stderr
    assert Path(best.stdout.strip()).name.startswith("rate-0.1-")


@pytest.mark.slow
def test_background_runs_for_real(project: Path) -> None:
    done = play(project, "sh", "seeds.sh")
    assert done.returncode == 0, done.stderr
    assert codes_of(project, "seed-*") == {"seed-0": 0, "seed-1": 0, "seed-2": 0}
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    # as the block begins, with a run that is there already
    again = "distlaunch train mine.yaml --resume --detach --name seed-0"
    assert play(project, "sh", "-c", again).stdout == "runs/seed-0\n"
    done = play(project, "bash", "run=$")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"loss"}, done.stdout
    wait_until(lambda: not processes_of(project))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_where_a_run_is_for_real(project: Path) -> None:
    for words, code in (((), 0), ((), 0), (("--set", "seed=x"), 2)):
        assert play(project, "sh", "note.sh", "mine.yaml", *words).returncode == code
    first, second, third = (project / "results.txt").read_text().splitlines()
    assert (first, second) == (f"0 {project}/runs/mine ", f"0 {project}/runs/mine-2 ")
    assert third.startswith("2 no run --set seed=x: seed: got 'x'")


@pytest.mark.slow
def test_cron_for_real(project: Path) -> None:
    for name in ("nightly.sh", "keep_going.sh", "keep_going.sh"):
        env = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["/bin/sh", str(project / name)], cwd="/", env=env, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert RunDir(project / "runs" / "mine").attempts() == [0]
    assert list(codes_of(project, "nightly-*").values()) == [0]


@pytest.mark.slow
def test_the_ci_job_for_real(project: Path) -> None:
    """The artifact is unpacked elsewhere, without hidden files, as GitHub's action leaves them out."""
    read = (
        (project / "mine.py")
        .read_text()
        .replace("x = (np.arange(128", "x = np.load('data/x.npy')\n    assert len(x)\n    x = (np.arange(128")
    )
    (project / "mine.py").write_text(read)
    (project / "configs").mkdir()
    config = yaml.safe_load((project / "mine.yaml").read_text())
    for section in ("model", "data"):
        config[section]["function"] = f"../{config[section]['function']}"
    (project / "configs" / "mine.yaml").write_text(yaml.safe_dump(config))
    command(project, "pip", "#!/bin/sh\n")
    get_data = project / "get_data.sh"
    get_data.write_text(
        f"#!/bin/sh\nmkdir -p data && {sys.executable} -c \"import numpy; numpy.save('data/x.npy', [1])\"\n"
    )
    get_data.chmod(0o755)
    for step in steps_of_ci():
        if "run" in step:
            done = play(project, "bash", "-eo", "pipefail", "-c", step["run"], GITHUB_ACTIONS="true", CI="true")
            assert done.returncode == 0, done.stdout + done.stderr
    for name in ("validate", "smoke"):
        (suite,) = ElementTree.parse(project / "reports" / f"{name}.xml").getroot()
        assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    for path in steps_of_ci()[-1]["with"]["path"].split():
        assert (project / path).exists()
    elsewhere = project.with_name(f"{project.name}-moved")
    shutil.copytree(project, elsewhere, ignore=lambda _, names: [name for name in names if name[0] == "."])
    shutil.rmtree(project)
    for words in (
        ("evaluate", "runs/ci"),
        ("train", "runs/ci", "--resume", "--set", "train.epochs=3"),
        ("report", "runs/ci"),
    ):
        done = play(elsewhere, str(Path(sys.executable).with_name("distlaunch")), *words)
        assert done.returncode == 0, done.stdout + done.stderr
