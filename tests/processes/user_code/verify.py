import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def mlp():
    return keras.Sequential([layers.Input((10,)), layers.Dense(16, "relu"), layers.Dense(3)])


def residual(synchronized=True, dropout=0.0, outputs=3):
    inputs = layers.Input((10,))
    hidden = layers.Dense(16, "relu")(inputs)
    for number in range(2):
        inner = layers.Dense(16, use_bias=False)(hidden)
        inner = layers.BatchNormalization(synchronized=synchronized, name=f"norm_{number}")(inner)
        inner = layers.Dropout(dropout, name=f"drop_{number}")(layers.ReLU()(inner))
        hidden = layers.Add()([hidden, layers.Dense(16)(inner)])
    return keras.Model(inputs, layers.Dense(outputs)(hidden))


class Own(keras.Model):
    """Its own step takes the mean over the local batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, predictions, from_logits=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class OwnSum(Own):
    """The same with a sum over the rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = 0.05 * tf.reduce_sum(each)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Centre(layers.Layer):
    """Keeps a mean of its own."""

    def build(self, shape):
        self.centre = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="centre")

    def call(self, x, training=False):
        if training:
            self.centre.assign(0.9 * self.centre + 0.1 * keras.ops.mean(x, 0))
        return x - self.centre


def centred():
    return keras.Sequential([layers.Input((10,)), Centre(), layers.Dense(3)])


def contrastive(y, z):
    """Compares the examples of a batch with each other."""
    logits = keras.ops.matmul(z, keras.ops.transpose(z))
    y = keras.ops.reshape(y, (-1, 1))
    same = keras.ops.cast(keras.ops.equal(y, keras.ops.transpose(y)), "float32")
    return -keras.ops.mean(keras.ops.log_softmax(logits) * same, -1)


class Broken(keras.layers.Layer):
    """Results in NaN everywhere except on one device."""

    def call(self, x):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return x if replicas == 1 else x * float("nan")


def broken():
    return keras.Sequential([layers.Input((10,)), layers.Dense(3), Broken()])


def mean_over_the_local_batch(context, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(context.per_example_loss(y, context.model(x, training=True)))
    context.apply(tape, loss)
    return {"loss": loss}


def wrong_metric(context, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        predictions = context.model(x, training=True)
        loss = context.average(context.per_example_loss(y, predictions))
    context.apply(tape, loss)
    return {"loss": loss, "mean_square": tf.reduce_mean(predictions**2)}


def regularised():
    l2 = keras.regularizers.L2(0.05)
    return keras.Sequential([layers.Input((10,)), layers.Dense(16, "relu", kernel_regularizer=l2), layers.Dense(3)])


def adds_losses_whole(context, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = context.average(context.per_example_loss(y, context.model(x, training=True))) + sum(context.model.losses)
    context.apply(tape, loss)
    return {"loss": loss}


def normalised():
    norm = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([layers.Input((10,)), layers.Dense(16, name="first"), norm, layers.ReLU(), layers.Dense(3)])


def shuffled():
    whole = tf.data.Dataset.from_tensor_slices(data()["train"])
    return {"train": whole.shuffle(89).batch(24)}


def sharded():
    import json
    import os

    task = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": [0]}, "task": {"index": 0}}'))
    whole = tf.data.Dataset.from_tensor_slices(data()["train"])
    return {"train": whole.shard(len(task["cluster"]["worker"]), task["task"]["index"]).repeat()}


def jitter(x, y):
    return x + tf.random.normal(tf.shape(x)), y


def unseeded():
    x = np.random.default_rng().normal(size=(89, 10)).astype("float32")
    return {"train": (x, (x[:, 0] > 0).astype("int64"))}


def data():
    x = np.random.default_rng(0).normal(size=(89, 10)).astype("float32")
    return {"train": (x, (x[:, 0] > 0) + (x[:, 1] > 0).astype("int64"))}
