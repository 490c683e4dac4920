"""Keys of older versions, still read under the names that they have now."""

from __future__ import annotations

from distlaunch.config.read.tree import Node

_SHARDING = {"sharded": "rows", "shuffled": "shuffled"}


def rename(root: Node) -> None:
    """`strategy.per_worker_data` of version 0.1 is `data.sharding`, which wins where both are there."""
    strategy, data = _child(root, "strategy"), _child(root, "data")
    if strategy is None or data is None or "per_worker_data" not in strategy:
        return
    old = strategy.pop("per_worker_data")
    if isinstance(old.value, str):
        old = Node(_SHARDING.get(old.value, old.value), old.source)
    data.setdefault("sharding", old)


def _child(root: Node, name: str) -> dict[str | int, Node] | None:
    child = root.value.get(name) if isinstance(root.value, dict) else None
    return child.value if child is not None and isinstance(child.value, dict) else None
