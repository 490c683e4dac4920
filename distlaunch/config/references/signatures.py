"""Checks whether a function, known only from its source, can be called as the config requires."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distlaunch.config.read.words import did_you_mean, listed

SEED = "seed"
"""The argument with which a `data.augment` function requests a seed for random numbers."""


@dataclass(frozen=True)
class Function:
    """A plain `def` at the top level of a module."""

    name: str
    node: ast.FunctionDef

    @property
    def by_name(self) -> list[str]:
        """Arguments that can be passed by name."""
        args = self.node.args
        return [arg.arg for arg in (*args.args, *args.kwonlyargs)]

    @property
    def positional(self) -> list[str]:
        args = self.node.args
        return [arg.arg for arg in (*args.posonlyargs, *args.args)]

    @property
    def required(self) -> list[str]:
        """Arguments without a default."""
        args = self.node.args
        # defaults belong to the last arguments
        positional = self.positional[: len(self.positional) - len(args.defaults)]
        by_name = [arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
        return positional + by_name

    def __str__(self) -> str:
        return f"{self.name}({ast.unparse(self.node.args)})"


def argument_problems(
    function: Function, given: Iterable[str], *, complete: bool, by_position: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield pairs of an argument (or an empty string) and the problem with it.

    Args:
        by_position: number of arguments that the caller passes by position, before those in `given`.
        complete: whether the function is called with these arguments only, so that none may be missing.
    """
    if by_position > len(function.positional) and function.node.args.vararg is None:
        wanted = f"def {function.name}({', '.join(['inputs', *function.by_name])})"
        yield "", f"it is called with the training inputs, which {function} does not take; write `{wanted}`"
        return
    given = [*function.positional[:by_position], *given]
    if function.node.args.kwarg is None:
        for name in given:
            if name not in function.by_name:
                hint = did_you_mean(str(name), function.by_name) or "; remove it"
                takes = f"takes {listed(function.by_name)}" if function.by_name else "takes no arguments"
                yield name, f"unknown argument of {function.name}, which {takes}{hint}"
    missing = [name for name in function.required if name not in given]
    if complete and missing:
        yield "", f"missing {listed(missing)}, which {function} needs; add `{missing[0]}: ...`"


def position_problem(function: Function, values: Sequence[str], by_name: Sequence[str] = ()) -> str | None:
    """Return the problem of a call with these values by position; None if there is none.

    Args:
        by_name: values that the caller also passes, by name, if the function takes them.
    """
    args, number, names = function.node.args, len(values), ", ".join(values)
    least = len(set(function.required) - set(by_name))
    most = None if args.vararg else len(set(function.positional) - set(by_name))
    if least > number or (most is not None and most < number):
        return f"it is called with ({names}), which {function} does not take; write `def {function.name}({names})`"
    return None


def map_with_seed(function: str) -> str:
    """Return why a `data.map` function that takes `seed` is refused.

    Args:
        function: its name and arguments.
    """
    return (
        f"{function} takes `seed` for random numbers, but `map` also applies to validation and prediction; "
        "use `augment:` for random changes of training examples, and `map`, without `seed`, for all other changes"
    )


def context_problem(function: Function, *, given: bool) -> str | None:
    """Return the problem of calling a data function with `context`, or without it; None if there is none."""
    if given and "context" not in function.by_name and function.node.args.kwarg is None:
        wanted = f"def {function.name}({', '.join([*function.by_name, 'context'])})"
        return f"it is called with `context`, which {function} does not take; write `{wanted}`"
    if not given and "context" in function.required:
        return f"{function} gets `context` only with `data.sharding: function` or `data.streams`; add one of them"
    return None
