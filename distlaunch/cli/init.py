"""`distlaunch init`: a starter config."""

from __future__ import annotations

from pathlib import Path

import click

from distlaunch.errors import UsageError


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path), default="train.yaml")
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
def command(path: Path, force: bool) -> None:
    """Write a commented starter config to PATH (train.yaml).

    It trains a small convolutional network on clothing images and runs as it is.
    """
    from distlaunch.config.starter import STARTER

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError:
        raise UsageError(f"{path} exists; choose another name, or overwrite it with --force") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path") from None
    click.echo(f"wrote {path}; check it with `distlaunch validate {path}`, run it with `distlaunch train {path}`")
