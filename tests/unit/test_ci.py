"""Several configs at a time, JUnit reports, and annotations of GitHub Actions."""

from __future__ import annotations

import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from distlaunch.base.errors import ConfigError, ExitCode, Problem, StopRequested, UsageError
from distlaunch.cli import train
from distlaunch.cli.main import cli
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.jobs.choose_run import JobRequest
from distlaunch.jobs.smoke import Proof, SmokeResult
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.outcome import Outcome
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


def _proven(run: Path, proofs: tuple[Proof, ...], failure: Failure | None = None) -> SmokeResult:
    code = ExitCode.DONE if failure is None else ExitCode.FAILED
    plan = LaunchPlan(run, 0, "train", (), 0, 0)
    outcome = Outcome("failed" if failure else "done", code, failure)
    return SmokeResult(AttemptResult(plan, outcome, resumable=False), proofs)


def test_a_smoke_run_that_fails_names_the_line_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    trace = (f'  File "{tmp_path}/sub/model.py", line 41, in build', "    return Dense(-1)", "ValueError: units=-1")
    place = (f"{tmp_path}/sub/model.py", 41)
    failure = Failure("worker:0", "a", "ValueError: units=-1", trace, None, hint="use 1", place=place)
    results = {
        "a.yaml": _proven(tmp_path / "runs" / "a-smoke", (Proof("training ran", False),), failure),
        "b.yaml": _proven(tmp_path / "runs" / "b-smoke", (Proof("training ran", True), Proof("an export", False))),
        "c.yaml": _proven(tmp_path / "runs" / "c-smoke", (Proof("training ran", True),)),
    }
    monkeypatch.setattr("distlaunch.jobs.smoke.smoke", lambda request, view, environ: results[request.target])
    result = CliRunner().invoke(
        cli, ["train", "--smoke", *results, "--junit-xml", "out.xml", "--quiet"], standalone_mode=False
    )
    assert (result.return_value, result.stdout) == (3, "")
    assert "::error file=sub/model.py,line=41::runs/a-smoke failed: ValueError: units=-1" in result.stderr
    assert "::error file=b.yaml::runs/b-smoke: not reached: an export" in result.stderr
    assert "error: runs/b-smoke: not reached: an export" in result.stderr
    assert "training ran" not in result.stderr
    assert "c-smoke" not in result.stderr
    first, second, third = ElementTree.parse(tmp_path / "out.xml").getroot()[0]
    assert (first.get("file"), first.get("line")) == ("sub/model.py", "41")
    line = "runs/a-smoke failed: ValueError: units=-1 (sub/model.py:41)"
    assert first[0].get("message") == line
    assert (first[0].text or "").splitlines() == [line, *(f"  {each}" for each in trace), "hint: use 1"]
    assert second[0].get("message") == "runs/b-smoke: not reached: an export"
    assert len(third) == 0
    shown = CliRunner().invoke(cli, ["train", "--smoke", *results], standalone_mode=False).stdout
    assert "smoke test of b.yaml:\n  ok  training ran\n no   an export: not reached\n" in shown


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "x"), StopRequested(signal.SIGTERM), UsageError("no host")]
)
def test_a_smoke_run_that_does_not_start_is_in_the_report(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smoke(*given: object) -> None:
        raise error

    monkeypatch.setattr("distlaunch.jobs.smoke.smoke", smoke)
    report = tmp_path / "out.xml"
    with pytest.raises(type(error)):
        CliRunner().invoke(
            cli,
            ["train", "--smoke", "a.yaml", "--junit-xml", str(report)],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert ElementTree.parse(report).getroot()[0].get("failures") == "1"


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

    def smoke(request: JobRequest, *, as_json: bool, quiet: bool) -> tuple[int, Case]:
        code = left.pop(0)
        if code == 2:
            raise ConfigError(Problem(("seed",), "got x\x1b[31m", request.target))
        return code, Case(request.target, 0.0, "failed" if code else "")

    monkeypatch.setattr(train, "smoke_test", smoke)
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
