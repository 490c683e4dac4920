"""Prints plain lines of commands that have no view, with visible control characters."""

from __future__ import annotations

import os

import click

from distlaunch.base.visible import visible

_LONGEST_LINE = 4000


def echo(text: str, *, err: bool = False) -> None:
    """Print a text with visible control characters, since names in it may come from other users' files."""
    click.echo(visible(text), err=err)


def echo_error(message: str) -> None:
    """Print a message to standard error with visible control characters, masked secrets and shortened lines."""
    from distlaunch.base.secret_mask import SecretMask

    lines = visible(SecretMask(os.environ).whole(message)).split("\n")
    shown = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines)
    click.echo("\n".join(shown), err=True)
