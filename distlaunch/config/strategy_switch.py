"""The parts of a config that belong to one strategy only, so that one setting can switch to another."""

from __future__ import annotations

from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Node
from distlaunch.config.strategies import MODELS

_SHARED_CLUSTER_KEYS = frozenset(Cluster.model_fields) - frozenset[str]().union(
    *(model.cluster_keys for model in MODELS.values())
)


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
        _drop(cluster, set(Cluster.model_fields) - _SHARED_CLUSTER_KEYS - MODELS[kind].cluster_keys)


def _drop(node: Node, keys: set[str]) -> None:
    if isinstance(node.value, dict):
        node.value = {key: child for key, child in node.value.items() if key not in keys or _overridden(child)}


def _overridden(node: Node) -> bool:
    # what the user has just asked for is never dropped silently
    return node.source.startswith("--set ") or any(_overridden(child) for child in node.children())
