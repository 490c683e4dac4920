"""Which epoch's checkpoint is the best one, by a value that training or validation reports."""

from __future__ import annotations

import math
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import Best
from distlaunch.strategies.protocol import Logs

_KEY = ("checkpoint", "best", "metric")


class BestEpoch:
    """Remembers the best value; another metric or mode than a checkpoint's begins anew.

    Args:
        section: None: no best checkpoint is kept.
    """

    def __init__(self, section: Best | None) -> None:
        self._section = section
        self.record: dict[str, Any] | None = None
        """The best so far, as checkpoints have it: metric, mode, value."""
        self._before: dict[str, Any] | None = None

    def restore(self, record: dict[str, Any] | None) -> None:
        """Goes on from what a checkpoint says."""
        section = self._section
        same = section is not None and record is not None and {**record, "value": 0} == self._record(0)
        self.record = record if same else None

    def check(self, *, has_validation: bool) -> None:
        """Raises ConfigError, before training, for a value that only validation gives, if there is none."""
        section = self._section
        if section is not None and section.metric.startswith("val_") and not has_validation:
            message = f"got '{section.metric}', but there is no validation; use a value of training, such as loss"
            raise ConfigError(Problem(_KEY, message))

    def improves(self, logs: Logs, *, validated: bool) -> bool:
        """Whether an epoch is better than all before it; then it is remembered.

        Args:
            validated: whether there was validation after it.

        Raises:
            ConfigError: there is no such value.
        """
        section = self._section
        if section is None:
            return False
        value = logs.get(section.metric)
        if value is None:
            # an epoch without validation (`validation.every_epochs`) cannot be the best
            if section.metric.startswith("val_") and not validated:
                return False
            message = f"got '{section.metric}', which this run does not have; it has {', '.join(sorted(logs))}"
            raise ConfigError(Problem(_KEY, message))
        sign = 1 if section.mode == "max" else -1
        best = -math.inf if self.record is None else sign * self.record["value"]
        if not sign * value > best:  # nor does NaN
            return False
        self._before, self.record = self.record, self._record(value)
        return True

    def lose(self) -> None:
        """The checkpoint of the best epoch could not be written: the one before is the best that is kept."""
        self.record = self._before

    def _record(self, value: float) -> dict[str, Any]:
        assert self._section is not None
        return {"metric": self._section.metric, "mode": self._section.mode, "value": value}
