import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def transformer(rate=0.1):
    tokens = layers.Input((6,), dtype="int32")
    x = layers.Dense(16)(keras.ops.one_hot(tokens, 9))
    mixed = layers.MultiHeadAttention(2, 8, dropout=rate)(layers.LayerNormalization()(x), x)
    x = layers.Add()([x, layers.Dropout(rate)(mixed)])
    x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(x)))])
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def convolutions():
    inputs = layers.Input((8, 8, 2))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for _ in range(2):
        inner = layers.ReLU()(layers.BatchNormalization(synchronized=True)(layers.Conv2D(8, 3, padding="same")(x)))
        x = layers.Add()([x, layers.SpatialDropout2D(0.2)(inner)])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def two_inputs():
    number, kind = layers.Input((4,), name="number"), layers.Input((2,), name="kind")
    x = layers.Dense(8, "tanh")(layers.Concatenate()([number, layers.Dense(4)(kind)]))
    outputs = {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model({"number": number, "kind": kind}, outputs)


class Own(keras.Model):
    """Its own step scales the gradients, adds a penalty, and tracks a metric of its own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x, training=False):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions)
        gradients = [0.5 * gradient for gradient in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        self.size.update_state(keras.ops.mean(predictions**2, axis=1))
        self.compute_metrics(x, y, predictions)
        return self.get_metrics_result()


class Gan(keras.Model):
    """Makes points; another part tells them from the real ones."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(2)])
        self.judge = keras.Sequential([layers.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.judges = keras.optimizers.Adam(0.01)
        self.judges.build(self.judge.trainable_variables)
        self.built = True

    def call(self, noise):
        return self.judge(self.maker(noise))


def play(context, batch):
    real, noise = batch
    model, entropy = context.model, tf.nn.sigmoid_cross_entropy_with_logits
    with tf.GradientTape() as tape:
        on_real, on_fake = model.judge(real), model.judge(model.maker(noise))
        each = entropy(tf.ones_like(on_real), on_real) + entropy(tf.zeros_like(on_fake), on_fake)
        judge_loss = context.average(each)
    weights = model.judge.trainable_variables
    model.judges.apply(tape.gradient(judge_loss, weights), weights)
    with tf.GradientTape() as tape:
        on_fake = model.judge(model.maker(noise))
        maker_loss = context.average(entropy(tf.ones_like(on_fake), on_fake))
    weights = model.maker.trainable_variables
    context.optimizer.apply(tape.gradient(maker_loss, weights), weights)
    return {"judge_loss": judge_loss, "maker_loss": maker_loss}


def in_halves(context, batch):
    """Reads variables after it has assigned them, which DTensor by itself gets wrong."""
    x, y = batch
    with tf.GradientTape() as tape:
        loss = context.average(context.per_example_loss(y, context.model(x, training=True)))
    weights = context.model.trainable_variables
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign(weight - 0.05 * gradient)
        weight.assign(weight - 0.05 * gradient)
    return {"loss": loss}


def mlp():
    return keras.Sequential([layers.Input((10,)), layers.Dense(16, "relu"), layers.Dense(3)])


def data(kind="table"):
    random = np.random.default_rng(0)
    x = random.normal(size=(89, 10)).astype("float32")
    y = (x[:, 0] > 0) + (x[:, 1] > 0).astype("int64")
    if kind == "tokens":
        x = random.integers(0, 9, size=(89, 6))
        y = x.sum(1) % 3
    if kind == "images":
        x = random.normal(size=(89, 8, 8, 2)).astype("float32")
    if kind == "pair":
        return {"train": ({"number": x[:, :4], "kind": x[:, 4:6]}, {"a": y, "b": x.sum(1, keepdims=True)})}
    if kind == "gan":
        return {"train": (x[:, :2], x[:, 2:6])}
    return {"train": (x, y)}
