"""Prints plain lines of commands that have no view: without what would do something to a terminal."""

from __future__ import annotations

import os

import click

from distlaunch.base.visible import visible

_LONGEST_LINE = 4000


def echo(text: str, *, err: bool = False) -> None:
    """Print a text, which may have names from other people's files. The output of jobs and JSON go other ways."""
    click.echo(visible(text), err=err)


def echo_error(message: str) -> None:
    """Print a message to standard error, also without secrets of variables, and with lines of bounded length."""
    from distlaunch.base.secret_mask import SecretMask

    lines = visible(SecretMask(os.environ).whole(message)).split("\n")
    shown = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines)
    click.echo("\n".join(shown), err=True)
