import pathlib

import keras
import numpy as np


def texts():
    x = np.array(["good film", "bad film", "so good", "so bad"] * 3, dtype=object)
    return {"train": (x, np.array([1, 0, 1, 0] * 3)), "validation": (x[:3], np.array([1, 0, 1]))}


def vectorizer(inputs, max_tokens=10, source=None):
    pathlib.Path(__file__).with_name("calls").open("a").write("x")
    layer = keras.layers.TextVectorization(output_mode="multi_hot", max_tokens=max_tokens)
    layer.adapt(inputs)
    return layer


def nothing(inputs):
    return len(list(inputs))


def table():
    size = np.arange(4.0, dtype="float32")
    x = {"age": np.array([20, 30, 40, 30]), "kind": np.array(["a", "b", "a", "c"]), "size": size}
    return {"train": (x, np.arange(4)), "validation": ({name: column[:3] for name, column in x.items()}, np.arange(3))}


def space(inputs, output_mode="concat"):
    space = keras.utils.FeatureSpace
    kinds = {
        "age": space.integer_categorical(num_oov_indices=0),
        "kind": space.string_categorical(num_oov_indices=0),
        "size": space.float_normalized(),
    }
    made = space(features=kinds, crosses=[("age", "kind")], crossing_dim=8, output_mode=output_mode)
    made.adapt(inputs)
    return made


class Unregistered(keras.layers.Layer):
    def __init__(self, needed):
        super().__init__()


def unregistered(inputs):
    return Unregistered(3)


if __name__ == "__main__":
    import sys

    from distlaunch.base.run_dir import RunDir
    from distlaunch.config.run import RunConfig
    from distlaunch.data.source import open_splits

    config = RunConfig.model_validate_json(sys.argv[1])
    print(open_splits(config, RunDir(sys.argv[2]))[1].first_rows(2)[0].numpy().tolist())
