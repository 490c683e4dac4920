"""Small transformer, and a task that it learns in a minute: sorting."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def transformer(
    vocabulary: int = 16, length: int = 16, width: int = 64, heads: int = 4, blocks: int = 2, hidden: int = 128
) -> keras.Model:
    """Return a transformer with embeddings of tokens and positions, which computes logits for each token.

    Args:
        vocabulary: number of different tokens.
        length: tokens in a sequence.
        width: features of a token; each attention head gets `width / heads` of them.
        hidden: units of the MLP in each block.
    """
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = TokenAndPosition(vocabulary, width, name="embedding")(tokens)
    for i in range(blocks):
        h = layers.LayerNormalization(name=f"block{i}_norm1")(x)
        h = layers.MultiHeadAttention(heads, width // heads, name=f"block{i}_attention")(h, h)
        x = layers.Add()([x, h])
        h = layers.LayerNormalization(name=f"block{i}_norm2")(x)
        h = layers.Dense(hidden, activation="gelu", name=f"block{i}_up")(h)
        h = layers.Dense(width, name=f"block{i}_down")(h)
        x = layers.Add()([x, h])
    x = layers.LayerNormalization(name="norm")(x)
    logits = layers.Dense(vocabulary, name="logits")(x)
    return keras.Model(tokens, logits, name="transformer")


@keras.saving.register_keras_serializable("distlaunch")
class TokenAndPosition(keras.layers.Layer):
    """Sum of a learned embedding of each token and a learned embedding of each position.

    Tokens are looked up by multiplying one-hot rows with the table, which gives a dense gradient. On one TensorFlow
    device, `keras.layers.Embedding` has a sparse gradient. Adam then squares each gradient of a repeated token
    separately, instead of squaring their sum.
    """

    def __init__(self, vocabulary: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary, self.width = vocabulary, width

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.tokens = self.add_weight(shape=(self.vocabulary, self.width), initializer="uniform", name="tokens")
        self.positions = self.add_weight(shape=(input_shape[1], self.width), initializer="uniform", name="positions")

    def call(self, inputs: Any) -> Any:
        one_hot = keras.ops.one_hot(inputs, self.vocabulary, dtype=self.compute_dtype)
        return keras.ops.matmul(one_hot, self.tokens) + self.positions

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary": self.vocabulary, "width": self.width}


def sorting(
    examples: int = 8000, validation: int = 1000, vocabulary: int = 16, length: int = 16, seed: int = 0
) -> dict[str, Any]:
    """Return sequences of random tokens; the model is to predict the same tokens in sorted order.

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
