"""`distlaunch schema`: prints the JSON Schema of the config or of events."""

from __future__ import annotations

import click

from distlaunch.cli.exit_codes import Command


@click.command("schema", cls=Command)
@click.option("--events", is_flag=True, help="Print the schema of the lines of events.jsonl and of `train --json`.")
def command(events: bool) -> None:
    """Print the JSON Schema of the config, for editors.

    \b
    distlaunch schema > distlaunch.schema.json
    then write as the first line of a config:
    # yaml-language-server: $schema=distlaunch.schema.json
    """
    if events:
        from distlaunch.base import strict_json
        from distlaunch.runs.event_schema import events_schema

        click.echo(strict_json.dumps(events_schema(), indent=2))
        return
    from distlaunch.config.schema import schema_text

    click.echo(schema_text(), nl=False)
