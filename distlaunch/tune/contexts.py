"""The launch contexts of candidates. Their engines stay entered, so that connections and warm processes are reused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from distlaunch.engines.context import LaunchContext

_Key = tuple[tuple[str, str], ...]


class Contexts:
    """Provides a launch context for each candidate that runs.

    On this machine, candidates with the same variables share an engine. An engine of other hosts runs one attempt at a
    time, so each running candidate has an engine of its own, with a connection to each host. A context that is given
    back is used again. Leave the context of this object when no candidate runs.
    """

    def __init__(self, base: LaunchContext) -> None:
        self._base = base
        self._entered = contextlib.ExitStack()
        self._is_shared = base.engine.uses_this_machine_only
        self._known: dict[_Key, list[LaunchContext]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def take(self, environ: Mapping[str, str]) -> LaunchContext:
        """Return a context whose tasks inherit more variables, with an entered engine."""
        known = self._known.setdefault(_key(environ), [])
        if known:
            return known[0] if self._is_shared else known.pop()
        # each context makes an engine of its own
        context = dataclasses.replace(self._base, machine=self._base.machine.with_variables(environ))
        self._entered.enter_context(context.engine)
        if self._is_shared:
            known.append(context)
        return context

    def give_back(self, context: LaunchContext, environ: Mapping[str, str]) -> None:
        """Let another candidate use a context. Its hosts must still be usable, and nothing must be running in it."""
        if not self._is_shared:
            self._known[_key(environ)].append(context)


def _key(environ: Mapping[str, str]) -> _Key:
    return tuple(sorted(environ.items()))
