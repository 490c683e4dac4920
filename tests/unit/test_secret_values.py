"""Secrets of the environment, which must not stand in logs, events and error.json."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.output import Pump
from distlaunch.base.event_files import EventWriter, read_events
from distlaunch.base.events import Notice
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_error import write_exception
from distlaunch.base.secret_values import SecretMask

SECRET = 'ab"c\\d é-12345'


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *[
            (name, True)
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY", "token")
        ],
        *[(name, True) for name in ("PGPASSWORD", "db_password", "GCP_CREDENTIALS", "X_APIKEY", "SSH_PASSPHRASE")],
        *[
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "SECRETARY", "TF_MONKEY", "KEY_TYPE")
        ],
    ],
)
def test_names_that_look_secret(name: str, is_secret: bool) -> None:
    assert (SecretMask({name: SECRET}).whole(f"a {SECRET} b") == "a *** b") == is_secret


@pytest.mark.parametrize("value", ["", "true", "1234567", "/run/secrets/token", "./token.txt", "~/.token"])
def test_what_is_no_secret_stays(value: str) -> None:
    assert SecretMask({"MY_TOKEN": value}).whole(f"a {value} b") == f"a {value} b"


_PARTS = st.lists(st.sampled_from([SECRET, SECRET[:9], "abcdefgh", "abcdefghij", "abcd", "a", " x\n", "\udcff"]))


@given(parts=_PARTS, cuts=st.lists(st.integers(0, 200)))
def test_pieces_give_what_the_whole_gives(parts: list[str], cuts: list[int]) -> None:
    """However a text is cut, no secret is in it, and the rest is."""
    environ = {"A_TOKEN": SECRET, "B_TOKEN": "abcdefgh", "C_TOKEN": "abcdefghij", "OTHER": "x" * 9}
    data = "".join(parts).encode(errors="surrogateescape")
    mask, shown, before = SecretMask(environ), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        shown += mask.feed(data[before:cut])
        before = max(before, cut)
    shown += mask.flush()
    assert SECRET.encode() not in shown
    assert b"abcdefgh" not in shown
    # what is no secret is all there
    kept = data.replace(SECRET.encode(), b"").replace(b"abcdefghij", b"").replace(b"abcdefgh", b"")
    assert shown.count(b" x\n") == kept.count(b" x\n")


def test_logs_have_none(tmp_path: Path) -> None:
    shown: list[str] = []
    pump = Pump(lambda task, line: shown.append(line), lambda: 0.0)
    reading, writing = os.pipe()
    log = tmp_path / "stdout.log"
    pump.add("worker:0", io.FileIO(reading), log, SecretMask({"MY_TOKEN": "abcdefgh"}))  # type: ignore[arg-type]
    for piece in (b"key abc", b"defgh.\n", b"end abcd"):
        os.write(writing, piece)
        pump.turn(0.0)
    os.close(writing)
    pump.finish("worker:0")
    pump.close()
    assert log.read_bytes() == b"key ***.\nend abcd"
    assert shown == ["key ***.", "end abcd"]


def test_events_and_errors_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, task="worker:0")
    writer.write(Notice(level="info", message=f"opened with {SECRET}"))
    writer.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, Notice)
    assert event.message == "opened with ***"
    files = RunDir(tmp_path).task(0, "worker:0")
    try:
        raise ValueError(f"refused: {SECRET}")
    except ValueError as error:
        write_exception(files, error)
    told = json.loads(files.error_json.read_text())
    assert told["message"] == "refused: ***"
    assert SECRET not in told["traceback"]
    assert "12345" not in files.error_json.read_text().replace("***", "")


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDir.claim(tmp_path / "runs", "mine")
    assert run.path.stat().st_mode & 0o777 == 0o700
