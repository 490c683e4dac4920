"""Interface between training code and strategies; training code never checks which strategy it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import keras

from distlaunch.data.batches import Batch, Share, Source
from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.local_model import LocalModel
from distlaunch.strategies.state import Logs, ShardSlice, State
from distlaunch.strategies.step_times import StepTimes

StepFunction = Callable[..., Any]


@dataclass(frozen=True)
class Steps:
    """The two step functions, called in each replica with its rows of a global batch.

    A step of a functional strategy (`jax`) also takes the state and returns the new one, as in Keras on JAX:
    `(state, batch) -> (scalars, state)`.

    Attributes:
        model: the Keras model; its metrics are reset, read and saved by the program.
        train: one optimizer step; returns a dict of scalars.
        test: one evaluation step; None if the model has neither a loss nor metrics to evaluate.
        logs: meaning of the scalars that `train` returns, if they are not the model's own metrics. `last`: values of
            the latest step, as in Keras `fit`. `mean`: contributions of each replica to a value of the global batch,
            which are summed over replicas and averaged over the epoch's steps.
        stop_at_nonfinite: whether a call of several steps ends after the first step whose loss is not finite.
        one_by_one: whether `train.steps_per_call` is 1, so that no call makes several steps.
        sample: returns up to the given number of rows of the first batch, for strategies that test how values add up.
        is_own: whether `train` is the step function of a user's `loop: custom`.
    """

    model: Any
    train: StepFunction
    test: StepFunction | None
    logs: Literal["last", "mean"] = "last"
    stop_at_nonfinite: bool = True
    one_by_one: bool = False
    sample: Callable[[int], Batch] | None = None
    is_own: bool = False


@dataclass(frozen=True)
class CallResult:
    """Result of one graph call.

    Attributes:
        steps: number of steps done.
        ended: whether the data of the epoch has ended.
        vote: the combined vote of all tasks.
        nonfinite: the first step, counted from 1 within this call, after which the loss or a checked weight is not
            finite; None if there is none.
        notes: messages for the user about findings before the first step.
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
    """Hooks around the batches of an evaluation, numbered from 0; `end` also gets the metrics so far.

    Attributes:
        limit: number of batches, from the first, around which the hooks are called; None for all.
    """

    begin: Callable[[int], None]
    end: Callable[[int, Logs], None]
    limit: int | None = None

    def has(self, batch: int) -> bool:
        """Return whether the hooks are called around a batch."""
        return self.limit is None or batch < self.limit


class Program(Protocol):
    """A model with its optimizer, placed under a strategy.

    The defaults are those of a program in which each process holds the whole model. A subclass sets `_local`, which
    predicts and evaluates in one process, and `_peers` if there are several processes.
    """

    _local: LocalModel
    _peers: Peers = Peers()

    def set_train_data(self, source: Source) -> None:
        """Set the endless source that subsequent training steps read from."""
        ...

    def run_steps(self, num_steps: int, vote: Vote) -> CallResult:
        """Run up to `num_steps` training steps in one graph call."""
        ...

    def evaluate(
        self,
        source: Source,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        hooks: BatchHooks | None = None,
    ) -> Logs | None:
        """Return the metrics over all rows of a source, or None if asked to stop.

        Args:
            source: a source that ends with an element without rows.
            hooks: called around each batch, which then is a separate graph call; passed in all tasks or in none.
        """
        ...

    def predict(self, source: Source, should_stop: Callable[[], bool]) -> Any | None:
        """Return the predictions for all rows of a source that ends, in order, or None if asked to stop.

        Every task gets all predictions, as host arrays in the structure of the model's outputs.
        """
        ...

    def reset_metrics(self) -> None: ...

    def skip_warmup(self) -> None:
        """Make the next steps like those after many steps, for which more may be compiled."""

    def recheck_metrics(self) -> list[str]:
        """Return warnings about the model's metrics that only a check after the first epoch can find."""
        return []

    def agree(self, vote: Vote) -> Vote:
        """Return the combined vote of all tasks; every task must call it."""
        return self._peers.agree(vote)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which the model predicts and evaluates in this process only."""
        return self._local.in_one_process()

    @property
    def is_split(self) -> bool:
        """True if processes hold different parts of the weights, so that `alone` works only inside `gathered`."""
        return False

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which this process has all current weights for `alone`; every task must call it."""
        return nullcontext()

    def finalize(self) -> None:
        """Set the model's final weights; see the module `final_weights`. Every task must call it."""
        ...

    def placement(self) -> list[dict[str, Any]]:
        """Return the places of variables, in the format of the event VariablesPlaced; empty if each task holds all."""
        return []

    def mesh(self) -> dict[str, Any] | None:
        """Return the mesh of devices, in the format of the event VariablesPlaced; None if there is none."""
        return None

    def snapshot(self) -> State:
        """Return all state by name, as host arrays that no later step changes; every task must call it."""
        ...

    def restore(self, state: State) -> None:
        """Restore a snapshot; every task must call this with the same snapshot.

        Raises:
            StateMismatchError: a variable is missing or has another shape.
        """
        ...


class Parts(Protocol):
    """Access to the state of a program if each of several processes holds a part of it.

    `post` and `collect` may be called in any thread.

    Attributes:
        rank: rank of this process; 0 is the chief.
        number: number of processes.
    """

    rank: int
    number: int

    def snapshot(self) -> tuple[State, Mapping[str, ShardSlice]]:
        """Return this process's part of the state, and the slices of the arrays that are shards.

        Every process must call it. The arrays are on the host, and no later step changes them. A shard that several
        processes hold is in the part of only one of them. Shards have their own names, which are the keys of the
        mapping.
        """
        ...

    def needed_blocks(self) -> Mapping[str, list[tuple[slice, ...]]]:
        """Return the blocks of split variables that this process needs to restore them."""
        ...

    def post(self, key: str, message: str) -> None:
        """Send the chief a message under a new key."""
        ...

    def collect(self, key: str, given_up: Callable[[], bool]) -> list[str] | None:
        """Return the messages that the others have posted under a key; for the chief only.

        They come in the order of ranks. The result is None once `given_up` returns True.
        """
        ...


class Strategy(Protocol):
    """A way to distribute training, created from its config section and the section `cluster`.

    The defaults are those of a strategy that changes nothing in the model, and whose processes communicate through
    `_peers`.

    Attributes:
        num_replicas: number of parts into which each global batch is divided.
    """

    num_replicas: int
    _peers: Peers = Peers()

    @property
    def is_chief(self) -> bool:
        """True if this is the process that writes the run's results."""
        return self._peers.is_chief

    @property
    def chief_host(self) -> str:
        """Address at which the other tasks reach the chief's host."""
        return self._peers.chief_host

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which models, optimizers and metrics are created."""
        ...

    def keep_compiled(self, folder: Path) -> None:
        """Set the folder in which compiled programs are kept for later attempts of the run."""

    def adopt(self, model: keras.Model) -> None:
        """Prepare a model whose variables exist, before its optimizer creates variables."""

    def program(self, steps: Steps) -> Program: ...

    def from_chief(self, message: bytes) -> bytes:
        """Return the chief's message in every task; every task must call it."""
        return self._peers.from_chief(message)

    def gather(self, message: str) -> dict[str, str]:
        """Return the message of each task that trains, by the task's name; every task must call it."""
        return dict(zip(self._peers.names, self._peers.gather(message), strict=True))

    def share(self) -> Share:
        """Return this process's share of each global batch, if the processes read different examples.

        Raises:
            ConfigError: several processes compute the same rows, so they cannot read different examples.
        """
        return Share(self._peers.rank, self._peers.number)

    def parts(self) -> Parts | None:
        """Return access to the parts of the state, or None if each process has all. Call it after `program`."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user on how the strategy placed the model. Call it after `program`."""
        return []

    def leave(self) -> None:
        """Wait until no task needs this process any longer. It is the last call of a process that has not failed."""
        self._peers.leave()
