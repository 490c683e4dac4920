"""Parity cases of JAX alone: what the TensorFlow strategies do not compare, or cannot."""

from __future__ import annotations

from typing import Any

import keras

from tests.parity.cases import ADAMW, UNEVEN, case, optimizer

HERE = "tests.parity.jax_cases"
layers = keras.layers
COSINE = {"name": "CosineDecay", "args": {"initial_learning_rate": 0.2, "decay_steps": 40}}


def own(model: str, **keys: Any) -> dict[str, Any]:
    made = case(data_args=UNEVEN, **keys)
    made["model"]["function"] = f"{HERE}:{model}"
    return made


OPTIMIZERS = {
    "accumulated gradients": optimizer("Adam", learning_rate=0.01, gradient_accumulation_steps=3),
    "average of weights": optimizer(
        "SGD", learning_rate=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5
    ),
    "schedule": optimizer("SGD", learning_rate=COSINE, momentum=0.9),
}
FEATURES = {name: case(optimizer=made, data_args=UNEVEN, args={"l2": 0.01}) for name, made in OPTIMIZERS.items()}
RANDOM = {"dropout": own("dropout", optimizer=ADAMW), "own train_step of JAX": own("own_train_step")}
"""Compared with one device of JAX: TensorFlow's random numbers are others, and its steps have another form."""
EXTRA = {**FEATURES, **RANDOM}


def dropout() -> keras.Model:
    """Dropout and BatchNorm."""
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


class OwnTrainStep(keras.Sequential):
    """A step as in Keras's guide to custom steps on JAX."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "rows": data[0].shape[0]}, state


def own_train_step() -> keras.Model:
    return OwnTrainStep([layers.Input((12,)), layers.Dense(32, activation="relu"), layers.Dense(4)])
