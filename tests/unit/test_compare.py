"""`distlaunch compare`, on runs that were written by the test."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.runs.settings import differing_keys, short_names
from distlaunch.ui.tables import fitting_columns, shortened
from tests.recorded_run import data_of
from tests.unit.written_runs import EPOCH_S, STARTED, write_run, write_script


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*words: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *words], catch_exceptions=False)


def told(*words: str) -> list[dict[str, Any]]:
    return json.loads(compare(*words, "--json").stdout)["runs"]


def names(*words: str) -> list[str]:
    return [Path(each["run"]).name for each in told(*words)]


def three() -> None:
    write_run("slow", {"compile.optimizer.args.learning_rate": 0.001}, [0.9, 0.8, 0.7], accuracy=[0.1, 0.2, 0.3])
    write_run("good", {"compile.optimizer.args.learning_rate": 0.01}, [0.5, 0.25, 0.375], accuracy=[0.5, 0.9, 0.8])
    write_run("wild", {"compile.optimizer.args.learning_rate": 1.0}, [0.6, 8.0, float("nan")], accuracy=[0.4, 0.1, 0.1])


def test_a_page_has_the_table_and_the_curves_of_all_runs(folder: Path) -> None:
    three()
    write_script("other")
    assert compare("--html", "all.html", "--sort", "val_loss").stdout == "all.html\n"
    data = data_of((folder / "all.html").read_text())
    assert [row[0] for row in data["rows"]] == ["runs/good", "runs/wild", "runs/slow", "runs/other"]
    assert "learning_rate" in data["heads"]
    assert data["best"][0] == "best val_loss: runs/good, 0.2500 in epoch 2"
    assert data["started"] == time.strftime("%Y-%m-%d", time.localtime(STARTED))
    assert ["model.args.units", "8"] in data["shared"]
    assert not any(key.endswith("learning_rate") for key, _ in data["shared"])
    wild = data["runs"][1]
    assert wild["curves"]["loss"]["validation"] == {"x": [10, 20, 30], "y": [0.6, 8.0, "nan"]}
    assert wild["epochs"][-1] == {"epoch": 3, "step": 30}
    assert data["runs"][3]["curves"] == {}
    assert compare("--html", "all.html", "--csv").exit_code == 2


def test_the_earliest_of_equally_good_runs_is_the_best_in_any_order() -> None:
    three()
    write_run("late", {}, [0.25], accuracy=[0.9])
    for order in ("val_loss", "val_accuracy", "run"):
        lines = compare("--sort", order).stdout.splitlines()
        expected = [
            "best val_loss: runs/good, 0.2500 in epoch 2, as in 1 later run",
            "best val_accuracy: runs/good, 0.9000 in epoch 2, as in 1 later run",
        ]
        assert lines[-2:] == (expected[::-1] if order == "val_accuracy" else expected)


def test_a_name_alone_is_the_same_setting_as_a_name_with_arguments() -> None:
    write_run("one", {"compile.optimizer": "sgd"}, [0.5])
    write_run("two", {"compile.optimizer": {"name": "adam", "args": {}}}, [0.4])
    assert [each["settings"] for each in told()] == [
        {"compile.optimizer.name": "sgd"}, {"compile.optimizer.name": "adam"},
    ]  # fmt: skip


def test_a_narrow_table_has_the_settings_that_distinguish_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, units in enumerate((8, 16, 32)):
        write_run(f"r{number}", {"model.args.width": 1 + number // 2, "model.args.units": units}, [0.5])
    monkeypatch.setenv("COLUMNS", "36")
    assert "units" in compare().stdout.splitlines()[0]
    assert "width" not in compare().stdout.splitlines()[0]


def test_the_table() -> None:
    three()
    lines = compare().stdout.splitlines()
    assert lines[0].split("   ")[:1] == ["run"]
    assert [word for word in lines[0].split("  ") if "loss" in word] == [" best val_loss", " last val_loss"]
    rows = {line.split()[0]: line.split() for line in lines[1:4]}
    assert rows["runs/good"][:5] == ["runs/good", "done", "0.01", "0.2500", "(2)"]
    assert rows["runs/wild"][2:] == ["1.0", "0.6000", "(1)", "0.4000", "(1)", "nan", "0.1000", "3/3", "1", "min", "00",
                                     "s", "320", "50%"]  # fmt: skip
    assert lines[5:] == [
        "best val_loss: runs/good, 0.2500 in epoch 2",
        "best val_accuracy: runs/good, 0.9000 in epoch 2",
    ]


def test_all_numbers_as_json_and_csv() -> None:
    three()
    good = told()[1]
    assert good["settings"] == {"compile.optimizer.args.learning_rate": 0.01}
    assert good["best"]["val_loss"] == {"value": 0.25, "epoch": 1, "step": 20}
    assert good["last"] == {"val_loss": 0.375, "val_accuracy": 0.8}
    assert (good["epoch"], good["step"], good["seconds"]) == (3, 30, 3 * EPOCH_S)
    assert good["goodput"]["share"] == pytest.approx(0.5)
    assert told()[2]["last"]["val_loss"] == "nan"
    _, _, row, _ = csv.reader(io.StringIO(compare("--csv").stdout))
    head = next(csv.reader(io.StringIO(compare("--csv").stdout)))
    found = dict(zip(head, row, strict=True))
    assert found["run"] == "runs/good"
    assert (found["started"], found["attempts"]) == (str(good["started"]), "1")
    assert found["compile.optimizer.args.learning_rate"] == "0.01"
    of_loss = ("best val_loss", "best val_loss epoch", "best val_loss step", "last val_loss")
    assert [found[name] for name in of_loss] == ["0.25", "2", "20", "0.375"]
    assert compare("--csv", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "slow good wild"),
        (("--reverse",), "wild good slow"),
        (("--sort", "val_loss"), "good wild slow"),
        (("--sort", "val_accuracy"), "good wild slow"),
        (("--sort", "val_accuracy", "--reverse"), "slow wild good"),
        (("--sort", "learning_rate"), "slow good wild"),
        (("--sort", "compile.optimizer.args.learning_rate", "--reverse"), "wild good slow"),
        (("--sort", "run"), "good slow wild"),
        (("--sort", "started", "--reverse"), "wild good slow"),
    ],
)
def test_sorting(words: tuple[str, ...], expected: str) -> None:
    three()
    assert " ".join(names(*words)) == expected


def test_runs_without_a_value_come_last() -> None:
    write_run("began", {}, [])
    three()
    assert names("--sort", "val_loss")[-1] == names("--sort", "val_loss", "--reverse")[-1] == "began"
    began = next(line for line in compare("--sort", "val_loss").stdout.splitlines() if "began" in line)
    assert began.split() == ["runs/began", "killed", "0.01", "0/3", "0.0", "s", "0%"]


def test_a_key_that_cannot_be_sorted_by() -> None:
    three()
    with pytest.raises(UsageError, match="got 'val_los'; did you mean 'val_loss'"):
        compare("--sort", "val_los")
    write_run("other", {"model.args.units": 3, "data.args.units": 4}, [0.5])
    with pytest.raises(UsageError, match=r"'units' is part of several keys: .*model.args.units"):
        compare("--sort", "units")


def test_which_runs() -> None:
    three()
    assert names("good", "runs/slow", "good") == ["slow", "good"]
    assert names("runs/*o*") == names("*o*") == ["slow", "good"]
    assert names("runs") == names()
    for words, message in [
        (["good", "nope"], "nope: there is no such run"),
        (["x-*"], r"x-\*: no run matches"),
        (["good"], "at least two runs, got only .*good"),
    ]:
        with pytest.raises(UsageError, match=message):
            compare(*words)


def test_only_runs_with_a_status_or_since_a_date() -> None:
    three()
    write_run("broken", {"compile.optimizer.args.learning_rate": 0.1}, [0.5, 0.4], status="failed")
    assert names("--status", "done") == ["slow", "good", "wild"]
    assert names("--status", "failed", "--status", "done", "--since", "2000-01-01") == names()
    assert names("*o*", "--status", "done") == ["slow", "good"]
    Path("runs/broken/config.yaml").write_text("{")
    assert "broken" in compare().stderr
    assert not compare("--status", "done").stderr
    left_out = r"got only \S+broken \(3 left out by --status or --since\)"
    with pytest.raises(UsageError, match=left_out):
        compare("--status", "failed")


def test_no_runs_at_all(folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder runs here"):
        compare()
    (folder / "runs").mkdir()
    with pytest.raises(UsageError, match="there is no run in this folder"):
        compare()


def test_damaged_runs_and_scripts(folder: Path) -> None:
    three()
    write_script("script")
    (folder / "runs/wild/config.yaml").write_text("model: {\n")
    (folder / "runs/slow/events.jsonl").write_bytes(b"\0garbage\xff\n" * 100)
    found = compare()
    assert [line.split()[0] for line in found.stdout.splitlines()[1:5]] == [
        "runs/script", "runs/good", "runs/wild", "runs/slow",
    ]  # fmt: skip
    wild, slow = sorted(found.stderr.splitlines(), reverse=True)
    assert wild.startswith("warning: runs/wild: config.yaml: line ")
    assert slow == "warning: runs/slow: events.jsonl: it has no event that can be read"


def test_runs_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three()
    locked = {str(folder / "runs/good")}
    monkeypatch.setattr(RunDir, "is_readable", lambda run: str(run.path) not in locked)
    found = compare()
    assert "runs/good" not in found.stdout
    assert found.stderr == "warning: permission denied, so left out: runs/good\n"
    with pytest.raises(UsageError, match="runs/good: permission denied"):
        compare("good", "slow")
    locked.add(str(folder / "runs"))
    with pytest.raises(UsageError, match=r"^runs: permission denied"):
        compare()
    with pytest.raises(UsageError, match=r"^runs: permission denied"):
        CliRunner().invoke(cli, ["runs"], catch_exceptions=False)


def test_one_run_with_values_is_noted() -> None:
    write_run("a", {}, [])
    write_run("b", {}, [0.5])
    assert (
        compare().stderr == "note: only one of these runs has completed an epoch, so there are no values to compare\n"
    )


def test_secrets_in_configs_are_masked() -> None:
    write_run("a", {"model.args.api_key": "sk-Zq81xW0pTtY", "data.args.url": "https://me:hunter22x@host/a"}, [0.5])
    write_run("b", {"model.args.api_key": "${API_KEY}", "data.args.url": "https://me:hunter22x@host/b"}, [0.5])
    for words in ((), ("--csv",), ("--json",)):
        text = compare(*words).stdout
        assert "Zq81" not in text
        assert "hunter22x" not in text
        assert "${API_KEY}" in text
    assert "Zq81" not in CliRunner().invoke(cli, ["runs"]).stdout + CliRunner().invoke(cli, ["runs", "--json"]).stdout


def test_differing_keys() -> None:
    settings = [{"a.args": {}, "b": 1, "c": [1]}, {"a.args.units": 3, "b": 1, "c": [1, 2]}, {}]
    assert differing_keys(settings) == ["c", "a.args.units"]
    assert differing_keys([{}, {"a": 1}]) == []
    kinds = [{"s.kind": "a", "s.x": 1}, {"s.kind": "b", "s.y": 1, "s.z": 1}, {"s.kind": "b", "s.y": 1, "s.z": 2}]
    assert differing_keys(kinds) == ["s.kind", "s.z"]
    kinds = [{"s.kind": "a"}, {"s.kind": "b", "s.layout": {}}, {"s.kind": "b", "s.layout": {}}]
    assert differing_keys(kinds) == ["s.kind"]
    keys = ["a.args.units", "b.args.units", "strategy.kind", "train.loss"]
    assert short_names(keys, ["loss"]) == {
        "a.args.units": "a.args.units", "b.args.units": "b.args.units", "strategy.kind": "strategy.kind",
        "train.loss": "train.loss",
    }  # fmt: skip
    assert short_names(["optimizer.args.rate"]) == {"optimizer.args.rate": "rate"}


@pytest.mark.parametrize("width", [1, 3, 9, 14, 20, 60])
def test_a_table_is_never_wider_than_the_terminal(width: int) -> None:
    head, rows = ("run", "first", "second"), [("runs/a-long-name", "1", "22"), ("runs/b", "333333", "4")]
    lines, left_out = fitting_columns(head, rows, width, [0, 2, 1], right={1, 2})
    assert all(len(line) <= width for line in lines)
    assert left_out == {60: []}.get(width, ["first", "second"])
    assert fitting_columns(head, rows, 27, [0, 2, 1])[1] == ["first"]
    assert [shortened("abcdefgh", at) for at in (8, 7, 5, 3, 2)] == ["abcdefgh", "ab...gh", "a...h", "...", ".."]


def test_a_default_learning_rate_is_shown_beside_others() -> None:
    told_rate = {"optimizer": "Adam, learning rate 0.001"}
    write_run("default", {"compile.optimizer": "adam"}, [0.5], **told_rate)
    write_run("same", {"compile.optimizer": {"name": "adam", "args": {"learning_rate": 0.001}}}, [0.5], **told_rate)
    write_run("unknown", {"compile.optimizer": "adam"}, [0.5])
    write_run("schedule", {"compile.optimizer.args.learning_rate": {"name": "CosineDecay"}}, [0.5], optimizer="SGD")
    rates = {Path(each["run"]).name: each["settings"].get("compile.optimizer.args.learning_rate") for each in told()}
    assert rates == {"default": 0.001, "same": 0.001, "unknown": None, "schedule": None}
    assert {"compile.optimizer.args.learning_rate"}.isdisjoint(
        json.loads(compare("default", "unknown", "--json").stdout)["keys"]
    )


def test_a_best_epoch_without_its_checkpoint() -> None:
    three()
    good = RunDir("runs/good")
    for step in (20, 30):
        (good.checkpoints / f"step-{step:08}").mkdir(parents=True)
    lines = [line for line in compare("--sort", "val_accuracy").stdout.splitlines() if line.startswith("best val_")]
    assert lines == ["best val_accuracy: runs/good, 0.9000 in epoch 2", "best val_loss: runs/good, 0.2500 in epoch 2"]
    (good.checkpoints / "step-00000020").rmdir()
    assert "runs/good, 0.2500 in epoch 2; its checkpoint is not kept (see checkpoint.best)" in compare().stdout
