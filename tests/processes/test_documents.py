"""Tests that run the commands and code of the documents as written, and that look up the names in them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt
from real import CONFIGS, assert_nothing_left, at_step, json_lines, run, wait_for

from distlaunch import __version__
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Evaluated
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import COMMANDS, cli
from distlaunch.config import engines
from distlaunch.config.read.load import load_config
from distlaunch.config.strategies import KINDS
from tests.documents import (
    DOCUMENTS,
    ROOT,
    CodeName,
    anchors,
    code_names,
    commands,
    links,
    named_tests,
    snippet,
    snippets,
)

HERE = Path(__file__).parent
START = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/distlaunch train configs/fashion_mnist.yaml"
SESSION = {
    START,
    "distlaunch train configs/fashion_mnist.yaml --set strategy.kind=mirrored",
    "distlaunch plan configs/fashion_mnist.yaml",
    "distlaunch evaluate runs/fashion-mnist",
    "distlaunch predict runs/fashion-mnist",
    "distlaunch export runs/fashion-mnist --format tflite",
    "distlaunch report runs/fashion-mnist",
    "distlaunch runs",
}
DETACHED = {
    "distlaunch train configs/fashion_mnist.yaml --detach",
    "distlaunch stop runs/fashion-mnist",
    "distlaunch logs runs/fashion-mnist --stacks",
    "distlaunch logs runs/fashion-mnist -f",
    "distlaunch train configs/fashion_mnist.yaml --resume",
}
MESHES = {
    "distlaunch train configs/sentiment.yaml",
    "distlaunch train configs/sentiment_model_parallel.yaml",
    "distlaunch train configs/sentiment_spatial_parallel.yaml",
}
MINE = {"distlaunch validate mine.yaml", "distlaunch train mine.yaml"}
VERIFY = "distlaunch verify mine.yaml"
TESTS = "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest"
ELSEWHERE = {
    "distlaunch train configs/fashion_mnist.yaml --smoke": "test_train.py::test_every_config_passes_its_smoke_test",
    "distlaunch train configs/fashion_mnist.yaml --debug": "test_debug.py::test_a_custom_step_a_pipeline_and_keys",
    "pytest tests/properties --hypothesis-profile=thorough": "../properties/test_reports.py::test_histories",
    "distlaunch train configs/fashion_mnist.yaml --metrics-port 9400": (
        "../unit/test_metrics.py::test_a_run_that_goes_on"
    ),
    "distlaunch train configs/fashion_mnist.yaml --metrics-file metrics/job.prom": (
        "test_train.py::test_the_main_job_evaluates_and_exports"
    ),
    "python scripts/benchmark_peers.py": "test_benchmark.py::test_quick_run_against_peers",
    "python scripts/benchmark_start.py": "test_benchmark.py::test_one_round_of_starts",
    "distlaunch compare --sort val_accuracy": "../unit/test_compare.py::test_sorting",
    "distlaunch compare 'rate-*' --sort val_loss": "test_comparing.py::test_the_best_of_six_runs",
    "distlaunch compare 'rate-*' --sort val_loss --csv > rates.csv": "test_comparing.py::test_the_best_of_six_runs",
    "distlaunch runs -f": "../unit/test_runs_command.py::test_a_live_table_until_ctrl_c",
    "distlaunch runs --remove --name 'rate-0.1-*'": "test_comparing.py::test_the_best_of_six_runs",
    "distlaunch runs --remove --name 'rate-1000-*'": "../unit/test_runs_command.py::test_the_answer_decides",
    "distlaunch predict EXPORT --input rows.csv": "test_export.py::test_predict_from_a_copy_for_files_and_functions",
    "distlaunch predict runs/NAME --input reviews.txt --output -": "test_sentiment.py::texts_in_scores_out",
    "distlaunch plan configs/mnist_mlp_jax.yaml": "test_plan_pictures.py::test_plan_draws_the_mesh",
    "distlaunch plan --data CONFIG": "test_input.py::test_the_plan_shows_who_reads_what",
    "distlaunch doctor config.yaml": "../cluster/test_start.py::test_the_doctor_shows_each_host",
    "distlaunch submit config.yaml": "test_submit.py::test_a_pending_job",
    "distlaunch submit RUN --resume": "../cluster/test_batch_jobs.py::test_stop_from_the_login_host",
    "distlaunch tune mine.yaml": "test_tune.py::test_a_short_search_proves_its_winner",
    "distlaunch train tuned.yaml": "test_tune.py::test_a_short_search_proves_its_winner",  # `validate` takes it
    "distlaunch plan CONFIG": "test_plan_pictures.py::test_plan_draws_the_mesh",
    "distlaunch COMMAND --help": "test_documents.py::test_every_command_has_its_help_and_its_line",
    "distlaunch evaluate RUN": "test_documents.py::test_the_first_commands_of_the_readme",
    "distlaunch export RUN": "test_documents.py::test_the_first_commands_of_the_readme",
    "distlaunch logs RUN --stacks": "test_detach.py::test_stacks_of_a_run_that_goes_on",
    "distlaunch wait RUN...": "test_detach.py::test_waiting_for_several_runs",
    "distlaunch stop runs/fashion-mnist --now": "test_detach.py::test_stop_now",
    "distlaunch train CONFIG --resume": "test_automation.py::test_cron_for_real",
    "distlaunch train runs/fashion-mnist --resume": "test_commands.py::test_more_epochs_for_a_finished_run",
    "distlaunch validate CONFIG": "../unit/test_config_commands.py::test_validate",
    "distlaunch schema > configs/distlaunch.schema.json": (
        "../unit/test_config_commands.py::test_the_shipped_schema_is_not_stale"
    ),
    "distlaunch report RUN --html": "../unit/test_html_report.py::test_the_command_writes_where_it_is_told",
    "distlaunch track RUN": "../unit/test_tracking.py::test_the_command_sends_what_is_missing",
    "distlaunch track RUN wandb": "../unit/test_tracking.py::test_the_command_sends_what_is_missing",
    "distlaunch schema --events": "../unit/test_event_schema.py::test_events_of_a_run_fit_the_schema",
    "distlaunch report RUN": "test_parameter_server.py::test_both_hostings_give_the_same_report",
    "distlaunch init DIR": "test_init.py::test_the_starter_trains_well_under_every_strategy",
    "distlaunch run --workers 2 script.py ARGS": "test_run_frameworks.py::test_multi_worker_mirrored",
    "distlaunch run --workers 2 --ps 1 script.py ARGS": "test_run_frameworks.py::test_parameter_servers",
    'distlaunch run --hosts a,b,"c slots=2" --workers 4 script.py ARGS': (
        "test_ssh_engine.py::test_a_script_runs_on_hosts_and_again_after_a_failure"
    ),
    "distlaunch run --workers 2 main.py": "test_run_frameworks.py::test_multi_worker_mirrored",
    "distlaunch run --workers 3 --ps 2 train.py": "test_run_frameworks.py::test_parameter_servers",
    "distlaunch run --jax --workers 2 -m package.module": "test_run_frameworks.py::test_jax",
    "distlaunch run --jax --workers 2 distribution.py": "test_run_frameworks.py::test_jax",
}
"""Commands whose results other tests look at, some with words that stand for a run or a script."""

CANNOT = {
    'TF_CONFIG=\'{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]},': (
        "four hosts; test_scripts.py starts a cluster by hand on one"
    ),
    "distlaunch run custom_training.py": "the tutorial's text is not ours to keep; test_run.py runs scripts of ours",
    "distlaunch run guide.py": "likewise, and it is for several GPUs",
    "distlaunch run --jax guide.py": "likewise, and it is for several GPUs",
    "distlaunch train config.yaml": "names no file; it stands for `train` as such",
    "pip install 'distlaunch[jax]'": "installs what these tests run with",
    "pip install -e '.[jax]'": "likewise",
    "pip install 'tensorflow[and-cuda]' 'jax[cuda13]'": "needs GPUs",
    "pip install tensorboard": "no part of distlaunch",
    "pip uninstall --yes tensorflow": "changes what these tests run with",
    "pip install --no-deps 'tensorflow-cpu>=2.21,<2.22'": "likewise",
    TESTS: "runs this test",
    "scripts/check.sh": "CI runs it before the tests",
    "pytest": "runs this test",
    "pytest --regenerate": "writes golden files",
    "pytest -n 0 tests/unit/test_supervision.py": "a part of what runs this test",
    "pytest -n 0 tests/unit/test_private_parts.py": "likewise",
    "pytest -n 2 tests/parity": "likewise",
    "pytest -n 2 tests/parity/test_jax.py tests/parity/test_operation_checks.py tests/parity/test_random_numbers.py "
    "tests/parity/test_mesh_processes.py tests/parity/test_any_to_any.py": "likewise",
    "pytest --cold": "the same tests",
    "pytest -m trackers": "needs packages that the suite does not install",
    "pip install 'distlaunch[metrics]'": "installs what `.[dev]` has installed",
    "pip install 'distlaunch[mlflow]'": "installs what these tests do not need",
    "pip install -e '.[all]'": "likewise",
    "pytest -m browser": "needs a browser; CI runs it",
    "pytest -m short": "needs root; CI runs it",
    "pytest -m cluster": "needs root; runs the tests of docs/clusters.md",
    "pytest -m slow": "runs this test",
    "pytest -m full_data": "likewise",
    "pytest -m full_grid": "likewise",
}


def test_every_command_of_the_documents_is_run() -> None:
    """A command that is new or changed needs a place above."""
    assert commands() == {*SESSION, *DETACHED, *MESHES, *MINE, VERIFY, *ELSEWHERE, *CANNOT}
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), place


def test_ci_runs_the_commands_of_the_documents() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert TESTS in [line.replace(" --quiet", "") for line in lines]
    assert any(line.endswith(" scripts/check.sh") for line in lines)


def test_every_command_has_its_help_and_its_line() -> None:
    shown = set(re.findall(r"^\| `(\w+)[ `]", (ROOT / "docs/commands.md").read_text(), re.MULTILINE))
    assert shown == COMMANDS.keys()
    for name in COMMANDS:
        shown = CliRunner().invoke(cli, [name, "--help"])
        assert shown.exit_code == 0, name
        assert "\\b" not in shown.output, "a raw docstring shows click's mark, and joins the lines that it keeps"


SNIPPETS = {
    "README.md": ("# mine.py", "# mine.yaml"),
    "architecture.md": ("  distlaunch train",),
    "automation.md": (
        "#!/bin/sh",
        "#!/bin/bash",
        "distlaunch runs",
        "run=$(",
        "name: train",
        "0 3 * * *",
        "*/10 * * * *",
    ),
    "comparing.md": ("for rate in", "run "),
    "clusters.md": ("engine:", "        your machine", "#!/bin/bash", "cluster:"),
    "config.md": ("name: null",),
    "input.md": ("class Photos:", "def augment(image, label, seed):", "def lines(context):", "def own_part(context):"),
    "meshes.md": ("strategy:", "mesh: batch 4"),
    "models_and_data.md": ("def step(context, batch):",),
    "numbers.md": ("compile:",),
    "parameter_servers.md": ("strategy:",),
    "performance.md": ("settings of the tasks", "candidate  "),
    "tracking.md": ("tracking: [mlflow]",),
}
"""The first words of the code that the documents show. Those that no test of this file uses are run by others
(`test_automation.py`, `tests/cluster/test_slurm.py`), or are pictures."""


def test_every_snippet_of_the_documents_is_known() -> None:
    """Every snippet of the documents is listed in `SNIPPETS`. A new snippet needs a test and an entry there."""
    found = {
        (one.document, start)
        for one in snippets()
        for start in SNIPPETS.get(one.document, ())
        if one.first_line.startswith(start)
    }
    unknown = [one for one in snippets() if not one.first_line.startswith(tuple(SNIPPETS.get(one.document, ())))]
    assert not unknown
    assert found == {(document, start) for document, starts in SNIPPETS.items() for start in starts}


def test_no_table_or_code_has_become_prose() -> None:
    reader = MarkdownIt("commonmark").enable("table")
    prose = [
        (path.name, each.content)
        for path in DOCUMENTS
        for each in reader.parse(path.read_text())
        if each.type == "inline"
    ]
    assert len(prose) > 1000
    assert [(name, text) for name, text in prose if re.search(r"\|---|```|\S {3,}\S", text)] == []


def test_every_link_leads_somewhere() -> None:
    for path, target in links():
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {target}; there are {sorted(anchors(found))}"


def test_each_promise_of_the_security_page_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("|---|")[2].partition("\n\n")[0]
    promises = table.splitlines()[1:]
    assert len(promises) > 10
    assert all("[`test_" in promise for promise in promises)
    for file, name in named_tests("security.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file}: {name}"
    assert sum(line.count("[`test_") for line in promises) == len(named_tests("security.md"))


def test_every_page_is_in_the_table_of_the_readme() -> None:
    linked = {(path.parent / target).resolve() for path, target in links() if path.name == "README.md"}
    assert linked >= {*DOCUMENTS[1:], ROOT / "CHANGELOG.md"}


@pytest.mark.parametrize("code", sorted(code_names("architecture.md"), key=str), ids=lambda c: f"{c.file} {c.name}")
def test_the_names_of_the_architecture_exist(code: CodeName) -> None:
    """`file.py`, `file.py: NAME`, `file.py: function()`, `file.py: Class` or `file.py: Class.method()`."""
    source = (ROOT / "distlaunch" / code.file).read_text()
    for name in code.name.split(".") if code.name else ():
        assert re.search(rf"^\s*(?:class |def |async def )?{name}\b(?:\(|:| =|\[)", source, re.MULTILINE), name


def test_methods_that_the_architecture_names_alone_exist() -> None:
    """`Class.method()` without a file: the page has named the file just before."""
    text = (ROOT / "docs/architecture.md").read_text()
    sources = [(ROOT / "distlaunch" / code.file).read_text() for code in code_names("architecture.md")]
    for owner, method in re.findall(r"`(\w+)\.(\w+)\(\)`", text):
        assert any(f"class {owner}" in source and f"def {method}(" in source for source in sources), (owner, method)


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == __version__


class Session:
    """Types the documents' commands, in a folder with `configs`, and remembers which it has typed."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        (cwd / "configs").symlink_to(CONFIGS)
        self.typed: set[str] = set()

    def __call__(self, command: str, *more: str) -> str:
        """Run a command of the documents and return its output. The words in `more` shorten the run."""
        assert command in commands()
        self.typed.add(command)
        words = command.rpartition("distlaunch ")[2].split()
        code, out, err = run(*words, *more, cwd=self.cwd)
        assert code == 0, out + err
        return out

    def events(self, kind: str, command: str, *more: str) -> list[dict]:
        return [event for event in json_lines(self(command, *more, "--json")) if event["event"] == kind]

    def epochs(self, command: str, *more: str) -> list[dict[str, float]]:
        return [event["logs"] for event in self.events("EpochEnded", command, *more)]


@pytest.mark.slow
def test_the_first_commands_of_the_readme(tmp_path: Path) -> None:
    session, run_dir = Session(tmp_path), RunDir(tmp_path / "runs/fashion-mnist")
    short = ("--set", "train.epochs=2")
    trained = session.epochs(START, *short)
    assert trained[-1]["val_accuracy"] > 0.75
    assert (run_dir.export / "model.keras").is_file()
    assert (run_dir.export / "saved_model").is_dir()
    mirrored = session.epochs("distlaunch train configs/fashion_mnist.yaml --set strategy.kind=mirrored", *short)
    assert [epoch["loss"] for epoch in mirrored] == pytest.approx([epoch["loss"] for epoch in trained], rel=1e-3)
    planned = session("distlaunch plan configs/fashion_mnist.yaml")
    assert "TF_CONFIG" in planned
    assert "worker:1" in planned
    (evaluated,) = session.events("Evaluated", "distlaunch evaluate runs/fashion-mnist")
    assert evaluated["logs"]["accuracy"] == pytest.approx(trained[-1]["val_accuracy"], rel=1e-6)
    (predicted,) = session.events("Predicted", "distlaunch predict runs/fashion-mnist")
    with np.load(predicted["path"]) as arrays:
        assert arrays["predictions"].shape == (2000, 10)
    assert "exported  tflite" in session("distlaunch export runs/fashion-mnist --format tflite")
    assert (run_dir.export / "model.tflite").is_file()
    assert "250" in session("distlaunch report runs/fashion-mnist")
    listed = session("distlaunch runs")
    assert "fashion-mnist-2" in listed
    assert listed.count("done") == 2
    assert session.typed == SESSION


@pytest.mark.slow
def test_a_run_in_the_background_stopped_and_resumed(tmp_path: Path) -> None:
    session, run_dir = Session(tmp_path), RunDir(tmp_path / "runs/fashion-mnist")
    longer = ("--set", "train.epochs=30", "--set", "train.steps_per_call=1", "--set", "export=[]")
    session("distlaunch train configs/fashion_mnist.yaml --detach", *longer)
    wait_for(run_dir, at_step(10))
    for task in ("worker:0", "worker:1"):
        stacks = session("distlaunch logs runs/fashion-mnist --stacks")
        assert re.search(rf"^\[{task}\] .*training/loop.py", stacks, re.MULTILINE)
    session("distlaunch stop runs/fashion-mnist")
    (stopped,) = run_dir.checkpoint_steps()[-1:]
    assert session("distlaunch logs runs/fashion-mnist -f").splitlines()[-1] == "stopped"
    resume = "distlaunch train configs/fashion_mnist.yaml --resume"
    epochs = stopped // 125 + 1
    events = json_lines(session(resume, "--set", f"train.epochs={epochs + 1}", "--json"))
    assert [event["step"] for event in events if event["event"] == "Restored"] == [stopped]
    assert [event["logs"]["val_accuracy"] > 0.7 for event in events if event["event"] == "EpochEnded"][-1]
    assert session.typed == DETACHED
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_the_dtensor_tutorial_is_three_commands(tmp_path: Path) -> None:
    session = Session(tmp_path)
    reached = [session.epochs(command)[-1]["loss"] for command in sorted(MESHES, key=len)]
    assert reached == sorted(reached, reverse=True)
    assert session.typed == MESHES
    assert (RunDir(tmp_path / "runs/sentiment").export / "saved_model").is_dir()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The README's own model, with its own step below, which imports what a custom step needs."""
    step = snippet("models_and_data.md", "def step(")
    code = "import tensorflow as tf\n" + snippet("README.md", "# mine.py") + "\n\n" + step
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(snippet("README.md", "# mine.yaml"))
    return tmp_path


def losses(project: Path, *options: str) -> list[float]:
    """Validation loss of each epoch of `mine.yaml`."""
    code, out, err = run("train", "mine.yaml", "--json", *options, cwd=project)
    assert code == 0, out + err
    return [event["logs"]["val_loss"] for event in json_lines(out) if event["event"] == "EpochEnded"]


def test_the_readmes_own_model_and_step(mine: Path) -> None:
    code, out, err = run("validate", "mine.yaml", cwd=mine)
    assert (code, err) == (0, "")
    assert out.startswith("mine.yaml: ok (")
    found = losses(mine)
    assert len(found) == 5
    assert found[-1] < 0.1
    own_step = ("--set", "train.loop=custom", "--set", "train.step=mine.py:step")
    assert losses(mine, *own_step, "--set", "strategy.kind=mirrored") == pytest.approx(found, rel=1e-4)


@pytest.mark.slow
def test_the_readmes_own_model_is_verified(mine: Path) -> None:
    code, out, err = run(*VERIFY.split()[1:], "--strategies", "mirrored,dtensor", "--steps", "10", cwd=mine)
    assert code == 0, out + err
    assert out.count(" equal") >= 4
    assert "give one device's numbers" in out


@pytest.mark.slow
def test_the_servers_of_the_document(mine: Path) -> None:
    written = yaml.safe_load((mine / "mine.yaml").read_text())
    shown = yaml.safe_load(snippet("parameter_servers.md", "strategy:"))
    (mine / "mine.yaml").write_text(yaml.safe_dump(written | shown))
    assert losses(mine)[-1] < 0.1
    events = read_events(RunDir(mine / "runs/mine").task(0, "evaluator:0").events)
    assert [event.logs["loss"] < 0.1 for event in events if isinstance(event, Evaluated)][-1]


@pytest.mark.slow
def test_the_mesh_of_the_document(tmp_path: Path) -> None:
    """The snippet in place of the strategy of a config with these layers: the same numbers."""
    pytest.importorskip("jax")
    config = yaml.safe_load((CONFIGS / "mnist_mlp_jax.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(config | yaml.safe_load(snippet("meshes.md", "strategy:"))))
    found = []
    for name in ("config.yaml", "mesh.yaml"):
        code, out, err = run("train", name, "--set", "train.epochs=1", "--json", cwd=tmp_path)
        assert code == 0, out + err
        found += [event["logs"]["loss"] for event in json_lines(out) if event["event"] == "EpochEnded"]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_the_config_in_one_page_tells_the_defaults(mine: Path) -> None:
    """Every key of the schema is there, and each that has a default has it."""
    page = snippet("config.md", "name: null")
    filled = page.replace("function: ...", 'function: "mine.py:model"', 1)
    filled = filled.replace("function: ...", 'function: "mine.py:data"', 1).replace(
        "global_batch: ...", "global_batch: 8"
    )
    (mine / "page.yaml").write_text(filled)
    least = 'model: {function: "mine.py:model"}\ndata: {function: "mine.py:data", global_batch: 8}\ncompile: {}\n'
    (mine / "least.yaml").write_text(least + "strategy: {kind: one_device}\n")
    told, real = (load_config(mine / name, environ={}).config.to_plain() for name in ("page.yaml", "least.yaml"))
    assert told | {"name": None} == real | {"name": None}
    keys = yaml.safe_load(filled)
    assert set(keys) == set(real)
    for section in ("data", "compile", "train", "cluster", "engine", "checkpoint", "restarts"):
        assert set(keys[section]) | {"tfds"} == set(real[section]) | {"tfds"}, section


@pytest.mark.parametrize("kind", ["ssh", "slurm"])
def test_the_engines_in_one_page_have_their_keys(kind: str) -> None:
    """The comments name the keys that the engine has beside those of `auto`, with their defaults."""
    (_, text) = snippet("config.md", "name: null").split(f"`kind: {kind}`")
    lines = re.findall(r"^ +#   (\w+): (\S+)", text.split("`kind:")[0], re.M)
    fields = {
        name: field.get_default(call_default_factory=True)
        for name, field in engines.installed().models[kind].model_fields.items()
        if name not in engines.installed().models["auto"].model_fields
    }
    assert {name: yaml.safe_load(value) for name, value in lines} == fields


@pytest.mark.parametrize("kind", KINDS)
def test_the_strategies_in_one_page_are_valid(mine: Path, kind: str) -> None:
    """And name every key of theirs."""
    (shown,) = re.findall(rf"\{{kind: {kind}(?=[,}}]).*\}}", snippet("config.md", "name: null"))
    strategy = yaml.safe_load(shown)
    least = {"model": {"function": "mine.py:model"}, "data": {"function": "mine.py:data", "global_batch": 8}}
    servers = {"cluster": {"ps": 1}} if kind == "parameter_server" else {}
    (mine / "page.yaml").write_text(yaml.safe_dump(least | servers | {"strategy": strategy}))
    assert set(strategy) == set(load_config(mine / "page.yaml", environ={}).config.to_plain()["strategy"])
