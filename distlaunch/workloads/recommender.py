"""A recommender: ratings from the dot product of two embeddings, on data generated from hidden factors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def factorization(users: int = 20_000, items: int = 4_000, dim: int = 16) -> keras.Model:
    """Matrix factorisation with biases: `rating = user . item + user_bias + item_bias + mean`.

    Inputs `user` and `item`, int64 of shape [rows]; output of shape [rows, 1]. The tables hold users x dim and
    items x dim numbers: what a partitioner splits.
    """
    layers = keras.layers
    user, item = keras.Input((), dtype="int64", name="user"), keras.Input((), dtype="int64", name="item")
    small: Any = keras.initializers.RandomUniform(-0.1, 0.1, seed=1)
    match = layers.Dot(axes=1)(
        [
            layers.Embedding(users, dim, embeddings_initializer=small, name="user_factors")(user),
            layers.Embedding(items, dim, embeddings_initializer=small, name="item_factors")(item),
        ]
    )
    user_bias = layers.Embedding(users, 1, embeddings_initializer="zeros", name="user_bias")(user)
    item_bias = layers.Embedding(items, 1, embeddings_initializer="zeros", name="item_bias")(item)
    rating = layers.Dense(1, name="scale")(layers.Add()([match, user_bias, item_bias]))
    return keras.Model({"user": user, "item": item}, rating, name="recommender")


def generated_ratings(
    users: int = 20_000, items: int = 4_000, ratings: int = 120_000, factors: int = 4, noise: float = 0.1, seed: int = 0
) -> dict[str, Any]:
    """Ratings of random pairs; a tenth is for validation.

    A user's and an item's hidden factors are drawn once; the rating is their dot product plus a taste of each, scaled
    to a standard deviation of about 1, plus noise.
    """
    rng = np.random.default_rng(seed)
    of_user, of_item = rng.normal(size=(users, factors)), rng.normal(size=(items, factors))
    taste, quality = rng.normal(size=users), rng.normal(size=items)
    # a few users and items have most of the ratings, as everywhere
    user = (users * rng.random(ratings) ** 3).astype(np.int64)
    item = (items * rng.random(ratings) ** 3).astype(np.int64)
    match = (of_user[user] * of_item[item]).sum(1) / np.sqrt(factors)
    rating = (match + taste[user] + quality[item]) / np.sqrt(3) + noise * rng.normal(size=ratings)
    rating = rating.astype(np.float32)[:, None]
    edge = ratings - ratings // 10

    def split(rows: slice) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return {"user": user[rows], "item": item[rows]}, rating[rows]

    return {"train": split(slice(0, edge)), "validation": split(slice(edge, None)), "origin": "generated"}
