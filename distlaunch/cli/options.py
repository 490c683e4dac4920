"""Options that several commands share."""

from __future__ import annotations

import click

OVERRIDES = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, e.g. --set train.epochs=3."
)
JSON_EVENTS = click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines, and nothing else.")
QUIET = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
