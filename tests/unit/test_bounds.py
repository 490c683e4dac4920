"""Inputs that are too large or too deep are refused at once, in a few words and with bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base import event_files
from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.event_files import EventReader, EventWriter, read_events, read_events_of
from distlaunch.base.events import Notice, RunEnded, StepsDone, VariablesPlaced
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hosts import parse_host
from distlaunch.config.read.load import load_config, load_mapping
from distlaunch.plan.open_ports import describe_ports
from distlaunch.serving.exported_model import Spec
from distlaunch.serving.input_files import read_jsonl
from tests.unit.config_files import BASE, write_models


@pytest.mark.parametrize("where", ["nested", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "  "))])
def test_thousands_of_unknown_keys(tmp_path: Path, where: str) -> None:
    write_models(tmp_path)
    path = tmp_path / "job.yaml"
    keys = [f"unknown_{number}: 1" for number in range(20_000)]
    if where == "nested":
        path.write_text(BASE + "train: {" + ", ".join(keys) + "}\n")
    else:
        path.write_text(BASE + "".join(f"{where}{key}\n" for key in keys))
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    # 0.5 s; it took more than a minute
    assert time.monotonic() - began < 20
    assert len(str(raised.value)) < 100_000
    assert any("20,000 values are wrong or unknown" in problem.message for problem in raised.value.problems)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "x" * 400_000},
        {"y" * 400_000: 3},
        {"train": {"y" * 400_000: 3}},
        {"train": {"loop": "z" * 400_000}},
        {"train": {"epochs": "z" * 400_000}},
        {"strategy": {"kind": "z" * 400_000}},
    ],
)
def test_long_names_are_shown_in_part(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_mapping({"model": {"function": "m:f"}, "data": {"function": "m:f", "global_batch": 4}, **config})
    assert len(str(raised.value)) < 10_000


@pytest.mark.parametrize("override", ["x" * 400_000 + "=3", "train.epochs=" + "x" * 400_000, "x" * 400_000])
def test_long_overrides_are_shown_in_part(tmp_path: Path, override: str) -> None:
    write_models(tmp_path)
    (tmp_path / "job.yaml").write_text(BASE)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "job.yaml", (override,))
    assert len(str(raised.value)) < 10_000


def test_long_names_of_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        RunDir.claim(tmp_path, "x" * 400_000)
    assert len(str(raised.value)) < 300
    assert RunDir.claim(tmp_path, "x" * 200).path.is_dir()
    with pytest.raises(UsageError):
        RunDir.claim(tmp_path, "x" * 201)


@pytest.mark.parametrize("depth", [50, 500, 5_000, 100_000])
def test_deep_lines_of_input(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[1]\n" + "[" * depth + "]" * depth + "\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl"):
        read_jsonl(path, [Spec("x", "float32", (None, 1))])
    path.write_text("[1]\n[2]\n")
    np.testing.assert_array_equal(read_jsonl(path, [Spec("x", "float32", (None, 1))])["x"], [[1], [2]])


def _line(number: int) -> str:
    return StepsDone(epoch=0, step=number, step_in_epoch=1, steps=1, seconds=1.0, logs={}).to_json()


def test_large_files_of_events_are_not_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    end = RunEnded(status="done", step=4, epochs_done=1, seconds=1.0, logs={}).to_json()
    with path.open("w") as file:
        for number in range(5000):
            file.write(_line(number)[:-1] + ',"more":"' + "x" * 5000 + '"}\n')
        file.write(end + "\n")
    size = path.stat().st_size
    assert size > 20_000_000
    tracemalloc.start()
    (found,) = read_events_of(path, RunEnded)
    # one at a time
    steps = [event.step for event in EventReader(path).read() if isinstance(event, StepsDone) and event.step % 100 == 0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, RunEnded)
    assert steps == [*range(0, 5000, 100)]
    assert peak < 10_000_000


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MAX_EVENT_BYTES", 5000)
    monkeypatch.setattr(event_files, "READ_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    path.write_text(f"{_line(1)}\n{'x' * 100_000}\n{_line(2)}\n")
    reader = EventReader(path)
    assert [event.step for event in reader.read() if isinstance(event, StepsDone)] == [1, 2]
    assert list(reader.read()) == []
    # half a line is waited for
    with path.open("a") as file:
        file.write(_line(3)[:20])
        file.flush()
        assert list(reader.read()) == []
        file.write(_line(3)[20:] + "\n" + "y" * 200_000)
        file.flush()
        assert [event.step for event in reader.read() if isinstance(event, StepsDone)] == [3]
        file.write("\n" + _line(4) + "\n")
        file.flush()
        assert [event.step for event in reader.read() if isinstance(event, StepsDone)] == [4]
    assert [event.step for event in read_events_of(path, StepsDone) if isinstance(event, StepsDone)] == [1, 2, 3, 4]


def test_what_is_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MAX_EVENT_BYTES", 5000)
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, task="worker:0")
    writer.write(VariablesPlaced(variables=[{"name": "x" * 10_000}]))
    writer.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, Notice)
    assert event.message.startswith("an event of the kind VariablesPlaced is not recorded: it has 10,")


@pytest.mark.parametrize(
    "user", ["-oProxyCommand=x", "a;b", "$(x)", "a`b`", "a|b", "a'b", 'a"b', "a b", "é", "", "a" * 80]
)
def test_users_of_hosts(user: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST|after"):
        parse_host(f"{user}@host")
    assert parse_host("me.you-2@host").user == "me.you-2"


def test_ports_and_who_reaches_them() -> None:
    addresses = ["127.0.0.1:5001", "127.0.0.1:5002", "[::1]:5003", "127.0.0.1:6000"]
    assert describe_ports([], [], isolated=False) == "none: no task connects to another"
    assert describe_ports(addresses, [], isolated=True).startswith(
        "5001-5003, 6000, reachable only by tasks of this job"
    )
    assert describe_ports(addresses, [], isolated=False).startswith(
        "5001-5003, 6000, open to users of this machine and"
    )
    found = describe_ports(["a:(picked at start)"] * 2, ["a", "b"], isolated=False)
    assert found.startswith("picked at start on a, b, open to users of these hosts and to all hosts that can reach")
