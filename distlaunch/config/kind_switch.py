"""Removes the parts of a config that belong to another kind of strategy or engine than the one in use."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.config import engines
from distlaunch.config.base import Section
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Node
from distlaunch.config.strategies import MODELS

_SHARED_CLUSTER_KEYS = frozenset(Cluster.model_fields) - frozenset[str]().union(
    *(model.cluster_keys for model in MODELS.values())
)


def kinds_written(root: Node) -> dict[str, object]:
    """Return the kinds of strategy and engine as written, valid or not."""
    found: dict[str, object] = {}
    for name in ("strategy", "engine"):
        section = root.child(name)
        kind = section.child("kind") if section else None
        found[name] = kind.value if kind else None
    return found


def drop_foreign_keys(root: Node, before: Mapping[str, object]) -> None:
    """Remove the file's keys for another kind of strategy or engine than the one that an override chose.

    Keys that no kind knows remain, and are reported. Keys that an override sets remain, too.

    Args:
        before: the kinds in the file; see `kinds_written`.
    """
    now = kinds_written(root)
    if now["engine"] != before["engine"]:
        _drop_of_other_kinds(root.child("engine"), now["engine"], engines.installed().models)
    if now["strategy"] == before["strategy"]:
        return
    kind, cluster = now["strategy"], root.child("cluster")
    _drop_of_other_kinds(root.child("strategy"), kind, MODELS)
    if isinstance(kind, str) and kind in MODELS and cluster is not None:
        _drop(cluster, set(Cluster.model_fields) - _SHARED_CLUSTER_KEYS - MODELS[kind].cluster_keys)


def _drop_of_other_kinds(section: Node | None, kind: object, models: Mapping[str, type[Section]]) -> None:
    if section is not None and isinstance(kind, str) and kind in models:
        others = {name for model in models.values() for name in model.model_fields}
        _drop(section, others - set(models[kind].model_fields))


def _drop(node: Node, keys: set[str]) -> None:
    if isinstance(node.value, dict):
        node.value = {key: child for key, child in node.value.items() if key not in keys or _overridden(child)}


def _overridden(node: Node) -> bool:
    # keys that an override sets are never dropped silently
    return node.source.startswith("--set ") or any(_overridden(child) for child in node.children())
