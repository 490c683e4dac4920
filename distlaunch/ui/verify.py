"""Formats the result of `distlaunch verify` as a table and as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from typing import Any

from distlaunch.base.errors import ExitCode
from distlaunch.base.judge import NOISE_FACTOR, SHARP, TOLERANCE, is_loss, spread
from distlaunch.base.plural import listed
from distlaunch.base.run_files.trial_records import Record
from distlaunch.ui.tables import columns
from distlaunch.ui.words import duration
from distlaunch.verify.comparison import DIFFERS, DOCUMENTED, FAILED, Row, VerifyResult, failure_text
from distlaunch.verify.explain import random_data

_HEAD = ("strategy", "replicas", "processes", "deviates at", "loss", "gradients", "weights", "seconds", "verdict")
_RIGHT = frozenset(range(1, 8))
_WIDTH = 110  # columns


def row_line(row: Row) -> str:
    """Return `mirrored, 2 replicas: equal, 8.1 s`, shown while the trials run."""
    took = "" if row.seconds is None else f", {duration(row.seconds)}"
    return f"{_name(row)}: {row.verdict}{took}"


def table_lines(result: VerifyResult) -> list[str]:
    """Return the lines of the table, the reasons below it, and a conclusion."""
    lines = columns(_HEAD, [_cells(row, result.steps) for row in result.rows], right=_RIGHT)
    for row in result.rows:
        if row.reasons:
            lines += ["", f"{_name(row)}: {row.verdict}"]
        for reason in row.reasons:
            lines += textwrap.wrap(f"  - {reason}", _WIDTH, subsequent_indent="    ", break_long_words=False)
    return [*lines, "", *_conclusion(result)]


def as_json(result: VerifyResult) -> str:
    """Return the result as one JSON object. Values that are not finite are strings such as `inf`."""
    reference = result.reference
    noise = None
    if reference is not None:
        first, largest = spread(reference.series, reference.noise) if reference.noise else (None, None)
        noise = {"source": reference.noise_source, "first_step": _number(first), "largest": _number(largest)}
    facts = {
        "steps": result.steps,
        "equal": result.exit_code == ExitCode.DONE,
        "noise": noise,
        "rows": [_plain(row) for row in result.rows],
        "failed": failure_text(result.failed) if result.failed else None,
    }
    return json.dumps(facts, indent=2, allow_nan=False)


def _plain(row: Row) -> dict[str, Any]:
    found = row.judgement
    return {
        "strategy": row.planned.kind,
        "label": row.planned.label,
        "replicas": row.planned.replicas,
        "processes": row.planned.processes,
        "first_step": found.first_step if found else None,
        "sharp_to_step": found.sharp_to if found else None,
        "loss": _number(found.loss if found else None),
        "gradients": _number(found.gradients if found else None),
        "weights": _number(found.weights if found else None),
        "weight": found.worst.name if found and found.worst else None,
        "losses": {name: _number(value) for name, value in found.losses} if found else {},
        "metrics": {name: _number(value) for name, value in found.metrics} if found else {},
        "seconds": None if row.seconds is None else round(row.seconds, 2),
        "verdict": row.verdict,
        "reasons": list(row.reasons),
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _cells(row: Row, steps: int) -> tuple[str, ...]:
    found, planned = row.judgement, row.planned
    replicas = "-" if planned.replicas is None else str(planned.replicas)
    seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
    if found is None:
        return (planned.label, replicas, str(planned.processes), "-", "-", "-", "-", seconds, row.verdict)
    first = "-" if found.first_step is None else f"step {found.first_step}"
    deviations = tuple(map(_short, (found.loss, found.gradients, found.weights)))
    return (planned.label, replicas, str(planned.processes), first, *deviations, seconds, _verdict(row, steps))


def _verdict(row: Row, steps: int) -> str:
    """Return the verdict, such as `equal (up to step 7)` if noise would hide later deviations."""
    if not row.proven or row.judgement is None or row.judgement.sharp_to >= steps:
        return row.verdict
    sharp_to = row.judgement.sharp_to
    return f"{row.verdict} ({f'up to step {sharp_to}' if sharp_to else 'noise hides all steps'})"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if math.isfinite(value) else str(value)


def _name(row: Row) -> str:
    many = row.planned.replicas is not None and row.planned.config.strategy.has_replicas
    return f"{row.planned.label}, {row.planned.replicas} replicas" if many else row.planned.label


def _conclusion(result: VerifyResult) -> list[str]:
    lines = [] if result.reference is None else textwrap.wrap(_noise(result.reference, result.steps), _WIDTH)
    proven = sum(row.proven for row in result.rows)
    bad = sum(row.verdict in (DIFFERS, FAILED) for row in result.rows)
    if bad:
        lines.append(f"{bad} of {bad + proven} trials do not give one device's numbers.")
    elif proven:
        documented = sum(row.verdict == DOCUMENTED for row in result.rows)
        but = f", {documented} of them except for documented differences" if documented else ""
        lines.append(f"All compared trials ({proven}) give one device's numbers{but}{_limit_of_proof(result)}.")
    else:
        lines.append("Nothing could be compared.")
    return lines


def _limit_of_proof(result: VerifyResult) -> str:
    """Return a clause about the steps for which equality is not proven, or an empty string if there are none."""
    ends = [row.judgement.sharp_to for row in result.rows if row.proven and row.judgement is not None]
    last = min(ends)
    if last >= result.steps:
        return ""
    if last:
        return f", which is proven up to step {last} of {result.steps}; noise hides later deviations"
    hidden = ends.count(0)
    return f", which is not proven for {hidden if hidden < len(ends) else 'any'} of them: noise hides all steps"


def _noise(reference: Record, steps: int) -> str:
    if reference.noise_source == "none":
        why = random_data(reference.facts) or "it does not repeat its numbers"
        return f"Noise of one device: unknown, since {why}. Allowed: {TOLERANCE:g}."
    words = {
        "permuted": "examples permuted within each batch",
        "rounded": "initial weights changed in the last digit",
    }
    how = ", ".join(words[name] for name in reference.noise_source.split(" and "))
    first, largest = spread(reference.series, reference.noise)
    losses = listed([name for name in reference.series.logs[0] if is_loss(name)], 3) or "gradients"
    return (
        f"Noise of one device ({how}): {losses} {_short(first)} in the first step, up to {_short(largest)} in {steps}. "
        f"Allowed at each step: {NOISE_FACTOR:g} times the noise up to that step, or {TOLERANCE:g}. Where that is more "
        f"than {SHARP:.0%}, the comparison proves nothing."
    )
