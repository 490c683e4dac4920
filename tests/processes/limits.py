"""Limits of the system, for processes that are started meanwhile."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """Set limits that processes inherit if they are started in this context."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
