"""`validate`, `schema` and `init`, as users call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from distlaunch.cli.init import command as init
from distlaunch.cli.validate import command as validate
from distlaunch.config.load import load_config
from distlaunch.config.schema import FILE_NAME, json_schema, schema_text
from distlaunch.config.starter import STARTER
from distlaunch.errors import UsageError
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


def test_init_never_overwrites(folder: Path) -> None:
    assert CliRunner().invoke(init, []).exit_code == 0
    assert Path("train.yaml").read_text() == STARTER
    Path("train.yaml").write_text("mine")
    refused = CliRunner().invoke(init, [])
    assert isinstance(refused.exception, UsageError)
    assert "--force" in str(refused.exception)
    assert Path("train.yaml").read_text() == "mine"
    assert CliRunner().invoke(init, ["--force"]).exit_code == 0
    assert Path("train.yaml").read_text() == STARTER
    assert isinstance(CliRunner().invoke(init, ["no/such/folder.yaml"]).exception, UsageError)


@pytest.mark.skipif(not (ROOT / "distlaunch/workloads/images.py").exists(), reason="needs the reference workload")
def test_the_starter_config_is_valid(folder: Path) -> None:
    Path("train.yaml").write_text(STARTER)
    assert load_config("train.yaml", environ={}).config.train.epochs == 2


def test_the_shipped_schema_is_not_stale() -> None:
    shipped = (ROOT / "configs" / FILE_NAME).read_text()
    assert shipped == schema_text(), f"run: python -m distlaunch schema > configs/{FILE_NAME}"


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_name_the_schema(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (config.parent / first.partition("=")[2]).resolve() == ROOT / "configs" / FILE_NAME


def test_the_schema_agrees_with_the_loader() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not list(validator.iter_errors(yaml.safe_load(STARTER.replace("1e-3", "0.001"))))
    assert not list(validator.iter_errors(yaml.safe_load(BASE + "seed: ${SEED:3}\n")))
    for extra in (
        "seed: x\n",
        "strategy: {kind: miror}\n",
        "strateggy: {}\n",
        "export: keras\n",
        "train: {epochs: 0}\n",
    ):
        assert list(validator.iter_errors(yaml.safe_load(BASE + extra))), extra
