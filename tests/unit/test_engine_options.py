"""Where a script runs: options of a command that has no config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.read.engine_options import load_engine


def test_hosts_make_it_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = load_engine("a, me@b:22 slots=2", None, ["engine.sync=code", "engine.env=[A, B]"], {})
    assert (engine.kind, engine.hosts, engine.sync, engine.env) == ("ssh", ["a", "me@b:22 slots=2"], "code", ["A", "B"])
    monkeypatch.chdir(tmp_path)
    engine = load_engine(None, "hosts.txt", [], {})
    assert (engine.kind, engine.hostfile) == ("ssh", str(tmp_path / "hosts.txt"))


@pytest.mark.parametrize(("overrides", "kind"), [([], "auto"), (["engine.kind=local"], "local")])
def test_without_hosts_it_is_what_is_written(overrides: list[str], kind: str) -> None:
    # TF_CONFIG is of another cluster, and need not be readable
    assert load_engine(None, None, overrides, {"TF_CONFIG": "{"}).kind == kind


@pytest.mark.parametrize(
    ("hosts", "hostfile", "overrides", "told"),
    [
        ("a,,b", None, [], "--hosts: got an empty text; expected HOST"),
        ("a b", None, [], "--hosts: got 'b' after a; if that is another host, write it as a separate entry; expected"),
        ("a", "f", [], "--hosts and --hostfile: engine.hostfile: got both 'hosts' and 'hostfile'"),
        ("a", None, ["engine.intrface=x"], "--set engine.intrface=x: engine.intrface: unknown key; did you mean"),
        ("a", None, ["train.epochs=3"], "--set train.epochs=3: train.epochs: a script has no config"),
        ("a", None, ["engine=3"], "--set engine=3: engine: a script has no config"),
        ("a", None, ["engine"], "--set: got 'engine', without '='"),
        (None, None, ["engine.kind=ssh"], "engine: `kind: ssh` without hosts"),
    ],
)
def test_what_is_wrong_names_its_option(
    hosts: str | None, hostfile: str | None, overrides: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_engine(hosts, hostfile, overrides, {})
    assert told in str(raised.value)
