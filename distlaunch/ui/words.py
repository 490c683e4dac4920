"""Formats numbers, times and sizes for users."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def number(value: float) -> str:
    """Format a number with four decimals (0.001 to 10) or four significant digits: `0.1234`, `12.35`, `3.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 10 else f"{value:.4g}"


def value(logged: object) -> str:
    """Format a logged value of any kind; None gives an empty string."""
    if logged is None:
        return ""
    return number(logged) if isinstance(logged, int | float) else str(logged)


def metrics(logs: Mapping[str, float]) -> str:
    """Format metrics, each with its validation value: `loss 0.1234, val 0.2345  accuracy 0.9876`."""
    parts: list[str] = []
    for name in dict.fromkeys(name.removeprefix("val_") for name in logs):
        train, validation = logs.get(name), logs.get(f"val_{name}")
        if train is None and validation is not None:
            parts.append(f"val_{name} {number(validation)}")
        elif train is not None:
            parts.append(f"{name} {number(train)}" + (f", val {number(validation)}" if validation is not None else ""))
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds: `3.2 s`, `1 min 23 s`, `2 h 05 min`."""
    # 59.96 would be rounded to `60.0 s`
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def clock(seconds: float) -> str:
    """Format seconds as a clock: `0:07`, `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def size(num_bytes: int) -> str:
    """Format bytes: `512 B`, `1.2 MB`."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        # units of 1000, as for disks and networks
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def shape(sizes: Sequence[int]) -> str:
    """Format a shape: `784 x 128`, `scalar`."""
    return " x ".join(f"{size}" for size in sizes) or "scalar"


def rate(steps_per_s: float) -> str:
    return f"{steps_per_s:.0f} steps/s" if steps_per_s >= 10 else f"{steps_per_s:.2g} steps/s"


def times(how_often: int) -> str:
    """Return `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(how_often, f"{how_often:,} times")
