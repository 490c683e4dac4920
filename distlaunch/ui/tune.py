"""Formats the result of `distlaunch tune` as a table and as JSON."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from distlaunch.base.judge import log_in_words
from distlaunch.base.plain_types import is_dict
from distlaunch.base.plural import joined
from distlaunch.tune.candidates import UNTUNED, Candidate
from distlaunch.tune.tuning import Row, TuneResult
from distlaunch.ui.tables import columns
from distlaunch.ui.words import size
from distlaunch.verify.comparison import failure_text

_HEAD = ("candidate", "ms per step", "range", "rounds", "examples/s", "memory", "losses")
_RIGHT = frozenset(range(1, 6))
_WIDTH = 110  # columns


def table_lines(result: TuneResult) -> list[str]:
    """Return the lines of the table, of what was not tried and why, and the conclusion."""
    measured = sorted((row for row in result.rows if row.spread), key=lambda row: row.ratio or 0)
    lines = columns(_HEAD, [_cells(row, result) for row in measured], right=_RIGHT) if measured else []
    for row in result.rows:
        if row.failed:
            lines += ["", *_wrap(f"{_name(row.candidate, result)}: failed, and dropped: {row.failed}")]
    causes = dict.fromkeys(cause for row in result.rows for cause in row.causes)
    if causes:
        lines += ["", "why losses differ, as far as known:"]
        lines += [line for cause in causes for line in _wrap(f"  - {cause}", "    ")]
    if result.not_tried:
        lines += ["", "not tried:"]
        reasons: dict[str, list[str]] = {}
        for each in result.not_tried:
            reasons.setdefault(each.reason, []).append(each.name)
        for reason, names in reasons.items():
            lines += _wrap(f"  {'; '.join(dict.fromkeys(names))}: {reason}", "    ")
    lines += ["", *conclusion(result)] if measured else []
    return [*lines, *(["", *_wrap(f"the search ended early: {result.ended_early}")] if result.ended_early else [])]


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False)


def _name(candidate: Candidate, result: TuneResult) -> str:
    if candidate.label != UNTUNED:
        return candidate.name
    return ", ".join([f"{UNTUNED} ({result.label})", *(change.label for change in candidate.changes)])


def _cells(row: Row, result: TuneResult) -> tuple[str, ...]:
    spread = row.spread
    assert spread is not None, "the row is measured"
    name = _name(row.candidate, result)
    mark = " *" if row is result.winner else ""
    return (
        f"{name}{mark}",
        _ms(spread.median),
        f"{_ms(spread.low)} to {_ms(spread.high)}",
        str(len(row.rounds)),
        f"{result.batch / spread.median:,.0f}",
        size(row.memory_bytes),
        _losses(row, result),
    )


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _losses(row: Row, result: TuneResult) -> str:
    if row is result.untuned:
        return "expected"
    found = row.judgement
    if found is None:
        return "not compared"
    if row.candidate.is_16_bit:
        return "16 bits" if found.loss is None else f"16 bits, off by {found.loss:.0e}"
    if found.equal:
        return "equal"
    what = [log_in_words([name for name, _ in found.losses])] if found.losses else []
    what += ["the weights"] if found.weights_differ and not what else []
    what += [log_in_words([name for name, _ in found.metrics])] if found.metrics and not what else []
    where = f" from step {found.first_step}" if found.first_step is not None else ""
    return f"differ{where} ({joined(what)})" if what else f"differ{where}"


def conclusion(result: TuneResult) -> list[str]:
    """Return sentences about the winner, its keys and its variables."""
    own, winner = result.untuned, result.winner
    if own is None or own.spread is None or winner is None or winner.spread is None:
        return []
    if result.not_a_number:
        return _wrap(f"Nothing was compared: even on one device, values are not numbers {result.not_a_number}.")
    if winner is own:
        measured = [(row, result.entry(row)) for row in result.rows if row is not own]
        faster = [row for row, entry in measured if entry is not None and entry.is_faster_than(own.spread)]
        unsure = [_name(row.candidate, result) for row in faster if result.may_win(row)]
        if unsure:
            return _wrap(f"Measured in too few rounds to be sure, but faster so far: {'; '.join(unsure)}.")
        but = ""
        if any(row.candidate.is_16_bit for row in faster):
            but = " 16-bit precision is faster, but changes the numbers; --allow-16-bit accepts that."
        return _wrap(f"No candidate with the same losses is faster than the untuned config, beyond noise.{but}")
    lines = _wrap(
        f"* {_name(winner.candidate, result)} is the fastest: a step takes {winner.ratio:.2f} of the untuned time."
    )
    if winner.candidate.is_16_bit:
        lines += _wrap("Its losses differ as the table shows, since it computes in 16 bits.")
    for key, value in settings_of(winner.candidate).items():
        lines.append(f"  {key}: {value}")
    lines += [f"  {line}" for line in export_lines(winner.candidate)]
    return lines


def settings_of(candidate: Candidate) -> dict[str, str]:
    """Return the config keys that a candidate changes, with their values as one-line YAML."""
    return {".".join(map(str, key)): _yaml(value) for key, value in candidate.keys.items()}


def _yaml(value: Any) -> str:
    if is_dict(value):
        return "{" + ", ".join(f"{name}: {_yaml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value) if not isinstance(value, str) else value


def export_lines(candidate: Candidate) -> list[str]:
    """Return the shell commands that set the variables of a candidate."""
    environ = candidate.environ
    return ["export " + " ".join(f"{name}={value}" for name, value in environ.items())] if environ else []


def as_json(result: TuneResult) -> str:
    """Return the result as one JSON object."""
    winner = result.winner
    facts = {
        "seconds": round(result.seconds, 2),
        "strategy": result.label,
        "examples_per_step": result.batch,
        "winner": winner.candidate.name if winner else None,
        "is_faster": winner is not None and winner is not result.untuned,
        "rows": [_plain(row, result) for row in result.rows],
        "failed": failure_text(result.failed) if result.failed else None,
        "not_tried": [{"candidate": each.name, "reason": each.reason} for each in result.not_tried],
        "hosts": list(result.hosts),
        "interrupted": result.interrupted is not None,
        "ended_early": result.ended_early or None,
    }
    return json.dumps(facts, indent=2, allow_nan=False)


def _plain(row: Row, result: TuneResult) -> dict[str, Any]:
    spread, candidate = row.spread, row.candidate
    return {
        "candidate": candidate.name,
        "keys": {".".join(map(str, key)): value for key, value in candidate.keys.items()},
        "environment": candidate.environ,
        "step_ms": round(spread.median * 1000, 4) if spread else None,
        "range_ms": [round(spread.low * 1000, 4), round(spread.high * 1000, 4)] if spread else None,
        "rounds_ms": [round(each * 1000, 4) for each in row.rounds],
        "ratio": round(row.ratio, 4) if row.ratio is not None else None,
        "round_ratios": [round(each, 4) for each in row.ratios],
        "examples_per_s": round(result.batch / spread.median, 1) if spread else None,
        "memory_bytes": row.memory_bytes or None,
        "losses": None if row.judgement is None else _losses(row, result),
        "equal": None if row.judgement is None else row.is_equal,
        "causes": row.causes,
        "is_16_bit": candidate.is_16_bit,
        "dropped": row.dropped,
        "failed": row.failed or None,
    }
