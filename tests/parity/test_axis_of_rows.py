"""Losses and metrics of Keras that compute along the rows of a batch have the values of one device on replicas."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import pytest

from distlaunch.strategies.patches.keras_replica_metrics import adds_up, compares_rows
from tests.corpus.models import compiled, net
from tests.parity.test_custom_on_replicas import compare

pytestmark = pytest.mark.usefixtures("virtual_devices")


def model() -> keras.Model:
    metrics: list[Any] = [keras.metrics.PearsonCorrelation(axis=0)]
    return compiled(net(), keras.losses.CosineSimilarity(axis=0), metrics=metrics)


@pytest.mark.slow
def test_values_along_rows(tmp_path: Path) -> None:
    said = compare(tmp_path, f"{__name__}:model", loop="fit").said
    assert [one for one in said if "metric 'pearson_correlation' does not add up" in one]


@pytest.mark.parametrize(
    ("axis", "compares"), [(-1, False), (1, False), ((1, 2), False), (0, True), (-2, True), ((0, 1), True)]
)
def test_which_axes_may_be_the_rows(axis: Any, compares: bool) -> None:
    metric = keras.metrics.ConcordanceCorrelation(axis=axis)
    assert compares_rows(metric) is compares
    assert adds_up(metric) is (None if compares else True)
    assert compares_rows(functools.partial(keras.losses.cosine_similarity, axis=axis)) is compares
    assert not compares_rows(keras.losses.mean_squared_error)
