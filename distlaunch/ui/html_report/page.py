"""Writes `report.html`: the data of the page, its script and its styles in one file."""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from distlaunch.base import strict_json
from distlaunch.base.event_files import read_run_sample
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.runs.report import read_report
from distlaunch.ui.html_report.data import page_data

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: the page loads nothing, whatever is in the run's files."""


def write_page(run: RunDir, file: Path) -> None:
    """Write the page of a run, whether the run has ended or not.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(file, page(run))


def page(run: RunDir) -> str:
    """Return the page of a run as HTML."""
    events = read_run_sample(run)  # once, since it takes seconds for a run of days
    report = read_report(run, events=events)
    return document(report.name, page_data(run, report, events))


def document(title: str, data: Mapping[str, Any]) -> str:
    """Return a page with this data, which the script draws."""
    # `<` could end the script element
    text = strict_json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}: distlaunch</title>
<style>{_asset("uplot.min.css")}
{_asset("page.css")}</style>
</head>
<body>
<noscript>This page draws its tables and curves with JavaScript.</noscript>
<script type="application/json" id="data">{text}</script>
<script>/* uPlot
{_asset("uplot.LICENSE")}*/
{_asset("uplot.min.js")}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("distlaunch.ui.html_report").joinpath("assets", name).read_text(encoding="utf-8")
