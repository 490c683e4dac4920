"""`distlaunch schema`: prints the JSON Schema of the config."""

from __future__ import annotations

import click

from distlaunch.cli.exit_codes import Command


@click.command("schema", cls=Command)
def command() -> None:
    """Print the JSON Schema of the config, for editors.

    \b
    distlaunch schema > distlaunch.schema.json
    then write as the first line of a config:
    # yaml-language-server: $schema=distlaunch.schema.json
    """
    from distlaunch.config.schema import schema_text

    click.echo(schema_text(), nl=False)
