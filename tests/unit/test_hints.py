"""Tests of the hints for errors of scripts that are older than Keras 3."""

from __future__ import annotations

import pytest

from distlaunch.supervise.diagnose.advice import hint_for
from distlaunch.supervise.diagnose.exit_reason import TaskError


@pytest.mark.parametrize(
    ("summary", "part"),
    [
        ("ValueError: Attempt to convert a value (PerReplica:{ ... }) with an unsupported type", "distlaunch train"),
        ("ValueError: with servers, pass this dataset to ClusterCoordinator.create_per_worker_dataset",
         "distlaunch train"),
        ("AttributeError: 'Mean' object has no attribute 'reset_states'", "reset_state()"),
        ("AttributeError: module 'keras.utils' has no attribute 'experimental'", "TF_USE_LEGACY_KERAS=1"),
        ("AttributeError: module 'keras._tf_keras.keras' has no attribute 'dtensor'", "TF_USE_LEGACY_KERAS=1"),
        ("AttributeError: 'ShardedVariable' object has no attribute 'handle'", "variable_partitioner"),
        ("ValueError: A KerasTensor cannot be used as input to a TensorFlow function.", "keras.ops"),
        ("BlockingIOError: [Errno 11] Unable to synchronously create file (...)", "DISTLAUNCH_TASK"),
        ("AttributeError: module 'tensorflow' has no attribute 'estimator'", "parameter_servers.md"),
    ],
)  # fmt: skip
def test_known_errors(summary: str, part: str) -> None:
    assert part in hint_for(TaskError(summary))


@pytest.mark.parametrize("summary", ["ValueError: no", "AttributeError: module 'mine' has no attribute 'experimental'"])
def test_others(summary: str) -> None:
    assert hint_for(TaskError(summary)) == ""
    assert hint_for(None) == ""
