"""What to do about errors that scripts written for Keras 2 end with on Keras 3, TensorFlow's tutorials among them."""

from __future__ import annotations

import re

from distlaunch.supervise.diagnose.exit_reason import TaskError

_LEGACY = "install tf_keras and set TF_USE_LEGACY_KERAS=1"
_FIT = f"Keras 3's `fit` cannot do this; write a loop, use `distlaunch train`, or {_LEGACY}"

_HINTS = [
    (r"Attempt to convert a value \(PerReplica", _FIT),
    (r"pass this dataset to `?(ClusterCoordinator\.)?create_per_worker_dataset", _FIT),
    (r"'ShardedVariable' object has no attribute", "Keras 3 cannot train split variables: leave `variable_partitioner` "
     f"out, use `partitioner` of `distlaunch train`, or {_LEGACY}"),
    (r"has no attribute 'reset_states'", f"Keras 3 calls it `reset_state()`; or {_LEGACY}"),
    (r"A KerasTensor (cannot be used as input to a TensorFlow function|is symbolic)",
     f"between layers, Keras 3 takes keras.ops.mean where Keras 2 took tf.reduce_mean; or {_LEGACY}"),
    (r"module '[\w.]*keras[\w.]*' has no attribute '(experimental|legacy|dtensor)'",
     f"Keras 3 does not have it any more; {_LEGACY}"),
    (r"Received a label value of \S+ which is outside the valid range", "the loss takes class numbers below the number "
     "of the model's outputs: correct the labels, or give the last layer more units"),
    (r"[Uu]nable to (synchronously )?(lock|open|create) file", "each task needs a path of its own to write to: "
     "os.environ['DISTLAUNCH_TASK'] tells them apart"),
    (r"module 'tensorflow[\w.]*' has no attribute 'estimator'",
     "TensorFlow has no estimators any more; docs/parameter_servers.md says what replaces them"),
]  # fmt: skip


def hint_for(error: TaskError | None) -> str:
    """What helps against an exception; empty if that is not known."""
    if error is None:
        return ""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, error.summary)), "")
