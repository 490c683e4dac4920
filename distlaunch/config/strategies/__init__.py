"""`strategy:`, how the work is divided. A strategy is a config class with its traits, and a line in the table below."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from distlaunch.config.base import Words
from distlaunch.config.strategies.base import OneDeviceSection, StrategySection
from distlaunch.config.strategies.mesh import DTensorSection, JaxSection
from distlaunch.config.strategies.parameter_server import ParameterServerSection
from distlaunch.config.strategies.replicas import MirroredSection, MultiWorkerMirroredSection

Strategy = Annotated[
    OneDeviceSection
    | MirroredSection
    | MultiWorkerMirroredSection
    | ParameterServerSection
    | DTensorSection
    | JaxSection,
    Field(discriminator="kind"),
    Words("a section with 'kind', such as {kind: mirrored}"),
]

# `Strategy` is an Annotated union
MODELS: dict[str, type[StrategySection]] = {model.own_kind(): model for model in get_args(get_args(Strategy)[0])}
"""Config class of each kind of strategy."""

KINDS = tuple(MODELS)
REFERENCE = OneDeviceSection.own_kind()
"""The kind that all others are compared with."""


def kinds_that_use(cluster_key: str) -> tuple[str, ...]:
    """Return the kinds that use a key of `cluster:`."""
    return tuple(kind for kind, model in MODELS.items() if cluster_key in model.cluster_keys)
