import keras
import numpy as np

L = keras.layers


def model():
    user, item = keras.Input((), dtype="int32", name="user"), keras.Input((3,), name="item")
    x = L.Concatenate()([L.Embedding(10, 4)(user), item])
    x = L.Dropout(0.5)(L.BatchNormalization()(L.Dense(8, "tanh")(x)))
    return keras.Model({"user": user, "item": item}, {"rating": L.Dense(1)(x), "kind": L.Dense(2)(x)})


def data():
    x = {"user": np.arange(100) % 10, "item": np.random.default_rng(0).normal(size=(100, 3))}
    y = {"rating": x["item"].sum(1, keepdims=True), "kind": x["item"][:, :2]}
    split = lambda rows: tuple({name: part[rows] for name, part in of.items()} for of in (x, y))
    return {"train": split(slice(64)), "validation": split(slice(64, 100))}


class Scale(L.Layer):
    def __init__(self, factor=1.0, forget=False):
        super().__init__()
        self.factor, self.forget = factor, forget

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {} if self.forget else {"factor": self.factor}


def scaled(forget):
    return keras.Sequential([keras.Input((3,)), L.Dense(2), Scale(3.0, forget)])


def plain():
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    return x, x[:, :2]
