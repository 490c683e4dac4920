"""The plan and the result of a trial of `chaos.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from chaos_runs import EPOCHS, STEPS_PER_EPOCH, STRATEGIES

FAULTS = (
    "kill", "kill_saving", "stop", "pause", "term_task", "term_job", "int_job", "exit1", "exception", "truncate",
    "full_disk", "port_taken", "lost_launcher", "warm_lost",
)  # fmt: skip
KILLS = ("kill", "kill_saving", "warm_lost")


@dataclass(frozen=True)
class Trial:
    """The fault of a trial, its run, and its time."""

    seed: int
    strategy: str
    fault: str
    victim: str
    step: int
    restarts: int

    @staticmethod
    def draw(seed: int, strategies: tuple[str, ...], faults: tuple[str, ...]) -> Trial:
        rng = random.Random(seed)
        strategy, fault = rng.choice(strategies), rng.choice(faults)
        tasks = STRATEGIES[strategy][1]
        if fault == "port_taken" and len(tasks) == 1:
            fault = "kill"
        # only the coordinator runs callbacks and writes checkpoints
        candidates = tasks[:1] if fault in ("full_disk", "kill_saving") else tasks
        if strategy == "parameter_server" and fault in ("exit1", "exception"):
            candidates = tasks[:1]
        step = rng.randrange(1, round(EPOCHS * STEPS_PER_EPOCH * 0.8))
        return Trial(seed, strategy, fault, rng.choice(candidates), step, rng.randrange(2))


@dataclass
class Result:
    """The result of a trial.

    Attributes:
        outcome: how the disturbed command ended.
        detected_s: seconds from the fault to the first message about it.
        violations: conditions that do not hold; empty on success.
    """

    trial: Trial
    outcome: str = ""
    detected_s: float | None = None
    violations: list[str] = field(default_factory=list)
