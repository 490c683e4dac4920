"""`validate`, `schema` and `init`, as users call them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from distlaunch.base.errors import UsageError
from distlaunch.cli.init import command as init
from distlaunch.cli.validate import command as validate
from distlaunch.cli.verify import command as verify
from distlaunch.config.read.load import load_config
from distlaunch.config.schema import FILE_NAME, json_schema, schema_text
from distlaunch.config.starter import StarterProject
from tests.unit.broken_configs import CHECKS, REFERENCES, SCHEMA, YAML
from tests.unit.config_files import BASE, write_models

ROOT = Path(__file__).parents[2]
HEAVY = ("tensorflow", "keras", "jax", "numpy")
SPY = f"""
import sys
from distlaunch.cli.main import main
try:
    main()
finally:
    print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""

WORKERS = "strategy multi_worker_mirrored, 16 workers, 16 replicas, global batch 64"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_models(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", [YAML[0], YAML[13], SCHEMA[5], CHECKS[0], REFERENCES[0]], ids=lambda case: case.id)
def test_exit_code_of_a_wrong_config(case, folder: Path) -> None:
    Path("run.yaml").write_text(case.text)
    done = subprocess.run([sys.executable, "-m", "distlaunch", "validate", "run.yaml"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert case.words[0] in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["validate", "good.yaml"], 0), (["validate", "bad.yaml"], 2), (["--help"], 0), (["schema"], 0)],
)
def test_nothing_heavy_is_imported(arguments: list[str], code: int, folder: Path) -> None:
    Path("good.yaml").write_text(BASE)
    Path("bad.yaml").write_text(BASE + "strateggy: 3\n")
    done = subprocess.run([sys.executable, "-c", SPY, *arguments], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == "HEAVY []"


def test_validate(folder: Path) -> None:
    Path("good.yaml").write_text(BASE)
    found = CliRunner().invoke(
        validate, ["good.yaml", "--set", "strategy.kind=mirrored", "--set", "strategy.replicas=2"]
    )
    assert found.stdout == "good.yaml: ok (strategy mirrored, 2 replicas, global batch 64)\n"


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("{kind: slurm, nodes: 2, workers_per_node: 8}", ""),
        ("{kind: ssh, hosts: [a, b]}", ""),
        ("{kind: ssh, hosts: [a slots=8, b]}", ""),
        ("{kind: ssh, hosts: [a slots=8, b slots=7]}", "16 workers need 16 slots, but the hosts have 15 (a: 8, b: 7)"),
    ],
)
def test_hosts_that_are_not_here_are_not_counted(
    engine: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    more = f"strategy: {{kind: multi_worker_mirrored}}\ncluster: {{workers: 16}}\nengine: {engine}\n"
    Path("hosts.yaml").write_text(BASE + more)
    found = CliRunner().invoke(validate, ["hosts.yaml"])
    assert (found.exit_code, problem in found.stderr) == (2 if problem else 0, True)
    where = "; its hosts were not checked: this command does not run in a Slurm allocation" if "slurm" in engine else ""
    assert found.stdout == ("" if problem else f"hosts.yaml: ok ({WORKERS}{where})\n")


@pytest.mark.skipif(find_spec("trackio") is not None, reason="trackio is installed")
def test_a_tracker_that_is_not_installed_is_a_warning(folder: Path) -> None:
    """`train` warns too, and trains."""
    Path("tracked.yaml").write_text(f"{BASE}tracking: [trackio]\n")
    found = CliRunner().invoke(validate, ["tracked.yaml"])
    assert (found.exit_code, found.stdout) == (0, "tracked.yaml: ok (strategy one_device, global batch 64)\n")
    assert "warning: tracked.yaml:6: tracking[0]: trackio is not installed" in found.stderr


def test_validate_as_json(folder: Path) -> None:
    Path("good.yaml").write_text(BASE)
    Path("bad.yaml").write_text(BASE + "seed: x\n")
    found = CliRunner().invoke(validate, ["good.yaml", "bad.yaml", "--json"])
    good, bad = json.loads(found.stdout)
    assert found.exit_code == 2
    assert good["ok"]
    assert not bad["ok"]
    assert bad["problems"][0]["key"] == "seed"
    assert (bad["problems"][0]["source"], bad["problems"][0]["line"]) == ("bad.yaml:6", 6)


def test_the_help_of_verify_says_of_random_layers_what_the_documents_say() -> None:
    told = " ".join(CliRunner().invoke(verify, ["--help"]).stdout.split())
    for text in (told, " ".join((ROOT / "docs/numbers.md").read_text().split())):
        assert re.search(r"Random layers [\w ]*stay on", text)
        assert "each example keeps its mask" in text


def test_init_never_overwrites(folder: Path) -> None:
    assert CliRunner().invoke(init, []).exit_code == 0
    written = {path: path.read_text() for path in (Path("train.yaml"), Path("model.py"))}
    for path in written:
        path.write_text("mine")
        refused = CliRunner().invoke(init, [])
        assert isinstance(refused.exception, UsageError)
        assert "train.yaml and model.py exist" in str(refused.exception)
        assert "--force" in str(refused.exception)
        assert path.read_text() == "mine"
    Path("train.yaml").unlink()
    assert isinstance(CliRunner().invoke(init, []).exception, UsageError)
    assert not Path("train.yaml").exists(), "nothing is written where one of the files would be overwritten"
    assert CliRunner().invoke(init, ["--force"]).exit_code == 0
    assert {path: path.read_text() for path in written} == written


@pytest.mark.parametrize(
    ("target", "config", "code"),
    [
        (".", "train.yaml", "model.py"),
        ("a folder/of its own", "a folder/of its own/train.yaml", "a folder/of its own/model.py"),
        ("ünï: #1 ${HOME}", "ünï: #1 ${HOME}/train.yaml", "ünï: #1 ${HOME}/model.py"),
        ("keras.yaml", "keras.yaml", "keras_model.py"),
        ("sub/a '\"b: ${C}.v2.yml", "sub/a '\"b: ${C}.v2.yml", "sub/a '\"b: ${C}.v2_model.py"),
    ],
)
def test_init_writes_a_valid_project_under_any_name(target: str, config: str, code: str, folder: Path) -> None:
    done = CliRunner().invoke(init, [target])
    assert done.exit_code == 0, done.exception
    assert f"wrote {code} and {config}" in done.stdout
    loaded = load_config(config, environ={}).config
    assert loaded.model.function == f"{folder / code}:model"
    assert loaded.train.epochs == 8
    assert load_config(config, environ={"EPOCHS": "3"}).config.train.epochs == 3


def test_init_lets_git_ignore_runs(folder: Path) -> None:
    assert CliRunner().invoke(init, ["a"]).exit_code == 0
    assert (folder / "a" / ".gitignore").read_text() == "runs/\n"
    (folder / "b").mkdir()
    (folder / "b" / ".gitignore").write_text("data/\n")
    assert "git" not in CliRunner().invoke(init, ["b"]).stdout
    assert (folder / "b" / ".gitignore").read_text() == "data/\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("models.py", "models.py is a file; give a folder, or a config's name that ends in .yaml"),
        ("models.py/a", "cannot write models.py/a"),
        ("\udcff", "not valid Unicode"),
    ],
)
def test_where_init_cannot_write(target: str, message: str, folder: Path) -> None:
    Path("models.py").touch()
    refused = CliRunner().invoke(init, [target])
    assert isinstance(refused.exception, UsageError)
    assert message in str(refused.exception)


def test_the_shipped_schema_is_not_stale() -> None:
    shipped = (ROOT / "configs" / FILE_NAME).read_text()
    assert shipped == schema_text(), f"run: python -m distlaunch schema > configs/{FILE_NAME}"


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_name_the_schema(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (config.parent / first.partition("=")[2]).resolve() == ROOT / "configs" / FILE_NAME


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("pa", "pa"),
        ("my project", "my-project"),
        ("2024", "2024"),
        ("null", "null"),
        (".", "here"),
        ("x/own.yaml", "own"),
        ("größe 2", "groe-2-59c10440"),
    ],
)
def test_a_starter_names_its_runs(target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    starter = StarterProject.at(Path(target))
    for path, text in starter.texts().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert load_config(starter.config, environ={}).config.name == name


def test_the_schema_agrees_with_the_loader() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    validator = jsonschema.Draft202012Validator(json_schema())
    starter = StarterProject.at(Path("."))
    assert not list(validator.iter_errors(yaml.safe_load(starter.texts()[starter.config])))
    assert not list(validator.iter_errors(yaml.safe_load(BASE + "seed: ${SEED:3}\n")))
    for extra in (
        "seed: x\n",
        "strategy: {kind: miror}\n",
        "strateggy: {}\n",
        "export: keras\n",
        "train: {epochs: 0}\n",
    ):
        assert list(validator.iter_errors(yaml.safe_load(BASE + extra))), extra


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--epochs", "train.epochs"),
        ("--worker", "cluster.workers"),
        ("--batch-size", "data.global_batch"),
        ("--lr", "compile.optimizer.args.learning_rate"),
        ("--strategy", "strategy.kind"),
    ],
)
def test_an_option_that_is_a_key_of_the_config(option: str, key: str) -> None:
    command = [sys.executable, "-m", "distlaunch", "train", "a.yaml", option, "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"No such option: {option}; it is a config key: use --set {key}=VALUE" in done.stderr


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["train", "a.yaml", "epochs=3"], "--set train.epochs=3"),
        (["validate", "a.yaml", "train.epochs=3"], "--set train.epochs=3"),
        (["validate", "a.yaml", "strategy=mirrored"], "--set strategy.kind=mirrored"),
        (["plan", "a.yaml", "lr=0.1", "more"], "--set compile.optimizer.args.learning_rate=0.1"),
    ],
)
def test_an_argument_that_is_a_setting(words: list[str], way: str) -> None:
    done = subprocess.run([sys.executable, "-m", "distlaunch", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"got '{words[2]}'; to change a value of the config, write {way}\n" in done.stderr


def test_an_option_that_is_nothing() -> None:
    command = [sys.executable, "-m", "distlaunch", "train", "a.yaml", "--resum"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "--resume" in done.stderr) == (2, True)
