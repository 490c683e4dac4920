"""Recommender that predicts ratings from the dot product of two embeddings, and generated ratings to train it on."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def factorization(users: int = 20_000, items: int = 4_000, dim: int = 16) -> keras.Model:
    """Return a matrix factorization with biases: `rating = user . item + user_bias + item_bias + mean`.

    The inputs `user` and `item` are int64 of shape [rows]; the output has shape [rows, 1]. The two embedding tables,
    of users x dim and items x dim numbers, are the variables that a partitioner splits.
    """
    layers = keras.layers
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")

    initializer: Any = keras.initializers.RandomUniform(-0.1, 0.1, seed=1)
    user_factors = layers.Embedding(users, dim, embeddings_initializer=initializer, name="user_factors")(user)
    item_factors = layers.Embedding(items, dim, embeddings_initializer=initializer, name="item_factors")(item)
    match = layers.Dot(axes=1)([user_factors, item_factors])

    user_bias = layers.Embedding(users, 1, embeddings_initializer="zeros", name="user_bias")(user)
    item_bias = layers.Embedding(items, 1, embeddings_initializer="zeros", name="item_bias")(item)
    x = layers.Add()([match, user_bias, item_bias])
    rating = layers.Dense(1, name="scale")(x)
    return keras.Model({"user": user, "item": item}, rating, name="recommender")


def generated_ratings(
    users: int = 20_000, items: int = 4_000, ratings: int = 120_000, factors: int = 4, noise: float = 0.1, seed: int = 0
) -> dict[str, Any]:
    """Return ratings of random pairs of a user and an item; the last tenth is for validation.

    Each user and each item has random hidden factors and a random bias. A rating is the dot product of the factors plus
    both biases, scaled to a standard deviation of about 1, plus noise.
    """
    rng = np.random.default_rng(seed)
    user_factors, item_factors = rng.normal(size=(users, factors)), rng.normal(size=(items, factors))
    user_bias, item_bias = rng.normal(size=users), rng.normal(size=items)
    # a few users and items have most of the ratings, as in real data
    user = (users * rng.random(ratings) ** 3).astype(np.int64)
    item = (items * rng.random(ratings) ** 3).astype(np.int64)
    match = (user_factors[user] * item_factors[item]).sum(1) / np.sqrt(factors)
    rating = (match + user_bias[user] + item_bias[item]) / np.sqrt(3) + noise * rng.normal(size=ratings)
    rating = rating.astype(np.float32)[:, None]

    num_train = ratings - ratings // 10
    train = {"user": user[:num_train], "item": item[:num_train]}, rating[:num_train]
    validation = {"user": user[num_train:], "item": item[num_train:]}, rating[num_train:]
    return {"train": train, "validation": validation, "origin": "generated"}
