"""What a strategy offers to training code. Training code never asks which strategy it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import keras

from distlaunch.cluster.spec import Task
from distlaunch.data.batches import Batch, Share, Source
from distlaunch.strategies.state import ShardSlice, State
from distlaunch.strategies.step_times import StepTimes

Logs = dict[str, float]
StepFunction = Callable[..., Any]


@dataclass(frozen=True)
class Steps:
    """The two step functions, called in each replica with its rows of a global batch; a step of functional strategies
    (`jax`) takes the state too and returns the new one, as in Keras on JAX: `(state, batch) -> (scalars, state)`.

    Attributes:
        model: the Keras model; its metrics are reset, read and saved by the program.
        train: one optimizer step; returns a dict of scalars.
        test: one evaluation step; None where the model has no loss and no metrics to evaluate.
        logs: what the scalars returned by `train` mean, if they are not the model's own metrics. `last`: values of the
            latest step, as in Keras `fit`. `mean`: each replica's share of a value of the whole batch; they are summed
            over replicas and averaged over the epoch's steps.
        stop_at_nonfinite: a call of several steps ends with the first whose loss is not finite.
        sample: up to so many rows of the first batch, for strategies that have to try how values add up.
    """

    model: Any
    train: StepFunction
    test: StepFunction | None
    logs: Literal["last", "mean"] = "last"
    stop_at_nonfinite: bool = True
    sample: Callable[[int], Batch] | None = None


@dataclass(frozen=True)
class Vote:
    """The vote of one task. All tasks learn the sum, and so decide alike."""

    stop: bool = False
    """Stop the run after this call (a signal came)."""
    finish: bool = False
    """Training is done (a callback set `stop_training`)."""
    next_steps: int = 0
    """How many steps the next call should have; the chief's wish counts."""
    save: bool = False
    """Save a checkpoint after this call; the chief's wish counts, whose clock says when."""


@dataclass(frozen=True)
class CallResult:
    """One graph call: `steps` were done, `ended` if the data of the epoch ran out; `vote` is that of all tasks.

    `nonfinite` is the number in this call, from 1, of the first step whose loss, or a weight after it, is not finite as
    far as that is looked at; None: all were. `notes` say what was found out before the first step.
    """

    steps: int
    ended: bool
    logs: Logs
    vote: Vote
    nonfinite: int | None = None
    times: StepTimes = field(default_factory=StepTimes)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class BatchHooks:
    """What is called around the batches of an evaluation, with their number from 0; `end` with the metrics so far."""

    begin: Callable[[int], None]
    end: Callable[[int, Logs], None]


class Program(Protocol):
    """A model with its optimizer, placed under a strategy."""

    def set_train_data(self, source: Source) -> None:
        """From now on steps read this endless source."""
        ...

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        """Up to `num_steps` training steps in one graph call."""
        ...

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        """Metrics over all rows of a source that ends (an element with no rows). None if asked to stop.

        Args:
            hooks: called around each batch, which takes a call of its own then; of all tasks or of none.
        """
        ...

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        """What the model predicts for all rows of a source that ends, in their order: host arrays in the structure of
        its outputs, in every task. None if asked to stop."""
        ...

    def reset_metrics(self) -> None: ...

    def second_look(self) -> list[str]:
        """Return what a second look at the model, after its first epoch, shows to be wrong about its metrics."""
        ...

    def agree(self, vote: Vote) -> Vote:
        """The sum of all tasks' votes; every task must call it."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Within it, the model predicts and evaluates in this process alone."""
        ...

    @property
    def is_split(self) -> bool:
        """Return True if processes hold different parts of weights, and need `gathered` for `alone`."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Within it, this process has all weights for `alone`, as they are now; every task must call it."""
        ...

    def finalize(self) -> None:
        """Put the final weights into the model, see `final_weights`; every task must call it."""
        ...

    def placement(self) -> list[dict[str, Any]]:
        """Which task holds which variable, as the event VariablesPlaced has it; empty if each holds all."""
        ...

    def mesh(self) -> dict[str, Any] | None:
        """The mesh of devices, as the event VariablesPlaced has it; None if there is none."""
        ...

    def snapshot(self) -> State:
        """All state by name, as host arrays that no later step changes; every task must call it."""
        ...

    def restore(self, state: State) -> None:
        """Puts a snapshot back. Every task must call it, with the same.

        Raises:
            StateMismatchError: a variable is missing or has another shape.
        """
        ...


class ProgramDefaults:
    """What a program does whose model lies whole in each process that trains.

    A subclass sets `_local`, the `LocalModel` by which the model computes alone.
    """

    _local: Any
    is_split = False

    def second_look(self) -> list[str]:
        return []

    def agree(self, vote: Vote) -> Vote:
        return vote

    def alone(self) -> AbstractContextManager[None]:
        return self._local.active()

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def placement(self) -> list[dict[str, Any]]:
        return []

    def mesh(self) -> dict[str, Any] | None:
        return None


class Parts(Protocol):
    """The state of a program as each of several processes holds a part of it.

    `post` and `collect` may be called in any thread.

    Attributes:
        rank: place of this process; 0 is the chief.
        number: of the processes.
    """

    rank: int
    number: int

    def snapshot(self) -> tuple[State, Mapping[str, ShardSlice]]:
        """This process's share of all state, as host arrays that no later step changes; every process must call it.

        Each part of a variable is in the share of one process that holds it. Arrays that are parts have names of their
        own; the mapping says what they are.
        """
        ...

    def needed_blocks(self) -> Mapping[str, list[tuple[slice, ...]]]:
        """Which blocks of split variables this process needs to restore them."""
        ...

    def post(self, key: str, message: str) -> None:
        """Tells the chief something under a key that no message had before."""
        ...

    def collect(self, key: str, given_up: Callable[[], bool]) -> list[str] | None:
        """On the chief, what all others have posted under a key, in their order; None if that is given up before."""
        ...


class Strategy(Protocol):
    """A way to distribute training."""

    kind: str
    num_replicas: int
    task: Task
    is_chief: bool

    @property
    def chief_host(self) -> str:
        """The address at which the other tasks reach the chief's host."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Models, optimizers and metrics are created inside."""
        ...

    def keep_compiled(self, folder: Path) -> None:
        """Programs that take long to compile are kept there, and found by a later attempt of the run."""
        ...

    def adopt(self, model: keras.Model) -> None:
        """Takes a model whose variables exist, before its optimizer gets any."""
        ...

    def program(self, steps: Steps) -> Program: ...

    def from_chief(self, message: bytes) -> bytes:
        """The chief's message, in every task; every task must call it."""
        ...

    def gather(self, message: str) -> dict[str, str]:
        """What each task that trains says, by its name, in every one; every task must call it."""
        ...

    def share(self) -> Share:
        """This process's part of each global batch, where processes have different examples.

        Raises:
            ConfigError: they cannot, since several processes work on the same rows.
        """
        ...

    def parts(self) -> Parts | None:
        """The parts of the program's state, where several processes hold some; asked for after `program`."""
        ...

    def notes(self) -> list[str]:
        """What the user should know of how the strategy placed the model; asked for after `program`."""
        ...

    def leave(self) -> None:
        """Waits until no task needs this process any more; the last thing before it ends, if nothing has failed."""
        ...


class StrategyDefaults:
    """What a strategy does that has one process with a model, and leaves the model as it is."""

    @property
    def chief_host(self) -> str:
        return "127.0.0.1"

    def keep_compiled(self, folder: Path) -> None: ...

    def adopt(self, model: keras.Model) -> None: ...

    def from_chief(self, message: bytes) -> bytes:
        return message

    def gather(self, message: str) -> dict[str, str]:
        return {"": message}

    def share(self) -> Share:
        return Share()

    def parts(self) -> Parts | None:
        return None

    def notes(self) -> list[str]:
        return []

    def leave(self) -> None: ...
