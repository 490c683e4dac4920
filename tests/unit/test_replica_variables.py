"""Assignments to variables of which each replica has a copy."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")


def test_a_reset_of_metrics_sums_nothing_over_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras
    import tensorflow as tf

    from distlaunch.patches import keras_assign
    from distlaunch.patches.symbols import internal

    keras_assign.install()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        metric = keras.metrics.Mean()
    update = tf.function(lambda: strategy.run(lambda: metric.update_state([1.0, 3.0])))
    update()
    assert float(metric.result()) == 2.0
    summed = internal("tensorflow.python.distribute.values.SyncOnReadVariable")
    reads: list[str] = []
    read = summed.read_value

    def counted(self: tf.Variable) -> tf.Tensor:
        reads.append(self.name)
        return read(self)

    monkeypatch.setattr(summed, "read_value", counted)
    metric.reset_state()
    assert reads == []
    monkeypatch.undo()
    for variable in metric.variables:
        assert [float(copy) for copy in strategy.experimental_local_results(variable.value)] == [0.0, 0.0]
    update()
    assert float(metric.result()) == 2.0
