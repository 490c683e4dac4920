"""Tests of the state that a host reports, and of the warnings about it."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent.host_state import host_state
from distlaunch.config.references.sites import data_paths
from distlaunch.config.run import RunConfig
from distlaunch.engines.host_warnings import host_warnings, warnings_between


def test_a_host_tells_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "part-1.csv").touch()
    wanted = ["./images", "./part-*.csv", "./part-?.txt", str(tmp_path / "nowhere/x")]
    state = host_state(wanted)
    assert state["missing"] == wanted[2:]
    assert all(value > 0 for value in [*state["free_bytes"].values(), state["free_memory_bytes"]])
    assert str(tmp_path) in state["free_bytes"]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert state["open_files"] == (None if soft == resource.RLIM_INFINITY else soft)
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("named", ["temporary", "nowhere", ""])
def test_its_temporary_folder_is_that_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", named and str(tmp_path / named))
    monkeypatch.setattr(tempfile, "tempdir", None)  # found anew
    assert list(host_state([])["free_bytes"]) == list(dict.fromkeys([os.getcwd(), tempfile.gettempdir()]))


def _state(**changes: Any) -> dict[str, Any]:
    plenty = {"free_bytes": {"/work": 10**12}, "free_memory_bytes": 10**10, "open_files": None, "processes": 4096}
    return {**plenty, "missing": [], **changes}


@pytest.mark.parametrize(
    ("state", "clock_s", "told"),
    [
        (_state(), 4.9, []),
        (_state(missing=["/d/x"]), 0, ["b has no /d/x, which this machine has (data.args.path)"]),
        (_state(free_bytes={"/": 10**12, "/tmp": 5 * 10**8}), 0, ["b has 500 MB left on the disk of /tmp"]),
        (_state(free_memory_bytes=10**8), 0, ["b has 100 MB of memory left"]),
        (_state(open_files=256), 0, ["a process on b may open 256 files; raise it"]),
        (_state(processes=100), 0, ["b allows you 100 processes and threads; raise it"]),
        (_state(), -60, ["the clock of b is 60 s behind this machine's"]),
        (_state(), 7, ["the clock of b is 7 s ahead of this machine's"]),
    ],
)
def test_what_is_worth_a_warning(state: dict[str, Any], clock_s: float, told: list[str]) -> None:
    warnings = list(host_warnings("b", state, {"data.args.path": "/d/x", "data.args.other": "/d/y"}, clock_s))
    assert len(warnings) == len(told)
    assert all(warning.startswith(text) for warning, text in zip(warnings, told, strict=True))


def test_drivers_that_differ_are_told() -> None:
    assert not [*warnings_between({"a": "550.1", "b": "550.1", "no gpu": ""}, {})]
    (told,) = warnings_between({"a": "550.1", "b": "535.2", "c": "550.1"}, {})
    assert told == "hosts have different GPU drivers: 550.1 on a, c; 535.2 on b"


def test_one_machine_under_two_names_is_told() -> None:
    """Containers of one machine differ in their network."""
    assert not [*warnings_between({}, {"a": "boot net:1 a", "b": "boot net:2 b", "c": "", "d": ""})]
    (told,) = warnings_between({}, {"a": "boot net:1 x", "b": "boot net:2 b", "10.0.0.7": "boot net:1 x"})
    assert told == "a, 10.0.0.7 are the same machine, so their tasks share its cores; list it once, with slots=N"


def test_paths_of_data_are_texts_with_a_slash() -> None:
    args = {"path": "/data/x", "url": "https://a/b", "word": "train", "more": [{"glob": "parts/*.csv"}, 3, None]}
    config = RunConfig.model_validate(
        {"name": "a", "model": {"function": "m:n"}, "data": {"function": "m:d", "global_batch": 4, "args": args}}
    )
    assert data_paths(config) == {"data.args.path": "/data/x", "data.args.more[0].glob": "parts/*.csv"}
