"""The clock of a graph is read before the step that follows a wait."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from distlaunch.data.graph_clock import now, read_timed  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")


def ancestors(operation: Any) -> set[Any]:
    """Return all operations that must run before an operation."""
    found: set[Any] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        for before in (*(each.op for each in one.inputs), *one.control_inputs):
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_step_waits_until_both_times_are_read(is_nested: bool) -> None:
    """Otherwise a single thread may compute the step first, and the wait for its batch seems to take as long."""

    @tf.function
    def step(x: Any) -> Any:
        def read() -> Any:
            element = tf.sin(x)
            return {"x": element, "ragged": tf.RaggedTensor.from_row_lengths(element, [2, 2])} if is_nested else element

        def ready(element: Any) -> Any:
            return element["x"] if is_nested else element

        element, waited = read_timed(read, now(x), ready)
        result = tf.cos(element["ragged"].values if is_nested else element, name="step")
        return result, waited

    graph = step.get_concrete_function(tf.TensorSpec([4], tf.float32)).graph
    before = ancestors(graph.get_operation_by_name("step"))
    assert sum(each.type == "Timestamp" for each in before) == 3  # before the wait, and its beginning and end
