"""A `tf.distribute` strategy whose variables or sums are not as `ReplicaProgram` needs them is refused, not trained."""

from __future__ import annotations

from typing import Any

import pytest

from distlaunch.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("virtual_devices")
DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def test_central_storage_is_refused_when_the_program_is_made() -> None:
    """Its replicas share each variable: without the check, it trains to wrong losses."""
    import tensorflow as tf

    from distlaunch.strategies.replica.strategy import ReplicaStrategy
    from tests.parity.train_case import train_case

    central = tf.distribute.experimental.CentralStorageStrategy(DEVICES[:2], parameter_device="CPU:0")
    with pytest.raises(ConfigError) as refused:
        train_case("mlp sgd, uneven", ReplicaStrategy(central))
    (problem,) = refused.value.problems
    assert problem.key == ("strategy", "kind")
    assert problem.message.startswith("CentralStorageStrategy lacks a property that replicas in lockstep need")
    assert problem.message.endswith("use kind: mirrored")


def replicas(**changed: int) -> Any:
    from distlaunch.strategies.replica.sums import Replicas

    return Replicas(**{"total": 3, "local": 3, "first": 0, **changed})


def mirrored() -> Any:
    from distlaunch.patches.tensorflow_collectives import mirrored_strategy

    return mirrored_strategy(DEVICES)


def test_mirrored_passes() -> None:
    from distlaunch.strategies.replica.variable_check import check_replicas

    check_replicas(mirrored(), replicas())


class Sharing:
    """A mirrored strategy whose variables are all made in one way.

    Args:
        options: how.
    """

    def __init__(self, **options: Any) -> None:
        self._strategy, self._options = mirrored(), options

    def scope(self) -> Any:
        import contextlib

        import tensorflow as tf

        @contextlib.contextmanager
        def scope() -> Any:
            with self._strategy.scope(), tf.variable_creator_scope(lambda make, **kw: make(**{**kw, **self._options})):
                yield

        return scope()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def test_a_metric_that_replicas_share_is_refused() -> None:
    import tensorflow as tf

    from distlaunch.strategies.replica.variable_check import check_replicas

    options = {
        "synchronization": tf.VariableSynchronization.ON_WRITE,
        "aggregation": tf.VariableAggregation.SUM,
    }
    with pytest.raises(ConfigError, match=r"share the value of a metric's variable: expected \[1, 2, 3\], got \[6"):
        check_replicas(Sharing(**options), replicas())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first": 1}, r"wrong numbers: expected \[1, 2, 3\], got \[0"),
        ({"total": 6}, r"a sum over all replicas is wrong: expected \[21.0, 21.0, 21.0\], got \[6.0"),
    ],
)
def test_replicas_that_are_counted_differently_are_refused(changed: dict[str, int], message: str) -> None:
    from distlaunch.strategies.replica.variable_check import check_replicas

    with pytest.raises(ConfigError, match=message):
        check_replicas(mirrored(), replicas(**changed))
