"""Checks the messages of agents, since a host may have been replaced or compromised."""

from __future__ import annotations

from typing import Any

from distlaunch import __version__
from distlaunch.agent.remote.frames import PROTOCOL, Frame, FrameError
from distlaunch.base.liveness import Liveness
from distlaunch.base.plain_types import fits, is_dict, is_list
from distlaunch.cluster.hardware import parse_hardware

_MOST_ITEMS = 100_000
_FACTS: dict[str, Any] = {
    "host": str, "pid": int, "interpreter": str, "python": str, "packages": dict[str, str],
    "addresses": list[list[str]], "gpus": list[str], "driver": str, "machine": str, "files": str, "cores": int,
    "memory_bytes": int, "time": float,
}  # fmt: skip
"""See `host_facts`."""
_STATE: dict[str, Any] = {
    "free_bytes": dict[str, int], "free_memory_bytes": int, "open_files": int | None, "processes": int | None,
    "missing": list[str],
}  # fmt: skip
"""See `host_state`."""
_REPLIES: dict[str, dict[str, Any]] = {
    "reserve": {"ports": list[int]},
    "listening": {"ports": list[int]},
    "open": {"shared": bool, "checkpoints": list[int] | None, "kept": str},
    "probe": {"missed": list[int]},
    "state": {"state": dict[str, Any]},
    "compare": {"wrong": list[str], "count": int},
    "code": {"same": bool},
    "end": {"unsent": str},
}
"""The fields of the answer to each request."""


def check_facts(frame: Frame) -> None:
    """Raise FrameError if the greeting of an agent of this version is malformed."""
    # an agent of another version is refused later, with a message about its version
    if (frame.fields.get("distlaunch"), frame.fields.get("protocol")) == (__version__, PROTOCOL):
        _check("its greeting", frame.fields, _FACTS)
        try:
            parse_hardware(frame.fields.get("hardware"))
        except ValueError as error:
            raise FrameError(f"its greeting: {error}") from None
        if any(len(each) != 2 for each in frame.fields["addresses"]):
            raise FrameError("its greeting: addresses: expected pairs")


def check_reply(request: str, frame: Frame) -> None:
    """Raise FrameError if a frame is not a valid answer to a request."""
    error = frame.fields.get("error")
    if error is not None:
        if not isinstance(error, str):
            raise FrameError(f"its answer to {request}: the field `error` is {error!r:.80}; expected text")
        return
    _check(f"its answer to {request}", frame.fields, _REPLIES.get(request, {}))
    if request == "state":
        _check("its state", frame.fields["state"], _STATE)
    for name in ("ports", "missed", "checkpoints"):
        numbers = frame.fields.get(name) or ()
        if any(not 0 <= number < 2**63 for number in numbers) or (name == "ports" and any(n > 65535 for n in numbers)):
            raise FrameError(f"its answer to {request}: {name}: got {numbers!r:.80}")


def parse_liveness(plain: Any) -> Liveness:
    """Return the liveness in a message. Raise FrameError if it is malformed."""
    kinds = (int, int, int | None, bool, bool)
    if not is_list(plain) or len(plain) != len(kinds) or not all(map(fits, plain, kinds)):
        raise FrameError(f"liveness: got {plain!r:.80}")
    return Liveness(*plain)


def _check(what: str, fields: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        value = fields.get(name)
        if not fits(value, kind) or ((is_list(value) or is_dict(value)) and len(value) > _MOST_ITEMS):
            raise FrameError(f"{what}: {name}: got {value!r:.80}")
