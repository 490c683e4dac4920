"""Files of the user's with the names of other modules, and files in packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_job import LOSSES, MODULE, losses, run_command, write_job

NAMES = ("random", "types", "queue", "logging", "socket", "json", "numpy", "keras", "tensorflow", "distlaunch", "torch",
         "click", "pandas")  # fmt: skip
RAISES = "raise SystemError(f'{__file__} is imported')\n"


def shadow(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(RAISES)


def trained(done: Any, folder: Path) -> bool:
    assert done.code == 0, done.text
    return losses(folder) == LOSSES


@pytest.mark.slow  # in CI test_environments.py has one of each
@pytest.mark.parametrize(
    "strategy", [{"kind": "one_device"}, {"kind": "jax", "mesh": {"batch": 1}}], ids=["one_device", "jax"]
)
def test_files_that_nobody_imports(tmp_path: Path, strategy: dict[str, Any]) -> None:
    shadow(tmp_path)
    write_job(tmp_path, strategy=strategy, export=["keras", "weights"])
    assert trained(run_command("train", "job.yaml", cwd=tmp_path), tmp_path)


@pytest.mark.slow
def test_files_beside_the_module_and_two_processes(tmp_path: Path) -> None:
    shadow(tmp_path / "code")
    job = write_job(tmp_path, name="code/mine.py", strategy={"kind": "multi_worker_mirrored"}, cluster={"workers": 2})
    assert trained(run_command("train", job, cwd=tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "runs/job", "--split", "train"),
        ("predict", "runs/job", "--split", "train"),
        ("plan", "job.yaml", "--variables"),
        ("report", "runs/job"),
    ],
)
def test_other_commands(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_job(tmp_path)
    assert run_command("train", "job.yaml", cwd=tmp_path).code == 0
    shadow(tmp_path)
    done = run_command(*words, cwd=tmp_path)
    assert done.code == 0, done.text


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    """Its folder comes first in its path; what distlaunch imports is not taken from there."""
    shadow(tmp_path, ("types", "queue", "traceback", "signal", "pathlib"))
    (tmp_path / "neighbour.py").write_text("HERE = True")
    (tmp_path / "job.py").write_text(
        "import sys, neighbour; assert neighbour.HERE; assert not sys.flags.safe_path; raise ValueError(sys.path[0])"
    )
    done = run_command("run", "--workers", "1", "job.py", cwd=tmp_path)
    assert f"ValueError: {tmp_path}" in done.text
    assert "is imported" not in done.text


def test_the_users_module_wins_in_the_users_code(tmp_path: Path) -> None:
    """The user's module is imported instead of an installed one of the same name, as in a script.

    `wheel` and `pip` are such names: both are installed, and nobody has imported them.
    """
    (tmp_path / "wheel.py").write_text("VALUE = 5")
    imports = "import importlib\nfrom wheel import VALUE\nassert importlib.import_module('wheel').VALUE == 5\n"
    write_job(tmp_path, imports + MODULE)
    assert trained(run_command("train", "job.yaml", cwd=tmp_path), tmp_path)


def test_a_module_whose_name_is_taken_is_named(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("KEY = 3")
    write_job(tmp_path, f"from secrets import KEY\n{MODULE}")
    done = run_command("train", "job.yaml", cwd=tmp_path)
    assert done.code == 3
    assert f"rename {tmp_path}/secrets.py" in done.text


@pytest.mark.parametrize("name", ["random", "queue", "keras", "numpy"])
def test_a_reference_to_a_name_that_is_taken(tmp_path: Path, name: str) -> None:
    write_job(tmp_path, name=f"{name}.py", model={"function": f"{name}:model"})
    done = run_command("validate", "job.yaml", cwd=tmp_path)
    assert done.code == 2
    assert f"rename your file {name}.py, or write './{name}.py:model'" in done.err
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_a_file_whose_name_is_taken(tmp_path: Path) -> None:
    write_job(tmp_path, name="random.py")
    assert trained(run_command("train", "job.yaml", cwd=tmp_path), tmp_path)


PARTS = "from pkg.parts import UNITS\n"


@pytest.mark.slow
def test_a_file_may_import_its_package(tmp_path: Path) -> None:
    write_job(tmp_path, PARTS + MODULE.replace("Dense(3", "Dense(UNITS"), name="src/pkg/net.py")
    (tmp_path / "src/pkg/__init__.py").touch()
    (tmp_path / "src/pkg/parts.py").write_text("UNITS = 3")
    assert trained(run_command("train", "job.yaml", cwd=tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("src/pkg/net.py", "write 'pkg.net:model', and start with PYTHONPATH=src"),
        ("pkg/sub/net.py", "write 'pkg.sub.net:model'\n"),
    ],
)
def test_a_relative_import_in_a_file(tmp_path: Path, file: str, hint: str) -> None:
    write_job(tmp_path, f"from .parts import UNITS\n{MODULE}", name=file)
    for folder in (tmp_path / file).parents[:-1]:
        if folder != tmp_path and folder.name != "src" and folder.is_relative_to(tmp_path):
            (folder / "__init__.py").touch()
    done = run_command("validate", "job.yaml", cwd=tmp_path)
    assert done.code == 2
    assert (
        f"net.py, line 1: `from .parts import ...` works only in a module of a package, not in a file; {hint}"
        in done.err
    )
