"""Trains parity cases and records each step's values. As a script, this is one task of a job that trains all cases.

TF_CONFIG=... python -m tests.parity.train_case RESULTS.json CASE...
STRATEGY='{"strategy": ..., "cluster": ...}' python -m tests.parity.train_case RESULTS.json CASE...
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras

from distlaunch.base.events import EpochEnded, Event, StepsDone
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import RunConfig
from distlaunch.data.source import make_split, make_splits
from distlaunch.data.split import Split
from distlaunch.data.splits import Splits, read_splits
from distlaunch.strategies.factory import create
from distlaunch.strategies.parameter_server.numbered_batches import offer_splits
from distlaunch.strategies.protocol import Strategy
from distlaunch.training.build import build_model
from distlaunch.training.loop import LoopHooks, TrainingLoop
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.trials.recorder import nudge_weights
from tests.parity.cases import CASES

Record = dict[str, Any]
WATCHED = "mlp sgd, uneven"
"""The case in which the batches of validation are recorded too, as a callback sees them."""


class Validation(keras.callbacks.Callback):
    """Records the metrics after each batch, as one more step."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._record["steps"].append({"batch": float(batch), **logs})


class PreparedCase:
    """A case under a strategy, built and traced once and trained as often as asked for.

    Args:
        case: the name of one, or its config.
        config: its strategy and cluster, where the case is not trained on one device.
        repeats: whether it is to be trained more than once.
    """

    def __init__(
        self,
        case: str | dict[str, Any],
        strategy: Strategy,
        *,
        steps_per_call: int | str = "auto",
        log_every_steps: int | None = 1,
        config: RunConfig | None = None,
        repeats: bool = False,
    ) -> None:
        raw = copy.deepcopy(CASES[case] if isinstance(case, str) else case)
        if config is not None:
            raw.update(strategy=config.strategy, cluster=config.cluster)
        raw["train"].update(steps_per_call=steps_per_call, log_every_steps=log_every_steps)
        self._is_watched = case == WATCHED and strategy.is_chief
        if case == WATCHED:
            raw["train"]["callbacks"] = [{"name": "CSVLogger"}]  # so that all processes ask whether one watches
        config = RunConfig.model_validate(raw)
        keras.utils.clear_session(free_memory=False)  # collecting garbage took a third of the time
        keras.utils.set_random_seed(config.seed)
        splits = read_splits(config.data)
        self._train, self._validation = _splits_of(config, splits)
        if config.strategy.kind == "parameter_server":
            offer_splits(config, splits, *make_splits(splits, config, on_host=True))
            if self._train.num_batches is None:  # it must be said there
                raw["train"]["steps_per_epoch"] = 13
                config = RunConfig.model_validate(raw)
        self._config = config
        self._model = build_model(config, strategy, self._train.first_rows(2))
        self._program = strategy.program(make_steps(config, self._model, self._train.first_rows))
        self._first = self._program.snapshot() if repeats else None
        self._is_first_time = True

    def train(self, *, permute: int = 0, rounded: int = 0) -> Record:
        """Logs of every step, and the final weights.

        Args:
            permute, rounded: not 0: a noise run, of permuted examples, or from first weights moved in the last digit.
        """
        config, program, record = self._config, self._program, Record(steps=[], epochs=[])
        assert self._is_first_time or self._first is not None
        if rounded or not self._is_first_time:
            first = program.snapshot() if self._first is None else self._first
            program.restore(nudge_weights(first, rounded) if rounded else first)
        self._is_first_time = False
        train, validation = self._train, self._validation
        if permute:
            data = config.data.model_copy(update={"args": {**config.data.args, "permute": permute}})
            train, validation = _splits_of(config.model_copy(update={"data": data}), read_splits(data))

        def emit(event: Event) -> None:
            if isinstance(event, StepsDone):
                record["steps"].append(event.logs)
            if isinstance(event, EpochEnded):
                record["epochs"].append(event.logs)

        hooks = LoopHooks(emit, lambda: False, store=CheckpointStore(Path("unused")), is_chief=False)
        callbacks: list[keras.callbacks.Callback] = [Validation(record)] if self._is_watched else []
        TrainingLoop(config, self._model, program, train, validation, callbacks, hooks).run(Progress())
        state, placement = program.snapshot(), program.placement()
        record["weights"] = {name: value.tolist() for name, value in state.items() if name.startswith("model/")}
        record["shards"] = sum(len(placed["parts"]) > 1 for placed in placement if any(placed.get("layout", [1])))
        return record


def _splits_of(config: RunConfig, splits: Splits) -> tuple[Split, Split | None]:
    """Return the training split and the validation split, which may be None."""
    train = make_split(splits.train, config.data, seed=0, training=True)
    if splits.validation is None:
        return train, None
    return train, make_split(splits.validation, config.data, seed=0, training=False)


def train_case(case: str | dict[str, Any], strategy: Strategy, **options: Any) -> Record:
    """Train a case once and return its record. The options are those of `PreparedCase`."""
    return PreparedCase(case, strategy, **options).train()


def main() -> None:
    results, *names = sys.argv[1:]
    records: dict[str, Record] = {}
    if "STRATEGY" in os.environ:
        job = json.loads(os.environ["STRATEGY"])
    else:
        job = {"strategy": {"kind": "multi_worker_mirrored"}, "cluster": {"workers": 2}}
    config = RunConfig.model_validate({**CASES["mlp adam"], **job})
    strategy = create(config)
    for name in names:
        records[name] = train_case(name, strategy, config=config)
    if strategy.is_chief:
        Path(results).write_text(json.dumps(records))
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
