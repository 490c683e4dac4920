"""TensorFlow's coordination service as a store for `Peers`."""

from __future__ import annotations

import base64

import tensorflow as tf

from distlaunch.patches.tensorflow_private import coordination_service


class TensorFlowStore:
    """Store of the coordination service, which holds text only: values are encoded in base64."""

    lost = tf.errors.OpError

    def set(self, key: str, value: bytes) -> None:
        coordination_service().set_config_key_value(key, base64.b64encode(value).decode())

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        try:
            return base64.b64decode(coordination_service().get_config_key_value(key, timeout_ms))
        # the key was not set in time, and the caller tries again
        except tf.errors.DeadlineExceededError:
            return None

    def delete(self, key: str) -> None:
        coordination_service().delete_config_key_value(key)

    def close(self) -> None: ...
