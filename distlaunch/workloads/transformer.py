"""A small transformer, and a task that it learns in a minute: sorting."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def transformer(
    vocabulary: int = 16, length: int = 16, width: int = 64, heads: int = 4, blocks: int = 2, hidden: int = 128
) -> keras.Model:
    """Token and position embeddings, blocks of attention and MLP, logits for each token.

    Args:
        width: features of a token; each head has `width / heads` of them.
        hidden: units of each block's MLP.
    """
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = TokenAndPosition(vocabulary, width, name="embedding")(tokens)
    for number in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"block{number}_attention")
        normal = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        x = layers.Add()([x, attention(normal, normal)])
        normal = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        up = layers.Dense(hidden, activation="gelu", name=f"block{number}_up")(normal)
        x = layers.Add()([x, layers.Dense(width, name=f"block{number}_down")(up)])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="logits")(x), name="transformer")


@keras.saving.register_keras_serializable("distlaunch")
class TokenAndPosition(keras.layers.Layer):
    """What the model learns of each token, plus what it learns of each position.

    Tokens are looked up by a product with one-hot rows, whose gradient is dense. That of `keras.layers.Embedding` is
    sparse on one TensorFlow device, where Adam squares the gradients of a repeated token one by one, not their sum.
    """

    def __init__(self, vocabulary: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary, self.width = vocabulary, width

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shapes = {"tokens": (self.vocabulary, self.width), "positions": (input_shape[1], self.width)}
        for name, shape in shapes.items():
            setattr(self, name, self.add_weight(shape=shape, initializer="uniform", name=name))

    def call(self, inputs: Any) -> Any:
        rows = keras.ops.one_hot(inputs, self.vocabulary, dtype=self.compute_dtype)
        return keras.ops.matmul(rows, self.tokens) + self.positions

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary": self.vocabulary, "width": self.width}


def sorting(
    examples: int = 8000, validation: int = 1000, vocabulary: int = 16, length: int = 16, seed: int = 0
) -> dict[str, Any]:
    """Sequences of random tokens; what is to be predicted is the same tokens in order.

    Returns:
        `train` and `validation`, each (tokens int32 [n, length], tokens sorted int32 [n, length]), and `origin`.
    """
    tokens = np.random.default_rng(seed).integers(vocabulary, size=(examples + validation, length), dtype=np.int32)
    ordered = np.sort(tokens, axis=1)
    return {
        "train": (tokens[:examples], ordered[:examples]),
        "validation": (tokens[examples:], ordered[examples:]),
        "origin": f"generated, seed {seed}",
    }
