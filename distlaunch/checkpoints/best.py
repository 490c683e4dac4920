"""Selects the checkpoint of the best epoch by a value that training or validation reports."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.metric_names import falls
from distlaunch.checkpoints.policy import Moment, SaveContext, SavePolicy
from distlaunch.config.run import Best
from distlaunch.strategies.protocol import Logs

_KEY = ("checkpoint", "best", "metric")


class BestEpoch(SavePolicy):
    """Saves after an epoch that is better than all before it, and remembers the best value.

    Args:
        section: config section; None to keep no best checkpoint.
    """

    asks_chief_only = True

    def __init__(self, section: Best | None) -> None:
        self._section = section
        self._records: list[dict[str, Any]] = []
        """Records of all best epochs, each better than those before it."""

    @property
    def record(self) -> dict[str, Any] | None:
        """The best epoch so far, as stored in checkpoints: metric, mode, value."""
        return next(reversed(self._records), None)

    def __str__(self) -> str:
        assert self._section is not None
        return f"{self._section.metric} ({self._section.mode})"

    def restore(self, record: dict[str, Any] | None) -> None:
        """Continue from the record of a checkpoint, if it has the same metric and mode."""
        section = self._section
        same = section is not None and record is not None and {**record, "value": 0} == self._record(0)
        self._records = [record] if record is not None and same else []

    def in_history(self, history: Mapping[str, Sequence[float]], epochs: int) -> tuple[int | None, float] | None:
        """Return the number of the best finished epoch, from 1, and its value; None if there is none.

        The number is None if there are fewer values than epochs, since the epoch of each value is then unknown.
        """
        section = self._section
        values = history.get(section.metric, ()) if section is not None else ()
        finite = [(number, value) for number, value in enumerate(values, 1) if math.isfinite(value)]
        if not finite:
            return None
        # the first of equal values, as during training
        number, value = max(finite, key=lambda each: self._rank(each[1]))
        return number if len(values) == epochs else None, value

    def take(self, value: float) -> None:
        """Remember the value of an earlier epoch as the best so far."""
        self._records = [self._record(value)]

    def check(self, *, has_validation: bool) -> None:
        """Raise ConfigError, before training, if the value needs validation, but there is none."""
        section = self._section
        if section is not None and section.metric.startswith("val_") and not has_validation:
            message = f"got '{section.metric}', but there is no validation; use a training value, such as loss"
            raise ConfigError(Problem(_KEY, message))

    def check_names(self, logs: Logs, *, is_alike: bool) -> None:
        """Raise ConfigError, after the first steps, if no epoch will have the value.

        Args:
            logs: values that the steps report.
            is_alike: whether validation reports the same values.
        """
        section = self._section
        # some programs report nothing before the end of an epoch
        if section is None or not logs or section.metric in logs:
            return
        is_validated = section.metric.startswith("val_")
        if is_validated and (not is_alike or section.metric.removeprefix("val_") in logs):
            return
        names = sorted([*logs, *(f"val_{name}" for name in logs if is_validated)])
        raise ConfigError(Problem(_KEY, _unknown(section.metric, names)))

    def should_save(self, at: SaveContext) -> bool:
        """Return whether an epoch is better than all before it.

        Raises:
            ConfigError: the epoch does not have the value.
        """
        section = self._section
        if section is None or at.moment is not Moment.EPOCH_END:
            return False
        value = at.logs.get(section.metric)
        if value is None:
            # an epoch without validation (`validation.every_epochs`) cannot be the best
            if section.metric.startswith("val_") and not at.is_validated:
                return False
            raise ConfigError(Problem(_KEY, _unknown(section.metric, sorted(at.logs))))
        record = self.record
        best = -math.inf if record is None else self._rank(record["value"])
        return self._rank(value) > best  # never for NaN

    def keep(self, at: SaveContext) -> None:
        """Remember an epoch that is saved as the best."""
        assert self._section is not None
        self._records.append(self._record(at.logs[self._section.metric]))

    def forget(self, record: dict[str, Any]) -> None:
        """Forget a best epoch whose checkpoint could not be written; a later one may be better already."""
        with contextlib.suppress(ValueError):
            self._records.remove(record)

    def _rank(self, value: float) -> float:
        """Return a number that is higher for a better value."""
        assert self._section is not None
        return value if self._section.mode == "max" else -value

    def _record(self, value: float) -> dict[str, Any]:
        assert self._section is not None
        return {"metric": self._section.metric, "mode": self._section.mode, "value": value}


def mode_warnings(section: Best | None) -> list[str]:
    """Return a warning if a section would keep the worst epoch, judging by the metric's name."""
    if section is None:
        return []
    is_falling = falls(section.metric)
    if is_falling is None or (section.mode == "min") == is_falling:
        return []
    which, other = ("highest", "min") if is_falling else ("lowest", "max")
    return [f"checkpoint.best keeps the epoch with the {which} {section.metric}; for the best one, set `mode: {other}`"]


def _unknown(metric: str, names: Sequence[str]) -> str:
    return f"got '{metric}', which this run does not have; it has {', '.join(names)}"
