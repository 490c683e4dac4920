"""Several configs at a time, JUnit reports, and annotations of GitHub Actions."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.cli import train
from distlaunch.cli.main import cli
from distlaunch.jobs.job import JobRequest
from distlaunch.ui.ci import Case, annotate, write_junit
from tests.unit.config_files import BASE, write_models


def test_validate_reports_each_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    write_models(tmp_path)
    (tmp_path / "good.yaml").write_text(BASE)
    (tmp_path / "bad.yaml").write_text(BASE + "seed: -1\nnope: 2\n")
    number = BASE.count("\n") + 1
    result = CliRunner().invoke(cli, ["validate", "good.yaml", "bad.yaml", "--junit-xml", "out.xml"])
    assert result.exit_code == 2
    assert f"::error file=bad.yaml,line={number}::seed: got -1" in result.stderr
    assert f"::error file=bad.yaml,line={number + 1}::nope: unknown key" in result.stderr
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("name") for case in suite] == ["good.yaml", "bad.yaml"]
    assert [len(case) for case in suite] == [0, 1]
    assert (suite[1][0].text or "").count("\n") == 1


def test_annotations_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [
        Problem(("seed",), "100 %\nof", f"{Path.cwd()}/a,b:c.yaml:12"),
        Problem(("seed",), "got x", "--set seed=x:1"),
        Problem((), "no such file", "job.yaml"),
    ]
    annotate(problems, {})
    assert capsys.readouterr().err == ""
    annotate(problems, {"GITHUB_ACTIONS": "true"})
    assert capsys.readouterr().err.splitlines() == [
        "::error file=a%2Cb%3Ac.yaml,line=12::seed: 100 %25%0Aof",
        "::error::seed: got x",
        "::error file=job.yaml::no such file",
    ]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--junit-xml"):
        write_junit(str(tmp_path / "file" / "out.xml"), "validate", [Case("a.yaml", 1.0)])


def test_the_folder_of_a_report_is_made(tmp_path: Path) -> None:
    write_junit(str(tmp_path / "new" / "reports" / "out.xml"), "validate", [Case("a.yaml", 1.0)])
    assert (tmp_path / "new" / "reports" / "out.xml").is_file()


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 3), 3), ((3, 2, 0), 2), ((0, 4, 3), 4), ((2, 4), 2)])
def test_several_smoke_runs(
    codes: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(codes)

    def smoke(request: JobRequest, *, as_json: bool, quiet: bool) -> tuple[int, str]:
        code = left.pop(0)
        if code == 2:
            raise ConfigError(Problem(("seed",), "got x\x1b[31m", request.target))
        return code, "failed" if code else ""

    monkeypatch.setattr(train, "_smoke", smoke)
    names = [f"{number}.yaml" for number in range(len(codes))]
    report = tmp_path / "out.xml"
    result = CliRunner().invoke(cli, ["train", "--smoke", *names, "--junit-xml", str(report)], standalone_mode=False)
    assert result.return_value == expected
    # a stop is meant for all
    tried = codes.index(4) + 1 if 4 in codes else len(codes)
    assert len(ElementTree.parse(report).getroot()[0]) == tried
    assert result.output.count(".yaml: ok") == codes[:tried].count(0)
    assert "\x1b" not in report.read_text()


@pytest.mark.parametrize(
    "words", [("a.yaml", "b.yaml"), ("a.yaml", "--junit-xml", "x"), ("--smoke", "a.yaml", "b.yaml", "--name", "x")]
)
def test_what_only_smoke_runs_take(words: tuple[str, ...]) -> None:
    assert isinstance(CliRunner().invoke(cli, ["train", *words]).exception, UsageError)
