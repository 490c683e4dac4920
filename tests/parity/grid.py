"""The grid of parity: reference workloads, strategies and settings that may interact, and impossible combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies import MODELS
from distlaunch.config.strategies.mesh import MeshSection
from tests.parity.cases import BATCH, CROSS_ENTROPY, optimizer
from tests.parity.pairwise import Point, covering, grid
from tests.strategies import OTHERS, WITH_REPLICAS_HERE, sections

HERE = "tests.parity.grid_problems"
MESHES = tuple(kind for kind, model in MODELS.items() if issubclass(model, MeshSection))
OPTIMIZERS = {
    "sgd": optimizer("SGD", learning_rate=0.05),
    "momentum": optimizer("SGD", learning_rate=0.02, momentum=0.9),
    "adam": optimizer("Adam", learning_rate=0.003),
    "adamw clipped": optimizer("AdamW", learning_rate=0.003, clipnorm=0.1, weight_decay=0.01),
    "rmsprop": optimizer("RMSprop", learning_rate=0.001),
    "adagrad": optimizer("Adagrad", learning_rate=0.02),
}
SMOOTH = [{"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}]
METRICS: dict[str, Any] = {
    "linear": ["mae"],
    "recommender": ["mae"],
    # their noise grows to where an example whose best logits are nearly equal may count or not
    "convnet": SMOOTH,
    "transformer": SMOOTH,
}
LONG, LONG_UNDER = ("cnn", "convnet", "transformer"), ("multi_worker_mirrored", "parameter_server")
HUGE = "a huge weight"
LAST = {"17 in the last batch": 233, "even": 240, "3 in the last batch": 219}  # rows; 3: replicas without rows
WORKLOADS = ("mlp", "cnn", "convnet", "recommender", "linear", "sentiment", "transformer")
MAIN: dict[str, tuple] = {
    "workload": WORKLOADS,
    "strategy": OTHERS,
    "replicas": (2, 4, 8, 1),
    "loop": ("fit", "custom"),
    "optimizer": tuple(OPTIMIZERS),
}
"""What the full grid is the product of."""
MORE: dict[str, tuple] = {
    "rows": tuple(LAST),
    "split": ("", "variables split"),
    "weights": ("", "class weights", "sample weights"),
    "penalty": ("", "L2"),
    "updates": ("", "accumulated"),
}
"""What takes part in every pair as well, and is dealt out over the full grid."""

MIXED: dict[str, tuple] = {
    **MAIN,
    "workload": ("mlp", "transformer", "convnet", "cnn", "recommender"),
    "optimizer": ("momentum",),
    **{name: levels[:1] for name, levels in MORE.items()},
    "split": MORE["split"],
    "weights": ("", HUGE),
    "updates": MORE["updates"],
    "precision": ("mixed_bfloat16", "mixed_float16"),
}
"""The grid of mixed precision."""

OF_PROCESSES = tuple(
    kind
    for kind, model in MODELS.items()
    if model.in_lockstep and model.model_construct(kind=kind).jobs(Cluster(workers=1))
)
"""Strategies whose replicas are a process each."""

IMPOSSIBLE: list[tuple[str, Callable[[Point], bool]]] = [
    (
        "replicas that are processes: 4 are left to the full grid, 8 are too many for a machine",
        lambda at: at["strategy"] in OF_PROCESSES and at["replicas"] not in (2, 4),
    ),
    (
        "a step of parameter servers is one worker's; several workers are asynchronous",
        lambda at: at["strategy"] == "parameter_server" and at["replicas"] > 1,
    ),
    (
        "only meshes split variables here; partitioned servers have tests of their own",
        lambda at: bool(at["split"]) and (at["strategy"] not in MESHES or at["replicas"] == 1),
    ),
    (
        "the sentiment model normalises by its replica's own rows",
        lambda at: at["workload"] == "sentiment" and at["strategy"] not in MESHES and at["replicas"] > 1,
    ),
    (
        "the sentiment model is a tf.Module, which JAX refuses, without regularisers",
        lambda at: at["workload"] == "sentiment" and (at["strategy"] == "jax" or bool(at["penalty"])),
    ),
    (
        "the sentiment model's own step takes no weights",
        lambda at: at["workload"] == "sentiment" and at["loop"] == "custom" and bool(at["weights"]),
    ),
    (
        "class weights need labels that are one class for each row",
        lambda at: at["weights"] == "class weights" and at["workload"] not in ("mlp", "cnn", "convnet", "sentiment"),
    ),
    (
        "the gradients of embeddings are sparse on one TensorFlow device, where nonlinear updates see each occurrence "
        "of a row by itself; meshes have dense ones",
        lambda at: (
            at["workload"] == "recommender"
            and at["strategy"] in MESHES
            and at["optimizer"] not in ("sgd", "momentum")
            and not at["updates"]
        ),
    ),
    (
        "a huge weight is for float16, which it makes skip a step",
        lambda at: at["weights"] == HUGE and (at["workload"] != "mlp" or at["precision"] != "mixed_float16"),
    ),
    (
        "parameter servers refuse to accumulate gradients",
        lambda at: at["strategy"] == "parameter_server" and bool(at["updates"]),
    ),
]
"""Why some combinations are not there."""


def is_possible(at: Point) -> bool:
    return not any(rule(at) for _, rule in IMPOSSIBLE)


OPTIMIZERS_IN_CI = ("sgd", "momentum", "adamw clipped", "adagrad")
"""Without slots, with one, with two and clipped, and what knows repeated rows.

The others differ only in what they do to each number alone. The cases of test_replicas.py, test_jax.py,
test_reference_models.py and test_parameter_server.py have Adam and RMSprop, test_optimizers.py has all optimizers.
"""


def in_ci(at: Point) -> bool:
    """Return the points for which CI has time.

    4 processes have the full grid alone. So have most points of the models that take long: meshes train them in
    test_reference_models.py. Replicas of one process are each traced, so more than 2 have the smallest model: 8 of the
    recommender took ten times as long as 2 of the MLP.
    """
    if not is_possible(at) or (at["strategy"] in OF_PROCESSES and at["replicas"] > 2):
        return False
    if at["optimizer"] not in OPTIMIZERS_IN_CI:
        return False
    if at["strategy"] in WITH_REPLICAS_HERE and at["replicas"] > 2 and at["workload"] != "linear":
        return False
    return at["workload"] not in LONG or (at["strategy"] in LONG_UNDER and at["optimizer"] == "momentum")


def selected() -> list[Point]:
    """A few points of the whole grid with every pair that is possible."""
    return covering(grid({**MAIN, **MORE}, in_ci))


def selected_mixed() -> list[Point]:
    """Return a selection like `selected`, of one workload and one number of replicas for each strategy.

    A huge weight is left to the full grid: one row then makes the loss, whose rounding is several of the 16-bit type.
    """
    few = {**MIXED, "workload": MIXED["workload"][:1], "weights": MIXED["weights"][:1]}
    # each replica of one process is traced by itself: two have parts to round as well as four
    replicas = {**dict.fromkeys((*OF_PROCESSES, *WITH_REPLICAS_HERE), 2), "parameter_server": 1}
    return covering(grid(few, lambda at: in_ci(at) and at["replicas"] == replicas.get(at["strategy"], 4)))


def full_mixed() -> list[Point]:
    return grid(MIXED, is_possible)


def full() -> list[Point]:
    """Return the product of the main factors; levels of other factors occur about equally often with each of these."""
    extras = grid(MORE, lambda _: True)
    made = []
    for index, main in enumerate(grid(MAIN, lambda _: True)):
        # 7 and the number of extras have no common divisor, so the walk through them meets all
        candidates = ({**main, **extras[(7 * index + shift) % len(extras)]} for shift in range(len(extras)))
        if (point := next(filter(is_possible, candidates), None)) is not None:
            made.append(point)
    return made


def name_of(at: Point) -> str:
    return ", ".join(str(level) for level in at.values() if level != "")


def config_of(at: Point) -> dict[str, Any]:
    """The config without its strategy."""
    workload, custom = at["workload"], at["loop"] == "custom"
    train: dict[str, Any] = {"loop": at["loop"], "epochs": 3, "log_every_steps": 1}
    made = {**OPTIMIZERS[at["optimizer"]], "args": dict(OPTIMIZERS[at["optimizer"]]["args"])}
    if workload == "sentiment" and custom:
        train["step"] = "distlaunch.workloads.sentiment:step"
        made["args"]["learning_rate"] /= BATCH  # it descends along the sum of the losses
    if at["updates"]:
        made["args"]["gradient_accumulation_steps"] = 3  # does not divide the 10 steps of an epoch
    if at["weights"] == HUGE:
        made = {"name": f"{HERE}:scaled", "args": {"accumulate": 3 if at["updates"] else None}}
    is_regression = workload in ("linear", "recommender")
    config = {
        "model": {"function": f"{HERE}:model", "args": {"workload": workload, "l2": 0.01 if at["penalty"] else 0.0}},
        "data": {
            "function": f"{HERE}:data",
            "args": {
                "workload": workload,
                "rows": LAST[at["rows"]],
                "weights": "" if at["weights"] == "class weights" else at["weights"],
            },
            "global_batch": BATCH,
            "shuffle": False,
            "class_weight": {0: 0.2, 1: 3.0, 5: 0.5} if at["weights"] == "class weights" else None,
        },
        "compile": {
            "optimizer": made,
            "loss": "mse" if is_regression else CROSS_ENTROPY,
            "metrics": METRICS.get(workload, ["accuracy"]),
        },
        "train": train,
        "validation": None,
    }
    if "precision" in at:
        config["precision"] = at["precision"]
        config["compile"]["metrics"] = []  # an example whose logits are nearly equal may count or not
    return config


def strategy_of(at: Point) -> dict[str, Any]:
    """The sections `strategy` and `cluster`."""
    kind, replicas = at["strategy"], at["replicas"]
    if kind == "parameter_server":
        return {"strategy": {"kind": kind}, "cluster": {"workers": 1, "ps": 2, "hosting": "in_process"}}
    if at["split"]:
        return {"strategy": {"kind": kind, "mesh": {"batch": replicas // 2, "model": 2}, "layout": "auto"}}
    return sections(kind, replicas)
