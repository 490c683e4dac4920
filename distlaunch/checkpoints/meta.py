"""`meta.json` of a checkpoint: its format, where training stands, the config, and the checksums of all its files.

Its own checksum is that of the data as JSON reads them back, and numbers that JSON does not have are written as
`{"$float": "nan"}`. Another format is refused, and not called damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from distlaunch.base import strict_json
from distlaunch.checkpoints.state_files import StateFile

FORMAT = 5
_NUMBER = "$float"


Count = Annotated[int, Field(ge=0, strict=True)]


class OtherFormatError(ValueError):
    """The checkpoint was written by another version."""


@dataclass(frozen=True)
class Progress:
    """The position of training.

    Attributes:
        step: global batches done since the run began.
        epoch: the epoch in progress, or the next one if `step_in_epoch` is 0.
        step_in_epoch: batches of that epoch done.
        history: values of the finished epochs, by name.
        callbacks: plain attributes of the callbacks, by position.
        finished: a callback ended training early.
        stop_training: a callback of the chief wishes that, within an epoch.
        best: the best epoch so far, as BestEpoch remembers it.
        pending_logs: training values of an epoch whose steps are done but whose validation is not.
        final_weights: None before the end of a run. Then True if the finished model has what its optimizer makes of the
            stored weights (`use_ema`), False if it has the stored ones, which a callback may have put there.
        optimizers: how they were built at the start of the attempt, see `describe_optimizers`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count = 0
    epoch: Count = 0
    step_in_epoch: Count = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    stop_training: bool = False
    pending_logs: dict[str, float] | None = None
    best: dict[str, Any] | None = None
    final_weights: bool | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return data that JSON can hold without a loss."""
        return _tagged(asdict(self))

    @staticmethod
    def from_plain(data: dict[str, Any]) -> Progress:
        """Return what `to_plain` was made of."""
        return Progress(**_untagged(data))


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`.

    Attributes:
        files: with the state.
        config: as JSON holds it: with text for keys that are numbers.
    """

    files: list[StateFile]
    progress: Progress
    config: dict[str, Any]


_META = TypeAdapter(Meta)


def write_meta(files: Sequence[StateFile], saved_at: float, progress: Progress, config: dict[str, Any]) -> str:
    """Return the text of the file.

    Args:
        files: with the state.
        saved_at: seconds since the epoch.
    """
    listed = [asdict(file) for file in files]
    plain = {"format": FORMAT, "files": listed, "saved_at": saved_at, "progress": progress.to_plain(), "config": config}
    # what a reader gets: the checksum must not depend on types that JSON does not have, such as tuples
    read_back = json.loads(strict_json.dumps(plain))
    return json.dumps({**read_back, "meta_sha256": checksum(read_back)}, indent=1)


def read_meta(data: bytes) -> Meta | None:
    """Return the content of the file, or None if it is not what was written, or no checkpoint can have it.

    Raises:
        OtherFormatError: another version wrote it.
    """
    try:
        meta = json.loads(data)
        own, version = meta.pop("meta_sha256"), meta.get("format", 1)
        # of a later format it is not known how its checksum is computed
        if version <= FORMAT and own != checksum(meta):
            return None
        if version != FORMAT:
            raise OtherFormatError(f"format {version}; this version of distlaunch reads format {FORMAT}")
        found = {"files": meta["files"], "progress": _untagged(meta["progress"]), "config": meta["config"]}
        return _META.validate_python(found)
    except OtherFormatError:
        raise
    # the parser follows each level of nesting
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def checksum(data: Any) -> str:
    """Return the SHA-256 of the data of a `meta.json`, without its own entry `meta_sha256`."""
    # sorted: the order of keys says nothing
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _tagged(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tagged(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tagged(inner) for inner in value]
    return {_NUMBER: str(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_NUMBER}:
            return float(value[_NUMBER])
        return {key: _untagged(inner) for key, inner in value.items()}
    return [_untagged(inner) for inner in value] if isinstance(value, list) else value
