"""`meta.json` of a checkpoint: its format, the progress of training, the config, and the checksums of all its files.

The checksum of `meta.json` itself is computed from the data as JSON reads it back. Numbers that JSON does not support
are written as `{"$float": "nan"}`. A checkpoint in another format is refused with an error that does not call it
damaged.
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

FORMAT = 7
_NUMBER = "$float"


Count = Annotated[int, Field(ge=0, strict=True)]


class OtherFormatError(ValueError):
    """The checkpoint was written by another version."""


@dataclass(frozen=True)
class Progress:
    """Progress of training.

    Attributes:
        step: number of global batches since the run began.
        epoch: the epoch in progress, or the next one if `step_in_epoch` is 0.
        step_in_epoch: number of batches in that epoch so far.
        history: values of the finished epochs, by name.
        callbacks: attributes of the callbacks, by position; see `callback_state.stored_state`.
        finished: whether a callback has ended training early.
        stop_training: whether a callback of the chief has set `stop_training` within an epoch.
        best: the best epoch so far, see `BestEpoch.record`.
        pending_logs: training values of an epoch whose steps are done but whose validation is not.
        final_weights: None before the end of a run. After it, True if the final weights are computed by the optimizer
            from the stored ones (`use_ema`), and False if the stored weights are final, for instance because a callback
            has set them.
        optimizers: descriptions of the optimizers at the start of the attempt, see `describe_optimizers`.
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
        """Return data that JSON can represent without loss."""
        return _tagged(asdict(self))

    @staticmethod
    def from_plain(data: dict[str, Any]) -> Progress:
        """Return the progress from the result of `to_plain`."""
        return Progress(**_untagged(data))


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`.

    Attributes:
        files: files of the state.
        progress: progress of training.
        config: the config as JSON, in which keys that are numbers are text.
    """

    files: list[StateFile]
    progress: Progress
    config: dict[str, Any]


_META = TypeAdapter(Meta)


def meta_text(files: Sequence[StateFile], saved_at: float, progress: Progress, config: dict[str, Any]) -> str:
    """Return the text of the file.

    Args:
        files: files of the state.
        saved_at: seconds since 1970.
    """
    listed = [asdict(file) for file in files]
    plain = {"format": FORMAT, "files": listed, "saved_at": saved_at, "progress": progress.to_plain(), "config": config}
    # the data as a reader gets it: the checksum must not depend on types that JSON does not have, such as tuples
    read_back = json.loads(strict_json.dumps(plain))
    return json.dumps({**read_back, "meta_sha256": checksum(read_back)}, indent=1)


def read_meta(data: bytes) -> Meta | None:
    """Return the content of the file, or None if the file is damaged.

    Raises:
        OtherFormatError: another version has written the file.
    """
    try:
        meta = json.loads(data)
        own, version = meta.pop("meta_sha256"), meta.get("format", 1)
        # a later format may compute the checksum in another way
        if version <= FORMAT and own != checksum(meta):
            return None
        if version != FORMAT:
            raise OtherFormatError(f"format {version}; this version of distlaunch reads format {FORMAT}")
        found = {"files": meta["files"], "progress": _untagged(meta["progress"]), "config": meta["config"]}
        return _META.validate_python(found)
    except OtherFormatError:
        raise
    # RecursionError is raised for deeply nested data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def checksum(data: Any) -> str:
    """Return the SHA-256 of the data of a `meta.json`, without its own entry `meta_sha256`."""
    # sorted, because the order of keys does not matter
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
