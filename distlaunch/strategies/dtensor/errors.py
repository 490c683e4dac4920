"""DTensor's errors in plain words."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """Turns what DTensor's compiler says about a model that it cannot split into one sentence."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        # DTensor's compiler names its own source files; other errors of these types are the model's
        if "tensorflow/dtensor/" not in str(error):
            raise
        # such as "'tf.TensorListReserve' op does not implement layout propagation"
        if lacking := re.search(r"'tf\.(\w+)' op does not implement layout propagation", str(error)):
            loop = " (a recurrent layer: unroll=True does without)" if "TensorList" in lacking[1] else ""
            message = f"DTensor has no {lacking[1]}, which this model needs{loop}; use kind: jax, or mirrored"
            raise ConfigError(Problem(("strategy", "kind"), message)) from error
        found = re.search(r"error: (.*)", str(error))
        reason = found[1].strip() if found else str(error).splitlines()[0]
        message = f"DTensor cannot run this model split this way: {reason}; leave the layer whole, or use kind: jax"
        raise ConfigError(Problem(("strategy", "layout"), message)) from error
