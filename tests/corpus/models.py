"""Models in the styles of Keras's users, each with its data: losses, steps and metrics that are not made for replicas.

Each function returns a compiled model, as a user's function does. `CASES` names them, with what differs from the rule
that every strategy gives the numbers of Keras's `fit` on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, VALID, BATCH = 75, 22, 16
"""The last batches have 11 and 6 rows, so that replicas have unequal parts."""


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        model: returns the compiled model.
        data: returns the splits.
        batch: rows of a global batch.
        epochs: how long it is trained.
        validates: whether `fit` can evaluate it, which has no loss or takes a batch apart by itself otherwise.
        says: part of a sentence that a run on replicas must print, because it cannot have the numbers of one device.
        skips: kinds of strategies on which it does not run, with the reason.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], dict[str, Any]]
    batch: int = BATCH
    epochs: int = 2
    validates: bool = True
    says: str = ""
    skips: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-5


def table(columns: int = 6, outputs: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS + VALID, columns)).astype("float32")
    y = (np.tanh(x @ rng.normal(size=(columns, outputs))) + 0.1 * x[:, :1]).astype("float32")
    return {"train": (x[:ROWS], y[:ROWS]), "validation": (x[ROWS:], y[ROWS:])}


def short_table() -> dict[str, Any]:
    """Ten rows for ten steps of one row. A root's gradient is the sign of an error, which rounding may change later."""
    return {name: (x[:10], y[:10]) for name, (x, y) in table().items()}


def weighted_table() -> dict[str, Any]:
    data = table()
    rng = np.random.default_rng(4)
    return {name: (*split, rng.uniform(0, 3, len(split[0])).astype("float32")) for name, split in data.items()}


def classes(number: int = 4) -> dict[str, Any]:
    data = table(outputs=number)
    return {name: (x, y.argmax(1).astype("int32")) for name, (x, y) in data.items()}


def sequences() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    x = rng.integers(1, 12, size=(ROWS + VALID, 7))
    x[np.arange(7)[None] >= rng.integers(1, 8, size=len(x))[:, None]] = 0
    y = (x % 3).astype("int32")
    return {"train": (x[:ROWS], y[:ROWS]), "validation": (x[ROWS:], y[ROWS:])}


def inputs_only() -> dict[str, Any]:
    return {name: {"x": x, "y": y} for name, (x, y) in table().items()}


def net(units: int = 8, outputs: int = 1, columns: int = 6, activation: str = "tanh") -> keras.Sequential:
    return keras.Sequential(
        [layers.Input((columns,)), layers.Dense(units, activation), layers.Dense(outputs, name="last")]
    )


def functional(cls: type = keras.Model, outputs: int = 1, **options: Any) -> Any:
    i = layers.Input((6,))
    return cls(i, layers.Dense(outputs)(layers.Dense(8, "tanh", **options)(i)))


def compiled(model: keras.Model, loss: Any = "mse", optimizer: Any = None, **options: Any) -> keras.Model:
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.05, momentum=0.5), loss=loss, **options)
    return model


# losses


def scalar_mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p)) + 0.1 * ops.mean(ops.abs(p))


def scalar_sum(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


def scalar_root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y - p)) + 1e-3)


def correlation(y: Any, p: Any) -> Any:
    y, p = y - ops.mean(y), p - ops.mean(p)
    return 1.0 - ops.sum(y * p) / (ops.sqrt(ops.sum(y * y) * ops.sum(p * p)) + 1e-6)


def in_batch_contrast(y: Any, p: Any) -> Any:
    """A value for each row, which compares the row with all others of the batch."""
    a, b = ops.split(p, 2, axis=1)
    scores = ops.matmul(a, ops.transpose(b))
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(a)[0]), scores, from_logits=True)


class Triplet(keras.losses.Loss):
    """Hardest positive and negative of the batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        labels = ops.cast(ops.reshape(y_true, (-1,)), "int32")
        distance = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), -1)
        same = ops.cast(labels[:, None] == labels[None], "float32")
        return ops.relu(ops.max(distance * same, 1) - ops.min(distance + 1e3 * same, 1) + 1.0)


class Asymmetric(keras.losses.Loss):
    """A value for each row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        error = y_pred - y_true
        return ops.mean(ops.where(error > 0, 2.0, 0.5) * ops.square(error), -1)


def masked_sequence() -> keras.Model:
    embed = [layers.Input((7,), dtype="int32"), layers.Embedding(12, 6, mask_zero=True)]
    model = keras.Sequential([*embed, layers.GRU(6, return_sequences=True), layers.Dense(3)])
    return compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.Adam(0.01),
                    metrics=["accuracy"], weighted_metrics=["accuracy"])  # fmt: skip


def two_outputs(loss: Any) -> keras.Model:
    i = layers.Input((6,))
    h = layers.Dense(8, "tanh")(i)
    outputs = {"a": layers.Dense(1, name="a")(h), "b": layers.Dense(1, name="b")(h)}
    model = keras.Model(i, outputs)
    return compiled(model, loss, loss_weights={"a": 0.3, "b": 2.0})


def two_targets() -> dict[str, Any]:
    return {name: (x, {"a": y, "b": x[:, :1] * y}) for name, (x, y) in table().items()}


# losses that layers add


class Adds(layers.Layer):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def call(self, x: Any, training: bool = False) -> Any:
        each = ops.mean(ops.square(x), axis=-1)
        if self.kind == "mean":
            self.add_loss(0.3 * ops.mean(each))
        elif self.kind == "rows":
            self.add_loss(0.05 * each)
        elif self.kind == "sum":
            self.add_loss(0.05 * ops.sum(each))
        elif self.kind == "object":
            self.add_loss(keras.losses.MeanSquaredError()(ops.zeros_like(x), x))
        elif self.kind == "training only" and training:
            self.add_loss(0.04 * ops.sum(each))
        return x


def with_added(kind: str, loss: Any = "mse") -> keras.Model:
    i = layers.Input((6,))
    h = Adds(kind)(layers.Dense(8, "tanh", kernel_regularizer="l2")(i))
    return compiled(keras.Model(i, layers.Dense(1)(h)), loss)


class Endpoint(layers.Layer):
    def call(self, y: Any, p: Any) -> Any:
        self.add_loss(keras.losses.Huber(delta=0.5)(y, p))
        return p


def endpoint() -> keras.Model:
    x, y = layers.Input((6,), name="x"), layers.Input((1,), name="y")
    return compiled(keras.Model({"x": x, "y": y}, Endpoint()(y, layers.Dense(1)(x))), None)


class Autoencoder(keras.Model):
    """A variational one, after the functional style: reconstruction and divergence, both added."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = layers.Dense(4), layers.Dense(6)
        self.seed = keras.random.SeedGenerator(11)

    def call(self, x: Any, training: bool = False) -> Any:
        mean, variance = ops.split(self.encode(x), 2, axis=1)
        if training:
            mean = mean + ops.exp(0.5 * variance) * keras.random.normal(ops.shape(mean), seed=self.seed)
        divergence = -0.5 * ops.sum(1 + variance - ops.square(mean) - ops.exp(variance), axis=1)
        self.add_loss(0.1 * ops.mean(divergence))
        return self.decode(mean)


def autoencoder() -> keras.Model:
    return compiled(Autoencoder(), "mse", keras.optimizers.Adam(0.01))


def itself() -> dict[str, Any]:
    return {name: (x, x) for name, (x, _) in table().items()}


def masked_batch_norm() -> keras.Model:
    embed = [layers.Input((7,), dtype="int32"), layers.Embedding(12, 6, mask_zero=True)]
    norm = layers.BatchNormalization(momentum=0.8, synchronized=True)
    return compiled(keras.Sequential([*embed, norm, layers.GlobalAveragePooling1D(), layers.Dense(1)]))


def totals() -> dict[str, Any]:
    return {name: (x, x.sum(1, keepdims=True).astype("float32") / 30) for name, (x, _) in sequences().items()}


def spectral() -> keras.Model:
    """The layer estimates the largest singular value in each step, from the same weights in all replicas."""
    hidden = layers.SpectralNormalization(layers.Dense(8, "tanh"), power_iterations=2)
    return compiled(keras.Sequential([layers.Input((6,)), hidden, layers.Dense(1)]))


# overridden compute_loss and compute_metrics


class OwnMean(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + ops.sum(self.losses or [0.0])


class OwnTerm(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.2 * ops.mean(ops.abs(y_pred))


class OwnRoot(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sqrt(super().compute_loss(x, y, y_pred, sample_weight) + 1e-3)


class OwnSum(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.05 * ops.sum(ops.square(y - y_pred))


def set_loss(of_all_rows: bool) -> keras.Model:
    """Return a model with a loss that is set on the model, not on its class."""
    model = compiled(net())
    keras_loss: Any = model.compute_loss

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if of_all_rows:
            return keras_loss(x, y, y_pred, sample_weight) + ops.mean(ops.abs(y_pred))
        return keras_loss(x, y[:-1], y_pred[:-1], None)

    model.compute_loss = compute_loss
    return model


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "mean_output": ops.mean(y_pred)}


# metrics


class Largest(keras.metrics.Metric):
    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - prediction))))

    def result(self):
        return self.value + 0.0  # Keras would show a variable as it is after validation


class Smallest(Largest):
    """Begins at a value that is not 0."""

    def __init__(self) -> None:
        super().__init__("smallest")
        self.reset_state()

    def reset_state(self):
        self.value.assign(1e3)

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(ops.minimum(self.value, ops.min(ops.abs(y - prediction))))


class Moving(keras.metrics.Metric):
    """A moving average over batches."""

    def __init__(self) -> None:
        super().__init__(name="moving")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(0.9 * self.value + 0.1 * ops.mean(ops.abs(y - prediction)))

    def result(self):
        return self.value + 0.0  # Keras would show a variable as it is after validation


class Shown(Largest):
    """Its result is its variable and not a tensor, so Keras's `fit` shows the value that it has after validation."""

    def result(self):
        return self.value


class Late(keras.metrics.Metric):
    """Adds up while predictions are far from the labels, and is a maximum later."""

    def __init__(self) -> None:
        super().__init__(name="late")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, prediction, sample_weight=None):
        error = ops.abs(y - prediction)
        summed = self.value + ops.sum(error)
        self.value.assign(ops.where(ops.mean(error) > 1.0, summed, ops.maximum(self.value, ops.max(error))))

    def result(self):
        return self.value + 0.0


class Ends(keras.metrics.Metric):
    """Several results at once."""

    def __init__(self) -> None:
        super().__init__(name="ends")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, prediction, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y - prediction)))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self):
        return {"total": self.total + 0.0, "mean": self.total / self.count}


def root_error(y: Any, p: Any) -> Any:
    """A metric function with one value for a batch, which is not the mean of the values of the batch's parts."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


def mean_error(y: Any, p: Any) -> Any:
    """A metric function with one value for a batch, which is the mean of the values of the batch's parts."""
    return ops.mean(ops.abs(y - p))


# steps of the user's own


class PlainSteps:
    """Keras's guide: a mean by hand, and a tracker of it."""

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"my_loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(self.loss_of(y, self(x, training=False)))
        return {"my_loss": self.tracker.result()}


class Plain(PlainSteps, keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="my_loss")


class PlainSum(Plain):
    def loss_of(self, y: Any, p: Any) -> Any:
        return 0.05 * ops.sum(ops.square(y - p))


class PlainRoot(Plain):
    def loss_of(self, y: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y - p)) + 1e-3)


class Guide(keras.Model):
    """Every metric is updated by hand, the loss tracker with the loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class Object(Guide):
    """A loss object of Keras's, called by hand, whose value is logged."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"squares": loss, "parts": {"half": loss / 2}}


class Penalty(keras.Model):
    """A gradient penalty, as WGAN-GP has it: of each row, with respect to its inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                prediction = self(x, training=True)
            slopes = inner.gradient(prediction, x)
            norms = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6)
            loss = ops.mean(ops.square(y - prediction)) + 0.5 * ops.mean(ops.square(norms - 1.0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Gan(keras.Model):
    """A generator and a discriminator, each with its optimizer; noise from a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = net(8, 6, 3), net(8, 1, 6, "relu")
        self.seed = keras.random.SeedGenerator(5)

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        self.first.build(self.maker.trainable_variables)
        self.second.build(self.judge.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data):
        x, _ = data
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        rows = ops.shape(x)[0]
        noise = keras.random.normal((rows, 3), seed=self.seed)
        with tf.GradientTape() as tape:
            real, made = self.judge(x), self.judge(self.maker(noise))
            judged = entropy(ops.ones_like(real), real) + entropy(ops.zeros_like(made), made)
        self.second.apply(tape.gradient(judged, self.judge.trainable_variables), self.judge.trainable_variables)
        with tf.GradientTape() as tape:
            made = self.judge(self.maker(noise))
            fooled = entropy(ops.ones_like(made), made)
        self.first.apply(tape.gradient(fooled, self.maker.trainable_variables), self.maker.trainable_variables)
        return {"judged": judged, "fooled": fooled}


def gan() -> keras.Model:
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    return model


class Distilled(Plain):
    """Learns from a frozen teacher."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.teacher = net(5, 1)
        self.teacher.trainable = False

    def train_step(self, data):
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = 0.3 * ops.mean(ops.square(y - p)) + 0.7 * ops.mean(ops.square(taught - p))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"my_loss": self.tracker.result()}


class Averaged(PlainSteps, keras.Model):
    """A copy of its network follows it, as a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="my_loss")
        self.student, self.follower = net(), net()
        self.follower.trainable = False

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x) if training else self.follower(x)

    def train_step(self, data):
        logs = super().train_step(data)
        for target, source in zip(self.follower.weights, self.student.weights, strict=True):
            target.assign(0.9 * target + 0.1 * source)
        return logs


class Wrapped(keras.Model):
    """Calls Keras's own step, and adds a value."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "rows": ops.cast(ops.shape(data[0])[0], "float32")}


class DictBatch(keras.Model):
    """Unpacks a batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs[0]) + inputs[1])

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(None, batch["y"], self([batch["x"], batch["x"][:, :1]]))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


class Unseeded(keras.Model):
    """Draws from Keras's global generator within its step."""

    def train_step(self, data):
        x, y = data
        x = x + 0.1 * keras.random.normal(ops.shape(x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


class OwnTest(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"bias": ops.mean(self(x, training=False) - y)}


class Ratio(keras.Model):
    """Its evaluation step returns a value that is not the mean of the values of a batch's parts."""

    def test_step(self, data):
        x, y = data
        return {"psnr": -10.0 * ops.log(ops.mean(ops.square(y - self(x, training=False))))}


class Spread(keras.Model):
    """Its step returns, besides the metrics, a value that is not the mean of the values of a batch's parts."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "spread": ops.std(y_pred)}


def frozen() -> keras.Model:
    base = net(8, 4)
    base.layers[0].trainable = False
    i = layers.Input((6,))
    return compiled(keras.Model(i, layers.Dense(1)(base(i, training=False))), "mse", keras.optimizers.Adam(0.01))


def shared() -> keras.Model:
    i = layers.Input((6,))
    dense = layers.Dense(6, "tanh")
    return compiled(keras.Model(i, layers.Dense(1)(dense(dense(i)) + i)), "mae", keras.optimizers.Nadam(0.01))


def ema() -> keras.Model:
    return compiled(net(), "mse", keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.7))


def embedding(optimizer: Any) -> keras.Model:
    model = keras.Sequential(
        [layers.Input((7,), dtype="int32"), layers.Embedding(12, 4), layers.Flatten(), layers.Dense(1)]
    )
    return compiled(model, "mse", optimizer)


class Positions(layers.Layer):
    """Adds a learned vector for each position, as translation models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(7, 4)

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(ops.shape(x)[1]))


def positions(optimizer: Any) -> keras.Model:
    i = layers.Input((None,), dtype="int32")
    x = Positions()(layers.Embedding(12, 4)(i))
    x = x + layers.MultiHeadAttention(2, 4)(x, x)
    return compiled(keras.Model(i, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))), "mse", optimizer)


def tokens_sum() -> dict[str, Any]:
    return {name: (x, x.sum(1, keepdims=True).astype("float32") / 40) for name, (x, _) in sequences().items()}


def own(cls: type, loss: Any = None, metrics: Any = None, **options: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        return compiled(functional(cls, **options), loss, metrics=metrics)

    return make


def squares(reduction: str | None) -> Callable[[], keras.Model]:
    return lambda: compiled(net(), keras.losses.MeanSquaredError(reduction=reduction), keras.optimizers.SGD(0.002))


KINDS = ("mean", "rows", "sum", "object", "training only")
UNLIKE = "do not add up over replicas"
DENSE = dict.fromkeys(("dtensor", "jax"), "gradients of embeddings are dense on a mesh, as docs/numbers.md says")
CRASHES = {"dtensor": "DTensor ends with a segmentation fault"}
RECURRENT = {
    "dtensor": "DTensor has no recurrent layers",
    "jax": "Keras on JAX has other numbers here than on TensorFlow",
}
CASES: dict[str, Case] = {
    "row loss of a class": Case(lambda: compiled(net(), Asymmetric(), metrics=["mae"]), table),
    "scalar mean": Case(lambda: compiled(net(), scalar_mean), table),
    "scalar sum": Case(lambda: compiled(net(), scalar_sum, keras.optimizers.SGD(0.002)), table),
    "scalar root": Case(lambda: compiled(net(), scalar_root), table),
    "scalar, weighted": Case(lambda: compiled(net(), scalar_mean), weighted_table),
    "correlation": Case(lambda: compiled(net(), correlation), table),
    "contrast in the batch": Case(lambda: compiled(net(8, 6), in_batch_contrast), table),
    "triplets": Case(lambda: compiled(net(8, 3), Triplet()), classes, skips=CRASHES),
    "sum reduction": Case(squares("sum"), table),
    "no reduction": Case(squares(None), table),
    "masked tokens": Case(masked_sequence, sequences, skips=RECURRENT),
    "masked batch norm": Case(masked_batch_norm, totals),
    "spectral normalization": Case(spectral, table, skips={"dtensor": "DTensor cannot run it, and the run says so"}),
    "weights": Case(lambda: compiled(net(), "mse", weighted_metrics=["mae"]), weighted_table),
    "two outputs, scalar and rows": Case(lambda: two_outputs({"a": scalar_root, "b": "mae"}), two_targets),
    "two outputs, sum and mean": Case(lambda: two_outputs({"a": scalar_sum, "b": scalar_mean}), two_targets),
    **{f"added {kind}": Case(functools.partial(with_added, kind), table) for kind in KINDS},
    "added loss alone": Case(endpoint, inputs_only),
    "variational autoencoder": Case(autoencoder, itself),
    "own mean": Case(own(OwnMean, kernel_regularizer="l2", metrics=["mae"]), table),
    "own term": Case(own(OwnTerm, "mse"), table),
    "own root": Case(own(OwnRoot, "mse"), table),
    "own sum": Case(own(OwnSum), table),
    "set on the model": Case(lambda: set_loss(of_all_rows=True), table),
    "set, without a row": Case(lambda: set_loss(of_all_rows=False), table),
    "own metrics": Case(own(OwnMetrics, "mse", metrics=["mae"]), table),
    "largest": Case(lambda: compiled(net(), metrics=[Largest(), "mae"]), table),
    "largest, as a variable": Case(lambda: compiled(net(), metrics=[Shown()]), table, validates=False),
    "smallest": Case(lambda: compiled(net(), metrics=[Smallest()]), table),
    "late": Case(lambda: compiled(net(), metrics=[Late()]), table, says="a trial after the first epoch shows"),
    "moving": Case(lambda: compiled(net(), metrics=[Moving()]), table),
    "several results": Case(lambda: compiled(net(), metrics=[Ends()]), table),
    "metric functions": Case(lambda: compiled(net(), metrics=[root_error, mean_error]), table),
    "plain step": Case(own(Plain), table),
    "plain step, sum": Case(own(PlainSum), table, says="are sums over rows"),
    "plain step, root": Case(own(PlainRoot), table, says=UNLIKE),
    "guide": Case(own(Guide, "mse", metrics=["mae"]), table),
    "loss object by hand": Case(own(Object), table, validates=False),
    "gradient penalty": Case(own(Penalty), table, validates=False),
    "gan": Case(gan, table, validates=False),
    "distillation": Case(own(Distilled), table),
    "averaged copy": Case(lambda: compiled(Averaged(), None), table),
    "wrapped step": Case(own(Wrapped, "mse", metrics=["mae"]), table),
    "dict batch": Case(lambda: compiled(DictBatch()), inputs_only, validates=False),
    "unseeded draw": Case(own(Unseeded, "mse"), table),
    "own test step": Case(own(OwnTest, "mse"), table),
    "own ratio": Case(own(Ratio, "mse", metrics=["mae"]), table),
    "own spread": Case(own(Spread, "mse", metrics=["mae"]), table, says="'spread'"),
    "frozen part": Case(frozen, table),
    "shared layer": Case(shared, table),
    "average of weights": Case(ema, table),
    "embedding, rmsprop": Case(lambda: embedding(keras.optimizers.RMSprop(0.01)), tokens_sum, skips=DENSE),
    "positions, rmsprop": Case(lambda: positions(keras.optimizers.RMSprop(0.01)), tokens_sum, skips=DENSE),
    "one row in a batch": Case(lambda: compiled(net(), scalar_root), short_table, batch=1, epochs=1),
    "embedding, adagrad": Case(lambda: embedding(keras.optimizers.Adagrad(0.1)), tokens_sum, skips=DENSE),
}  # fmt: skip
