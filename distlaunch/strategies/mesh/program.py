"""Base class of programs on a mesh, whose devices hold the state of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from distlaunch.data.batches import Source
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.mesh.layout import Axes
from distlaunch.strategies.mesh.state import log_state, mesh_description, snapshot_variables
from distlaunch.strategies.protocol import Logs, Program, Steps
from distlaunch.strategies.state import State


class MeshProgram(Program):
    """Base of both programs on a mesh.

    Args:
        steps: functional steps `train(state, batch) -> (logs, state)` and `test`, as in Keras on JAX.
        sizes: sizes of the mesh's axes.
        input_axes: mesh axis of each dimension of the inputs; the first splits the examples.
        peers: the processes whose devices form the mesh.
    """

    def __init__(self, steps: Steps, sizes: Mapping[str, int], input_axes: Axes, peers: Peers) -> None:
        self._steps, self._model, self._peers = steps, steps.model, peers
        self._sizes, self._input_axes = sizes, input_axes
        self._source: Source | None = None
        self._steps_in_epoch = 0
        self._sums: dict[str, Any] = {}
        """Sums of the scalars that the step returns in addition to the model's metrics, or their last values."""

    def _may_make_several_steps(self, source: Source) -> bool:
        """Return whether a call may make the steps of several batches of a source; the same in all processes."""
        must_agree = self._peers.number > 1 and source.ends  # on the end of the data, before each step
        return not (self._steps.one_by_one or must_agree or source.is_process_local)

    def _whole_value(self, variable: Any) -> np.ndarray:
        """Return a copy of the whole value of a variable; every process must call it."""
        raise NotImplementedError

    def gathered(self) -> AbstractContextManager[None]:
        return self._local.with_gathered_weights({id(one): self._whole_value(one) for one in self._model.variables})

    def mesh(self) -> dict[str, Any]:
        return mesh_description(self._sizes, self._input_axes)

    def snapshot(self) -> State:
        state = {name: self._whole_value(variable) for name, variable in snapshot_variables(self._model).items()}
        return {**state, **self.log_state()}

    def log_state(self) -> State:
        """See `StoredProgram.log_state`."""
        return log_state(self._model, self._sums, self._steps_in_epoch)

    def _combine_logs(self, metrics: Logs, own: Logs) -> Logs:
        """Return the logs of training, from the results of the metrics and the host values of the sums."""
        if own and self._steps.logs == "last":
            return own  # as in Keras, the step's own logs replace the metrics
        scale = max(self._steps_in_epoch, 1)
        return {**metrics, **{name: value / scale for name, value in own.items()}}
