"""`strategy:`, how the work is divided. A strategy is a config class with its traits, and a line in the table below."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from distlaunch.config.base import Words
from distlaunch.config.strategies.base import OneDevice, StrategySection
from distlaunch.config.strategies.mesh import DTensor, Jax
from distlaunch.config.strategies.parameter_server import ParameterServer
from distlaunch.config.strategies.replicas import Mirrored, MultiWorkerMirrored

Strategy = Annotated[
    OneDevice | Mirrored | MultiWorkerMirrored | ParameterServer | DTensor | Jax,
    Field(discriminator="kind"),
    Words("a section with 'kind', such as {kind: mirrored}"),
]

# the kind is a Literal of one word; `Strategy` is an Annotated union
MODELS: dict[str, type[StrategySection]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(get_args(Strategy)[0])
}
"""Config class of each kind of strategy."""

KINDS = tuple(MODELS)
REFERENCE = KINDS[0]
"""The kind that all others are compared with."""


def kinds_that_use(cluster_key: str) -> tuple[str, ...]:
    """Return the kinds that use a key of `cluster:`."""
    return tuple(kind for kind, model in MODELS.items() if cluster_key in model.cluster_keys)
