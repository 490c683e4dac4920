"""Each weight keeps its own optimizer state when a run resumes with other settings, also if layers have equal names."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.checkpoints.optimizer_changes import carry_over, describe_optimizers
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import host_value, restore_variables, state_variables

pytestmark = pytest.mark.usefixtures("virtual_devices")


class Towers:
    """Two submodels from one function, whose layers have the same names, and a third layer."""

    def __init__(self, *, frozen: bool = False, use_ema: bool = False) -> None:
        i = keras.Input((3,))
        self.parts = [keras.Model(i, keras.layers.Dense(1, name="head")(i), name=name) for name in ("a", "b")]
        x = keras.Input((3,))
        self.model = keras.Model(x, keras.layers.Dense(1, name="top")(self.parts[0](x) + self.parts[1](x)))
        self.parts[0].trainable = not frozen
        self.model.compile(keras.optimizers.Adam(use_ema=use_ema, name="adam"), "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.built = describe_optimizers(self.model)

    def state(self) -> State:
        return {name: host_value(variable) for name, variable in state_variables(self.model).items()}

    def resume(self, before: Towers, state: State) -> list[str]:
        carried = carry_over(self.model, before.built, self.built, state, "compile.optimizer")
        restore_variables(self.model, carried.state)
        return carried.notes


def numbered(towers: Towers) -> State:
    """Return a state in which every value has a different number."""
    return {name: np.full_like(value, number) for number, (name, value) in enumerate(towers.state().items(), 1)}


def slots(towers: Towers, weight: Any, name: str) -> np.ndarray:
    """Return the optimizer's values for a weight, found by its place in the optimizer."""
    optimizer: Any = towers.model.optimizer
    index = next(at for at, each in enumerate(towers.model.trainable_variables) if each is weight)
    return host_value(getattr(optimizer, name)[index])


def test_a_frozen_tower_leaves_the_other_its_state() -> None:
    before, after = Towers(), Towers(frozen=True)
    state = numbered(before)
    restore_variables(before.model, state)
    after.resume(before, state)
    for name in ("_momentums", "_velocities"):
        expected = slots(before, before.parts[1].layers[1].kernel, name)
        np.testing.assert_array_equal(slots(after, after.parts[1].layers[1].kernel, name), expected)


def test_new_averages_start_at_the_weights_of_both_towers() -> None:
    before, after = Towers(), Towers(use_ema=True)
    state = numbered(before)
    after.resume(before, state)
    for weight in after.model.trainable_variables:
        average = slots(after, weight, "_model_variables_moving_average")
        np.testing.assert_array_equal(average, host_value(weight))
        assert average.any()


def test_a_random_layer_can_be_added_and_removed() -> None:
    def model(rate: float) -> keras.Model:
        keras.utils.clear_session(free_memory=False)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dropout(rate), keras.layers.Dense(1)])

    for first, second in ((0.0, 0.2), (0.2, 0.0)):
        before, after = model(first), model(second)
        restore_variables(after, {name: host_value(one) for name, one in state_variables(before).items()})
        np.testing.assert_array_equal(host_value(after.weights[0]), host_value(before.weights[0]))


@pytest.mark.parametrize("updates", [0, 3])
def test_a_resume_tells_of_larger_first_updates_of_weights_that_it_unfreezes(updates: int) -> None:
    before, after = Towers(frozen=True), Towers()
    state = {name: np.full_like(value, updates) for name, value in before.state().items()}
    notes = " ".join(after.resume(before, state))
    assert ("their first updates may be 6 times as large as usual" in notes) == (updates > 0)
