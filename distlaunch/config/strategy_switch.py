"""What of a config belongs to one strategy only, so that one setting can switch to another."""

from __future__ import annotations

from typing import get_args

from distlaunch.config.base import Section
from distlaunch.config.read.tree import Node
from distlaunch.config.strategy import Cluster, Strategy

MODELS: dict[str, type[Section]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(get_args(Strategy)[0])
}
"""Config class of each kind of strategy."""

KINDS = tuple(MODELS)

CLUSTER_KEYS: dict[str, frozenset[str]] = {
    "multi_worker_mirrored": frozenset({"workers", "ports"}),
    "parameter_server": frozenset({"workers", "ps", "hosting", "ports"}),
    "dtensor": frozenset({"workers", "ports"}),
    "jax": frozenset({"workers", "ports"}),
}
"""Keys of `cluster:` that mean something to one kind of strategy only; the others of `Cluster` are for all."""

_SHARED_CLUSTER_KEYS = frozenset(Cluster.model_fields) - frozenset().union(*CLUSTER_KEYS.values())


def kind_written(root: Node) -> object:
    """The strategy's kind as written, checked or not."""
    strategy = root.child("strategy")
    kind = strategy.child("kind") if strategy else None
    return kind.value if kind else None


def drop_foreign_keys(root: Node) -> None:
    """Removes what the file says for another kind of strategy than the one that an override chose.

    Keys that no strategy knows stay, and are reported; so do those that an override sets.
    """
    kind = kind_written(root)
    strategy = root.child("strategy")
    if not isinstance(kind, str) or kind not in MODELS or strategy is None:
        return
    others = {name for model in MODELS.values() for name in model.model_fields}
    _drop(strategy, others - set(MODELS[kind].model_fields))
    cluster = root.child("cluster")
    if cluster is not None:
        _drop(cluster, set(Cluster.model_fields) - _SHARED_CLUSTER_KEYS - CLUSTER_KEYS.get(kind, frozenset()))


def _drop(node: Node, keys: set[str]) -> None:
    if isinstance(node.value, dict):
        node.value = {key: child for key, child in node.value.items() if key not in keys or _overridden(child)}


def _overridden(node: Node) -> bool:
    return node.source.startswith("--set ") or any(_overridden(child) for child in node.children())
