"""Decides which of a checkpoint's optimizer values are used when a run resumes with other settings.

A checkpoint records how each optimizer was built at the start of its attempt, before callbacks could change it. If an
optimizer is built with another value now, the user has changed it, and the new value is used. Otherwise the stored
value, which a callback may have changed, is used. Attributes such as `momentum` are not restored, so their new values
are used in any case.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np

from distlaunch.base.plural import count
from distlaunch.patches.keras_private import learning_rate_of, raw_counter
from distlaunch.strategies.state import State, StateMismatchError
from distlaunch.strategies.variables import (
    WEIGHTS,
    host_value,
    is_slot,
    named_optimizers,
    optimizers_of,
    slot_stem,
    state_variables,
    with_wrapped_optimizers,
)

RATE = "learning_rate"
_COUNTER = "iteration"
_ALWAYS_KEPT = (_COUNTER, RATE)
"""Variables with the same meaning in every optimizer."""
_CORRECT_BIAS = {"Adam", "Adamax", "Nadam", "Lamb"}
"""Classes that divide by what `beta ** iteration` leaves, so that averages which started at 0 count fully at once."""
_UNSAID = ("name", "built", "inner_optimizer")
_AVERAGE = "_average"
"""Suffix of the names of moving averages of weights (`use_ema`)."""


@dataclass(frozen=True)
class BuiltOptimizer:
    """Description of an optimizer as it was built.

    Attributes:
        word: first part of the names of its variables.
        name: name of the optimizer, which is the second part of the names of its variables.
        classes: names of its class and of the base classes below Keras's `Optimizer`.
        settings: attributes that are numbers, strings, bools or None.
        rate: description of the learning rate if it is not a number.
        values: values of its variables that are single numbers.
    """

    word: str
    name: str
    classes: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    rate: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def is_like(self, other: BuiltOptimizer) -> bool:
        """Return whether variables with the same name have the same meaning in both."""
        return other.classes[0] in self.classes or self.classes[0] in other.classes

    @property
    def wraps(self) -> bool:
        """True if this optimizer wraps others, which have the learning rate."""
        return bool({"LossScaleOptimizer", "MultiOptimizer"} & set(self.classes))

    def prefix(self) -> str:
        return f"{self.word}/{self.name}/"


def describe_optimizers(model: keras.Model) -> list[dict[str, Any]]:
    """Return descriptions of a model's optimizers as JSON types; call this before values are restored."""
    return [built.to_plain() for built, _ in _built(model)]


@dataclass(frozen=True)
class CarriedOver:
    """State with which a resumed run begins.

    Attributes:
        state: the checkpoint's state, with the values that the optimizers get.
        notes: messages for the user, one for each optimizer.
        new_rates: optimizers with a new learning rate, and the rate.
    """

    state: State
    notes: list[str]
    new_rates: list[tuple[Any, float]]


def carry_over(
    model: keras.Model,
    recorded: Sequence[Mapping[str, Any]],
    now: Sequence[Mapping[str, Any]],
    state: State,
    source: str,
) -> CarriedOver:
    """Decide which values the optimizers of a model take from a checkpoint.

    Args:
        recorded: result of `describe_optimizers` in the attempt that wrote the checkpoint.
        now: result of `describe_optimizers` in this attempt.
        state: the checkpoint's state.
        source: config key that defines the optimizer in this attempt.

    Raises:
        StateMismatchError: the number of optimizers differs, or one has no variables yet.
    """
    old, new = ([BuiltOptimizer(**plain) for plain in listed] for listed in (recorded, now))
    parts = [part for _, part in _parts(model)]
    _check_number(model, state)
    found = {name: value for name, value in state.items() if not is_slot(name)}
    names = [name for name in state_variables(model) if is_slot(name)]
    notes, rates, used = [], [], set()
    pairs = _aligned(old, new)
    for part, built in zip(parts, new, strict=True):
        before = pairs.get((built.word, built.name))
        report = _Report(part, built, before, source, state)
        own = [name for name in names if name.startswith(built.prefix())]
        for name in own:
            report.take(name, found, used)
        notes.extend(report.line(single=len(parts) == 1))
        rates.extend((part, value) for value in report.new_rate)
    # variables whose names do not contain the optimizer's name, such as one of Nadam
    for name in names:
        if name in state and name not in found and not any(name.startswith(one.prefix()) for one in new):
            found[name] = state[name]
            used.add(name)
    _start_averages(model, found, state)
    left = sorted(name for name in state if is_slot(name) and name not in used and not _is_single(state[name]))
    if left:
        notes.append(f"{count(len(left), 'optimizer variable')} of the checkpoint not used: {_some(left)}")
    return CarriedOver(found, notes, rates)


class _Report:
    """Selects an optimizer's values, and describes them for the user."""

    def __init__(
        self, part: Any, built: BuiltOptimizer, before: BuiltOptimizer | None, source: str, state: State
    ) -> None:
        self._part, self._built, self._before, self._source, self._state = part, built, before, source, state
        self.new_rate: list[float] = []
        self._said: list[str] = []
        self._fresh: list[str] = []
        self._counts_on = False

    def take(self, name: str, found: State, used: set[str]) -> None:
        """Put the value of a variable into `found`, or leave the variable out, so that it keeps its initial value."""
        built, before = self._built, self._before
        short = name.removeprefix(built.prefix())
        stored = name if before is None else before.prefix() + short
        if before is not None and not built.is_like(before):
            # with a counter of many updates, the new averages of Adam would count as if they had seen them all
            if short == _COUNTER and built.rate is None:
                return
            if short not in _ALWAYS_KEPT:
                self._fresh.append(short)
                return
        value = self._state.get(stored)
        if value is None:
            if short not in _ALWAYS_KEPT:
                self._fresh.append(short)
            if short == RATE:
                self._rate(None)
            return
        used.add(stored)
        self._counts_on |= short == _COUNTER and int(value) > 0
        was, now = (before.values.get(short) if before is not None else None), built.values.get(short)
        if was is not None and now is not None and was != now:
            found[name] = np.asarray(now, value.dtype)
            self._changed(short, was, now, float(value))
            return
        found[name] = value
        if short == RATE:
            self._rate(float(value))

    def _changed(self, short: str, was: float, now: float, stored: float) -> None:
        held = "" if stored == was else f" and ended with {stored:g}"
        words = short.replace("_", " ")
        self._said.append(f"{words} {now:g} from {self._source} (the checkpoint's attempt began with {was:g}{held})")
        if short == RATE and not self._built.wraps:
            self.new_rate.append(now)

    def _rate(self, stored: float | None) -> None:
        built = self._built.values.get(RATE)
        if self._built.wraps:
            return
        if stored is None:
            if built is None:
                return
            self.new_rate.append(built)
            was = self._before.rate if self._before is not None else None
            self._said.append(f"learning rate {built:g} from {self._source}" + (f", instead of {was}" if was else ""))
        elif built is None or stored == built:
            self._said.append(f"learning rate {stored:g}, as in the checkpoint")
        else:
            self._said.append(f"learning rate {stored:g} from the checkpoint (training had changed it from {built:g})")

    def line(self, *, single: bool) -> Iterator[str]:
        built, before = self._built, self._before
        if built.rate is not None:
            self._schedule()
        if before is not None:
            if built.classes[0] != before.classes[0]:
                self._said.append(f"{built.classes[0]} instead of {before.classes[0]}")
            names = sorted({*before.settings, *built.settings}) if built.is_like(before) else []
            for name in names:
                was, now = before.settings.get(name), built.settings.get(name)
                if was != now:
                    self._said.append(f"{name} {now} from {self._source}, instead of {was}")
        if self._fresh:
            number = count(len(self._fresh), "variable")
            self._said.append(f"{number} not in the checkpoint, initialized: {_some(self._fresh)}")
            starts_anew = any("_momentum" in name for name in self._fresh)
            if starts_anew and self._counts_on and _CORRECT_BIAS & set(built.classes):
                self._said.append(
                    "their first updates may be 6 times as large as usual, because the count of updates goes on"
                )
        if self._said and self._has_counted():
            label = built.classes[0] if single else f"{built.classes[0]} ({built.prefix().rstrip('/')})"
            yield f"resumed {label}: {'; '.join(self._said)}"

    def _has_counted(self) -> bool:
        """Return whether a step has used the optimizer; True if that is unknown.

        No step uses the default optimizer that `compile()` makes if the model's own step has other optimizers.
        """
        step = self._state.get((self._before or self._built).prefix() + "iteration")
        return step is None or int(step) > 0

    def _schedule(self) -> None:
        built, before = self._built, self._before
        was = None
        if before is not None and before.rate != built.rate:
            number = before.values.get(RATE)
            was = before.rate or (None if number is None else f"{number:g}")
        step = self._state.get((before or built).prefix() + "iteration")
        at = f" at update {int(step):,}" if step is not None else ""
        instead = f", instead of {was}" if was else ""
        self._said.append(f"learning rate {built.rate}{at}, from {self._source}{instead}")


def _start_averages(model: keras.Model, found: State, state: State) -> None:
    """Set averages that the checkpoint lacks to the checkpoint's weights, since zeros would distort them."""
    names = list(state_variables(model))
    missing = {name for name in names if is_slot(name) and _split_number(name)[0].endswith(_AVERAGE)} - found.keys()
    if not missing:
        return
    # layers may have equal names, and so may their weights and averages, up to a number such as `#2`
    flat: dict[tuple[str, str], str] = {}
    for name in names:
        if name.startswith(f"{WEIGHTS}/"):
            path, number = _split_number(name.removeprefix(f"{WEIGHTS}/"))
            flat[slot_stem(path), number] = name
    for built, _ in _built(model):
        for name in missing:
            path, number = _split_number(name.removeprefix(built.prefix()))
            weight = flat.get((path.removesuffix(_AVERAGE), number))
            if name.startswith(built.prefix()) and weight in state:
                found[name] = state[weight]


def _split_number(name: str) -> tuple[str, str]:
    """Return the name of a variable without its number among equal names, and that number, such as `#2` or ``."""
    path, mark, number = name.rpartition("#")
    return (path, mark + number) if number.isdigit() and mark else (name, "")


def optimizers_text(optimizers: Sequence[Mapping[str, Any]], *, with_rates: bool) -> str:
    """Return a short text for the result of `describe_optimizers`, such as `SGD, learning rate 0.01`."""
    built = [one for one in (BuiltOptimizer(**plain) for plain in optimizers) if not one.wraps]
    texts = []
    for one in built:
        number = one.values.get(RATE)
        rate = one.rate or (None if number is None else f"{number:g}")
        texts.append(one.classes[0] + (f", learning rate {rate}" if rate and with_rates else ""))
    return " + ".join(texts)


def current_rate(model: keras.Model) -> float | None:
    """Return the learning rate of the compiled optimizer's next update; None if it has none, several, or a function."""
    optimizer = getattr(model, "optimizer", None)
    parts = [] if optimizer is None else list(with_wrapped_optimizers(optimizer))
    own = [part for part in parts if len(list(with_wrapped_optimizers(part))) == 1]
    if len(own) != 1:
        return None
    rate = learning_rate_of(own[0])
    if isinstance(rate, keras.Variable):
        return float(host_value(rate))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        # with accumulated gradients, Keras's schedules follow the number of steps, and not of updates
        value: Any = keras.ops.convert_to_numpy(rate(host_value(raw_counter(own[0]))))
        return float(value)
    return None


@contextlib.contextmanager
def unchanged_rates(model: keras.Model) -> Iterator[None]:
    """Restore the learning rates of all optimizers when the context ends, except those that became schedules."""
    parts = itertools.chain.from_iterable(map(with_wrapped_optimizers, optimizers_of(model)))
    rates = [rate for part in parts if isinstance(rate := learning_rate_of(part), keras.Variable)]
    values = list(map(host_value, rates))
    yield
    for rate, value in zip(rates, values, strict=True):
        if host_value(rate) != value:
            rate.assign(value)


def loss_text(loss: Any) -> str:
    """Return a short text for the loss with which a model is compiled."""
    if loss is None or isinstance(loss, str):
        return loss or ""
    if isinstance(loss, dict):
        return ", ".join(f"{name}: {loss_text(one)}" for name, one in loss.items())
    if isinstance(loss, (list, tuple)):
        return ", ".join(map(loss_text, loss))
    return getattr(loss, "__name__", type(loss).__name__)


def _check_number(model: keras.Model, state: State) -> None:
    named = named_optimizers(model)
    stored = {name.partition("/")[0] for name in state if is_slot(name)}
    for word in sorted(stored - set(named)):
        raise StateMismatchError(
            f"it has values of {len(stored)} optimizers, but the model has {len(named)}; the model lacks '{word}'"
        )
    for word, optimizer in named.items():
        if stored and word not in stored:
            raise StateMismatchError(f"it has values of {len(stored)} optimizers, but the model has {len(named)}")
        slots = [name for name in state if name.startswith(f"{word}/") and not _is_single(state[name])]
        if slots and not optimizer.built:
            message = (
                f"it has {count(len(slots), 'value')} for the optimizer '{optimizer.name}', which has no variables"
            )
            hint = "call its build(variables) in the model's function"
            raise StateMismatchError(f"{message} before its first step; {hint}")


def _aligned(old: Sequence[BuiltOptimizer], new: Sequence[BuiltOptimizer]) -> dict[tuple[str, str], BuiltOptimizer]:
    """Return a dict from the word and name of each of the model's optimizers to the checkpoint's optimizer."""
    found: dict[tuple[str, str], BuiltOptimizer] = {}
    for word in dict.fromkeys(one.word for one in new):
        before = [one for one in old if one.word == word]
        now = [one for one in new if one.word == word]
        names = {one.name: one for one in before}
        if len(now) == len(before) or {one.name for one in now} >= set(names):
            pairs = zip(now, before, strict=False) if len(now) == len(before) else []
            found.update({(word, one.name): other for one, other in pairs})
        for one in now:
            if one.name in names:
                found[word, one.name] = names[one.name]
        # if a wrapper such as LossScaleOptimizer was added or removed, match the innermost optimizers
        if len(now) != len(before) and before and (word, now[-1].name) not in found:
            found[word, now[-1].name] = before[-1]
    return found


def _parts(model: keras.Model) -> Iterator[tuple[str, Any]]:
    for word, optimizer in named_optimizers(model).items():
        for part in with_wrapped_optimizers(optimizer):
            yield word, part


def _built(model: keras.Model) -> Iterator[tuple[BuiltOptimizer, Any]]:
    variables = state_variables(model)
    for word, part in _parts(model):
        rate = learning_rate_of(part)
        built = BuiltOptimizer(word, part.name, _classes(part), _settings(part), _described(rate))
        own = {name: one for name, one in variables.items() if name.startswith(built.prefix())}
        for name, variable in own.items():
            if not tuple(variable.shape):
                built.values[name.removeprefix(built.prefix())] = float(host_value(variable))
        yield built, part


def _classes(part: Any) -> list[str]:
    classes = type(part).__mro__
    return [one.__name__ for one in classes[: classes.index(keras.optimizers.Optimizer)]] or [type(part).__name__]


def _settings(part: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(part).items()
        if not name.startswith("_") and name not in _UNSAID and isinstance(value, (bool, int, float, str, type(None)))
    }


def _described(rate: Any) -> str | None:
    """Return a description of a learning-rate schedule or function, or None for a number."""
    if isinstance(rate, keras.Variable):
        return None
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return f"by {getattr(rate, '__name__', type(rate).__name__)}()" if callable(rate) else None
    given = [
        f"{name}={value!r}"
        for name, value in vars(rate).items()
        if not name.startswith("_") and name != "name" and isinstance(value, (bool, int, float, str, list, tuple))
    ]
    return f"{type(rate).__name__}({', '.join(given)})"


def _is_single(value: np.ndarray) -> bool:
    return value.ndim == 0


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")
