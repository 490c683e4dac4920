"""Files of a run that somebody else has made: pipes, links, deep or wrong JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import EventReader, parse_events, read_events, read_events_of, read_tail
from distlaunch.base.events import EpochEnded, Event, StepsDone
from distlaunch.base.regular_files import NotRegularError, read_json, read_regular
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_lock import lock_run, owner_of

GOOD = EpochEnded(epoch=1, step=8, seconds=0.5, logs={"loss": 0.25})


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(NotRegularError):
            read_regular(path)
        assert read_events(path) == read_tail(path) == read_events_of(path, StepsDone) == []
        assert list(EventReader(path).read()) == []
        assert owner_of(path) is None
    for name in ("submission.json", "environment.json", "batch_exit"):
        (tmp_path / "run").mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "run" / name)
    run = RunDir(tmp_path / "run")
    assert run.started_from() == (None, None)
    assert run.job_exit_code() is None


def test_a_file_may_have_a_size(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert read_regular(tmp_path / "large", 11) == b"x" * 11
    with pytest.raises(OSError, match="has more than 10 bytes"):
        read_regular(tmp_path / "large", 10)


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": {"a": 1}},
        {"step": "8"},
        {"step": 1.5},
        {"logs": {"loss": ["x"]}},
        {"logs": [1]},
        {"seconds": None},
        {"task": 3},
        {"event": "Nothing"},
        {"event": ["EpochEnded"]},
    ],
)
def test_events_with_values_of_other_types_are_passed_over(changes: dict[str, Any]) -> None:
    line = json.dumps({**json.loads(GOOD.to_json()), **changes}).encode()
    assert list(parse_events(b"\n".join([line, b"[" * 100_000, GOOD.to_json().encode()]))) == [GOOD]


def test_each_kind_of_event_comes_back() -> None:
    """Also with a later version's fields, and with whole numbers where numbers are."""
    line = json.dumps({**json.loads(GOOD.to_json()), "seconds": 2, "later": {"a": 1}, "logs": {"loss": "nan", "n": 3}})
    [found] = parse_events(line.encode())
    assert isinstance(found, EpochEnded)
    assert (found.seconds, found.logs["n"]) == (2, 3)
    assert set(Event.kinds)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_a_lock_that_leads_elsewhere_is_not_written(tmp_path: Path, kind: str) -> None:
    lock, other = tmp_path / ".lock", tmp_path / "precious"
    other.write_text("precious")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(other if kind == "link" else tmp_path / "new")
    with pytest.raises(UsageError, match="not a regular file; remove it"), lock_run(lock):
        pytest.fail("it was taken")
    assert owner_of(lock) is None
    assert other.read_text() == "precious"
    assert not (tmp_path / "new").exists()
