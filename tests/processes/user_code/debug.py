import pdb

import keras
import numpy as np
import tensorflow as tf

stops = []


def stop(where):
    stops.append(where)
    return stops.count(where) <= 2


class Mine(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        where = "train_step"
        if tf.executing_eagerly() and stop(where):
            breakpoint()
        return super().train_step(data)


def add(x, y):
    where = "map"
    if tf.reduce_sum(x) > 1e9:
        y += 1
    if tf.executing_eagerly() and stop(where):
        pdb.set_trace()
    return x, y


def rows():
    x = np.arange(32 * 3, dtype="float32").reshape(32, 3) / 96
    return x, x.sum(1, keepdims=True)


def pipeline():
    return tf.data.Dataset.from_tensor_slices(rows())


def step(context, batch):
    x, y = batch
    where = "step"
    if tf.reduce_sum(x) > 1e9:
        y += 1
    breakpoint()
    with tf.GradientTape() as tape:
        loss = context.average(context.per_example_loss(y, context.model(x, training=True)))
    context.apply(tape, loss)
    return {"loss": loss}


def step_on_jax(context, state, batch):
    import jax

    (trainable, others, slots, metrics), (x, y) = state, batch[:2]
    where = "step on jax"
    breakpoint()

    def loss_of(weights):
        predictions, changed = context.model.stateless_call(weights, others, x)
        return context.average(context.per_example_loss(y, predictions)), changed

    (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    trainable, slots = context.optimizer.stateless_apply(slots, gradients, trainable)
    return {"loss": loss}, (trainable, others, slots, metrics)
