"""Parity cases of JAX alone: what the TensorFlow strategies do not compare, or cannot."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tests.parity.cases import MOMENTUM, UNEVEN, case, optimizer

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
FEATURES = {  # to beyond the schedule's end
    name: case(optimizer=made, data_args=UNEVEN, args={"l2": 0.01}, epochs=4) for name, made in OPTIMIZERS.items()
}
PARTLY_DECAYED = "weights without decay"
FEATURES[PARTLY_DECAYED] = own("partly_decayed", optimizer={"args": {"learning_rate": 0.02}})
SPECTRAL = "assigns weights"
FEATURES[SPECTRAL] = own("spectral", optimizer=MOMENTUM)
SATURATED = "saturated probabilities"
FEATURES[SATURATED] = own(
    "saturated", optimizer=optimizer("SGD", learning_rate=0.01), loss="sparse_categorical_crossentropy",
    metrics=("accuracy", "sparse_categorical_crossentropy"),
)  # fmt: skip
OWN_TRAIN_STEP = own("own_train_step")
"""Compared with one device of JAX: steps of TensorFlow have another form."""
REFERENCE_STEP = case(loop="custom", optimizer=MOMENTUM, data_args=UNEVEN)
"""What `own_step` below computes."""
OWN_STEP = {**REFERENCE_STEP, "train": {**REFERENCE_STEP["train"], "step": f"{HERE}:own_step"}}
NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop",
    "SGD", "ScheduleFreeAdamW",
)  # fmt: skip
MUON = {"learning_rate": 0.01, "exclude_layers": ["dense_1"]}
EVERY_OPTIMIZER = {
    f"optimizer {name}": case(optimizer=optimizer(name, **(MUON if name == "Muon" else {})), data_args=UNEVEN)
    for name in NAMES
}
EXTRA = {**FEATURES, **EVERY_OPTIMIZER, "own step of JAX": OWN_STEP, "own train_step of JAX": OWN_TRAIN_STEP}


class OwnTrainStep(keras.Sequential):
    """A step as in Keras's guide to custom steps on JAX."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "rows": data[0].shape[0]}, state


def spectral() -> keras.Model:
    """A model with a layer that assigns a trainable weight in each step."""
    hidden = layers.SpectralNormalization(layers.Dense(16, "tanh"), power_iterations=2)
    return keras.Sequential([layers.Input((12,)), hidden, layers.Dense(4)])


def saturated() -> keras.Model:
    """A model with probabilities close to 0 and 1, and with values at the kinks of its functions in the first step."""
    kinks = [layers.Dense(16, bias_regularizer="l1"), layers.LeakyReLU()]
    return keras.Sequential([layers.Input((12,)), *kinks, layers.Rescaling(60), layers.Dense(4, "softmax")])


class Spare(layers.Layer):
    """Has weights without a gradient, which optimizers leave as they are."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")
        self.stopped = self.add_weight(shape=(), initializer="ones", name="stopped")

    def call(self, x):
        return x + ops.stop_gradient(self.stopped)


def partly_decayed() -> keras.Model:
    """A model whose optimizer decays some weights strongly, and not others, which it has by identity and by name."""
    first = layers.Dense(32, activation="relu")
    norm = layers.LayerNormalization(name="the_norm")
    model = keras.Sequential([layers.Input((12,)), first, norm, Spare(), layers.Dense(4)])
    adamw = keras.optimizers.AdamW(0.01, weight_decay=0.8)
    adamw.exclude_from_weight_decay(var_list=[first.kernel], var_names=["the_norm"])
    model.compile(adamw)
    return model


def own_train_step() -> keras.Model:
    return OwnTrainStep([layers.Input((12,)), layers.Dense(32, activation="relu"), layers.Dense(4)])


def own_step(context, state, batch):
    """The reference step of `loop: custom`, as a user would write it for JAX."""
    import jax

    trainable, others, slots, metrics = state
    x, y = batch

    def loss_of(trainable):
        predictions, new_others = context.model.stateless_call(trainable, others, x, training=True)
        return context.average(context.per_example_loss(y, predictions)), (predictions, new_others)

    (loss, (predictions, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    trainable, slots = context.optimizer.stateless_apply(slots, gradients, trainable)
    mapping = list(zip(context.model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        context.model.compute_metrics(x, y, predictions)
    metrics = [scope.get_current_value(variable) for variable in context.model.metrics_variables]
    return {"loss": loss, "largest": ops.max(ops.abs(predictions))}, (trainable, others, slots, metrics)
