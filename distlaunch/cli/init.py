"""`distlaunch init`: creates a small project to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from distlaunch.base.errors import UsageError
from distlaunch.cli.exit_codes import Command


@click.command("init", cls=Command)
@click.argument("target", metavar="[DIR|CONFIG.yaml]", type=click.Path(path_type=Path), default=".")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def command(target: Path, force: bool) -> None:
    """Create a project: a model and data in a Python file, and a commented config.

    Writes model.py and train.yaml to DIR (default: the current folder). If you give CONFIG.yaml instead, the config has
    that name and the Python file is called CONFIG_model.py. The project can be trained without changes, in seconds and
    without a download.
    """
    from distlaunch.config.read.scalars import unusable
    from distlaunch.config.starter import StarterProject

    if (reason := unusable(str(target))) is not None:
        raise UsageError(f"{str(target)!r}: {reason}; choose another name")
    starter = StarterProject.at(target)
    taken = [path for path in (starter.config, starter.code) if path.exists()]
    if taken and not force:
        exist = "exists" if len(taken) == 1 else "exist"
        names = " and ".join(map(str, taken))
        raise UsageError(f"{names} {exist}; choose another folder or name, or overwrite with --force")
    for path, text in starter.texts().items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except FileExistsError:
            raise UsageError(f"{path.parent} is a file; give a folder, or a config's name that ends in .yaml") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder") from None
    config = shlex.quote(str(starter.config))
    click.echo(f"wrote {starter.code} and {starter.config}{_ignored(starter.config.with_name('.gitignore'))}")
    click.echo(f"next  distlaunch train {config}    or: distlaunch validate {config}, distlaunch verify {config}")


def _ignored(path: Path) -> str:
    """Write a `.gitignore` for runs if there is none, and return the words to print about it."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("runs/\n")
    except OSError:
        return ""
    return f", and {path}, so that git ignores runs"
