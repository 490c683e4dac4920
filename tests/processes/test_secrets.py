"""Secrets of real jobs: none in a run, its checkpoints, records and exports, in what is printed, and on hosts."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from real import at_step, finish, run, start, wait_for

from distlaunch.base.run_dir import RunDir

SECRETS = {
    "WANDB_API_KEY": "wk-a1/b2+c3d4e5f6",
    "AWS_SECRET_ACCESS_KEY": "/Abcdefgh/ijkl+mn12345678",
    "HF_TOKEN": "hf_q7Xk82Zp41",
    "DB_PASSWORD": 'p"ss\\word 12é',
    "PGPASS": "pg-qwertyuiop99",
    "SESSION_COOKIE": "sid=9f8e7d6c",
    "SENTRY_DSN": "https://1a2b3c4d5e@sentry.example/7",
    "SLACK_WEBHOOK": "https://hooks.example/T0/B1/x9y8z7",
    "AZURE_CONNECTION_STRING": "AccountKey=Zm9vYmFy+/12==",
    "BASIC_AUTH": "Basic.dXNlcjpwYXNz1",
    "SIGNING_KEY": "0123-4567-89ab-cdef",
    "CLIENT_SECRET": "cs_live_4242424242",
}
IN_URL = "s3cr3t-pass-77"
BY_KEY = "key-of-mine-31337"
LITERAL = "sk-live-99887766"

MINE = (Path(__file__).parent / "user_code" / "secrets.py").read_text()
CONFIG = f"""
model: {{function: "mine.py:model", args: {{token: "${{HF_TOKEN}}", api_key: "${{MINE}}", password: {LITERAL},
                                            url: "${{TRACKER}}"}}}}
data: {{function: "mine.py:data", global_batch: 4}}
compile: {{optimizer: sgd, loss: mse}}
train: {{epochs: 1}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRACKER", f"https://me:{IN_URL}@tracker.example/x")
    monkeypatch.setenv("MINE", BY_KEY)
    (tmp_path / "mine.py").write_text(MINE.replace("NAMES = []", f"NAMES = {list(SECRETS)}"))
    (tmp_path / "job.yaml").write_text(CONFIG)
    return tmp_path


def found_in(data: bytes) -> Iterator[str]:
    for value in (*SECRETS.values(), IN_URL, BY_KEY, LITERAL):
        plain = value.encode()
        # in base64, as far as what comes before does not decide
        forms = [plain, quote(value).encode(), quote(value, safe="").encode(), json.dumps(value)[1:-1].encode()]
        forms += [base64.b64encode(plain)[: len(plain) * 8 // 6], base64.b64encode(b"user:" + plain)[7:-4]]
        yield from (f"{value}: {form!r}" for form in forms if form in data)


def assert_clean(project: Path, *, unfinished: bool) -> None:
    for path in project.rglob("*"):
        if path.is_file() and path.parent != project:
            found = set(found_in(path.read_bytes()))
            if path.name == "config.yaml":
                found = {each for each in found if not each.startswith(LITERAL)}
            assert not found or (unfinished and path.name == ".secrets"), path


@pytest.mark.slow  # `test_commands.py` has the life of the file with a worker that only pretends
def test_nothing_but_the_file_of_an_unfinished_run_has_a_secret(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, printed = RunDir(project / "runs" / "job"), ""

    def shell(*words: str) -> int:
        nonlocal printed
        code, out, err = run(*words, cwd=project)
        printed += out + err
        assert not set(found_in((out + err).encode())), words
        return code

    started = start("train", "job.yaml", "--set", "train.epochs=100000", "--set", f"model.args.session_key={LITERAL}X1",
                    "--set", "checkpoint.every_steps=20", cwd=project)  # fmt: skip
    wait_for(job, at_step(40))
    started.send_signal(signal.SIGTERM)
    code, out, err = finish(started)
    assert code == 4, out + err
    assert not set(found_in((out + err).encode()))
    assert_clean(project, unfinished=True)
    # the run has kept what it needs, as a requeue in another shell does
    for name in ("HF_TOKEN", "MINE", "TRACKER"):
        monkeypatch.delenv(name)
    assert job.secrets().keys() == {"HF_TOKEN", "MINE", "TRACKER"}
    assert shell("train", "runs/job", "--resume", "--set", "train.epochs=1", "--set", "export=[keras]") == 0
    assert job.secrets() == {}
    assert shell("evaluate", "runs/job") == 2
    assert "HF_TOKEN is not set" in printed
    assert shell("predict", "runs/job", "--data", "mine.py:printing") == 0
    assert (
        shell("predict", str(job.exported("keras").relative_to(project)), "--data", "mine.py:printing", "--output", "-")
        == 0
    )
    assert shell("predict", "runs/job", "--data", "mine.py:failing") == 2
    assert shell("predict", "runs/job", "--data", "mine.py:failing", "--json") == 2
    assert shell("predict", "runs/job", "--data", "mine.py:dying") == 3
    for words in (("logs", "runs/job"), ("report", "runs/job"), ("report", "runs/job", "--html"), ("runs", "--json")):
        shell(*words)
    assert shell("train", "job.yaml", "--name", "other", "--set", "data.args.fail=true") == 2
    assert_clean(project, unfinished=False)
    assert printed.count("***") > 100
