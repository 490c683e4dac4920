"""The table of parity cases: each is trained on one device and under every strategy, and the results are compared."""

from __future__ import annotations

from typing import Any

HERE = "tests.parity.problems"
CROSS_ENTROPY = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}
BATCH = 24


def case(model: str = "mlp", data: str = "table", *, optimizer: Any = "adam", loss: Any = None, loop: str = "fit",
         metrics: Any = ("accuracy",), weighted: Any = (), args: dict | None = None, data_args: dict | None = None,
         epochs: int = 3, **data_keys: Any) -> dict[str, Any]:  # fmt: skip
    """A config without its strategy. The comparison needs 30 steps; an epoch of most data has 13."""
    train: dict[str, Any] = {"loop": loop, "epochs": epochs, "log_every_steps": 1}
    if loop == "own":
        train.update(loop="custom", step=f"{HERE}:own_step")
    compiled = {"optimizer": optimizer, "loss": loss or CROSS_ENTROPY, "weighted_metrics": list(weighted)}
    compiled["metrics"] = metrics if isinstance(metrics, dict) else list(metrics)
    return {
        "model": {"function": f"{HERE}:{model}", "args": args or {}},
        "data": {
            "function": f"{HERE}:{data}",
            "args": data_args or {},
            "global_batch": BATCH,
            "shuffle": False,
            **data_keys,
        },
        "compile": compiled,
        "train": train,
    }


def optimizer(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


SGD = optimizer("SGD", learning_rate=0.1)
MOMENTUM = optimizer("SGD", learning_rate=0.05, momentum=0.9)
ADAMW = optimizer("AdamW", learning_rate=0.01, clipnorm=0.1, weight_decay=0.01)
CLIPPED = optimizer("SGD", learning_rate=0.5, global_clipnorm=0.05)
UNEVEN = {"rows": 305}  # a last batch of 17
TINY_LAST = {"rows": 289}  # a last batch of 1: replicas without rows
TWO = {"label": CROSS_ENTROPY, "total": "mse"}
MEAN_BY_WEIGHT = {
    "name": "SparseCategoricalCrossentropy",
    "args": {"from_logits": True, "reduction": "mean_with_sample_weight"},
}

CASES: dict[str, dict[str, Any]] = {
    "mlp adam": case(),
    "mlp sgd, uneven": case(optimizer=SGD, data_args=UNEVEN),
    "mlp momentum, last batch of one row": case(optimizer=MOMENTUM, data_args=TINY_LAST),
    "mlp adamw clipped, skewed": case(optimizer=ADAMW, data_args={"skew": True, **UNEVEN}),
    "mlp clipped by global norm, custom": case(optimizer=CLIPPED, loop="custom", data_args={"skew": True, **UNEVEN}),
    "mlp rmsprop, L2": case(optimizer="rmsprop", args={"l2": 0.01, "activity": 0.01}, data_args=UNEVEN),
    "mlp L2, custom": case(args={"l2": 0.01, "activity": 0.01}, data_args=UNEVEN, loop="custom", optimizer=MOMENTUM),
    "class weights": case(class_weight={0: 0.2, 3: 4.0}, data_args={"skew": True, **UNEVEN}, optimizer=MOMENTUM),
    "sample weights": case(data_args={"weights": True, **UNEVEN}, weighted=["accuracy"], optimizer=MOMENTUM),
    "sample weights, custom": case(data_args={"weights": True, **UNEVEN}, loop="custom", optimizer=MOMENTUM),
    "mean by sample weight": case(data_args={"weights": True, **UNEVEN}, loss=MEAN_BY_WEIGHT, optimizer=MOMENTUM),
    "sum of losses": case(
        loss={"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True, "reduction": "sum"}},
        optimizer=optimizer("SGD", learning_rate=0.003),
        data_args=UNEVEN,
    ),
    "own step function": case(loop="own", args={"l2": 0.01, "activity": 0.01}, data_args=TINY_LAST, optimizer=MOMENTUM),
    "unknown length": case(data="unknown_length", optimizer=MOMENTUM),
    "subclassed": case("subclassed", data_args=UNEVEN, optimizer="adagrad"),
    "own train_step": case("own_train_step", data_args=UNEVEN, optimizer=MOMENTUM),
    "two optimizers": case("two_optimizers", data_args=UNEVEN, optimizer=MOMENTUM),
    "tf.Module": case("module", data_args=UNEVEN, optimizer=ADAMW),
    "two inputs, two outputs": case(
        "two_outputs", "two_inputs", loss=TWO, metrics={"label": ["accuracy"], "total": ["mae"]}, data_args=UNEVEN
    ),
    "embeddings, sparse gradients": case(
        "recommender",
        "ratings",
        loss="mse",
        metrics=["mae"],
        optimizer=optimizer("Adagrad", learning_rate=0.05),
        data_args={"rows": 304},  # a last batch of 16: replicas of 2, 4 and 8 have equally many rows of it
    ),
    "masked tokens": case("tagger", "sequences", data_args=UNEVEN, optimizer=MOMENTUM),
    "BatchNorm over replicas": case("convolutions", "images", optimizer=MOMENTUM, data_args={"rows": 194}, epochs=4),
    "random layers": case("random_layers", data_args=UNEVEN, optimizer=ADAMW),
}
EXACT = ("random layers",)
"""Those of which no noise can be measured by permuting examples: each would get another mask."""
