"""`distlaunch verify` on real processes: passes what should pass, catches planted faults, and names them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from real import CONFIGS, finish, run, start
from supervised import processes_of, wait_until

MINE = (Path(__file__).parent / "user_code" / "verify.py").read_text()
CONFIG = """
model: {function: "mine.py:mlp"}
data: {function: "mine.py:data", global_batch: 24}
compile:
  optimizer: {name: SGD, args: {learning_rate: 0.1, momentum: 0.9}}
  loss: {name: SparseCategoricalCrossentropy, args: {from_logits: true}}
  metrics: [accuracy]
engine: {kind: slurm}  # trials need no allocation, but run on this machine
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def verify(project: Path, *settings: str, kinds: str = "mirrored", replicas: str = "2") -> tuple[int, dict[str, Any]]:
    """Exit code, and the rows by strategy."""
    sets = [word for setting in settings for word in ("--set", setting)]
    choice = ("--strategies", kinds, "--replicas", replicas, "--steps", "8")
    code, out, err = run("verify", "mine.yaml", *choice, *sets, "--json", cwd=project, limit_s=600)
    assert out, err
    assert "Traceback" not in out + err
    assert {path.name for path in project.iterdir()} <= {"mine.py", "mine.yaml", "__pycache__"}
    return code, {row["strategy"]: row for row in json.loads(out)["rows"]}


CUSTOM = "train.loop=custom"


# without mixed precision, test_verify_models.py has a model that is equal
@pytest.mark.slow  # in CI test_verify_models.py and the parity tests
@pytest.mark.parametrize(("model", "precision"), [("mlp", "mixed_float16"), ("residual", "null")])
def test_equal_on_mirrored_and_dtensor(model: str, precision: str, project: Path) -> None:
    """Mixed precision is compared as float32."""
    code, rows = verify(project, f"model.function=mine.py:{model}", f"precision={precision}", kinds="mirrored,dtensor")
    assert code == 0, rows
    assert {row["verdict"] for row in rows.values()} == {"equal"}
    assert all(0 < row["weights"] < 1e-5 and row["gradients"] < 1e-5 and row["loss"] < 1e-5 for row in rows.values())


@pytest.mark.slow  # in CI a mean over the local batch
def test_batch_norm_of_replicas_is_caught_and_named(project: Path) -> None:
    code, rows = verify(project, "model.function=mine.py:residual", "model.args.synchronized=false")
    assert code == 1
    row = rows["mirrored"]
    assert (row["verdict"], row["first_step"]) == ("differs", 1)
    assert "norm_0, norm_1" in row["reasons"][0]
    assert "synchronized=True" in row["reasons"][0]
    assert row["sharp_to_step"] >= 1


@pytest.mark.slow  # tests/unit/test_judgement.py has that a suspect is no cause
def test_batch_norm_is_not_named_for_what_it_has_not_done(project: Path) -> None:
    """Synchronized statistics do not mend a step that is wrong."""
    settings = ("model.function=mine.py:residual", "model.args.synchronized=false")
    code, rows = verify(project, CUSTOM, *settings, "train.step=mine.py:mean_over_the_local_batch")
    assert code == 1
    (reason,) = rows["mirrored"]["reasons"]
    assert "mean_over_the_local_batch" in reason
    assert "BatchNormalization" not in reason


def test_a_mean_over_the_local_batch_is_caught_and_named(project: Path) -> None:
    code, rows = verify(project, CUSTOM, "train.step=mine.py:mean_over_the_local_batch")
    assert code == 1
    row = rows["mirrored"]
    assert (row["verdict"], row["first_step"]) == ("differs", 1)
    assert row["gradients"] >= 0.9
    assert "mean_over_the_local_batch: the first step's gradients and loss are 2 times too large" in row["reasons"][0]


@pytest.mark.slow
def test_a_mean_in_a_models_own_step_is_averaged(project: Path) -> None:
    code, rows = verify(project, "model.function=mine.py:Own", kinds="mirrored,dtensor")
    assert (code, rows["mirrored"]["verdict"], rows["dtensor"]["verdict"]) == (0, "equal", "equal")


@pytest.mark.slow
def test_a_sum_in_a_models_own_step_is_named(project: Path) -> None:
    code, rows = verify(project, "model.function=mine.py:OwnSum", kinds="mirrored,dtensor")
    assert (code, rows["mirrored"]["verdict"], rows["dtensor"]["verdict"]) == (1, "differs", "equal")
    assert "OwnSum.train_step: the first step's gradients are 2 times too small" in rows["mirrored"]["reasons"][0]


@pytest.mark.slow
def test_regularisation_that_each_replica_adds_is_named(project: Path) -> None:
    settings = ("model.function=mine.py:regularised", "train.step=mine.py:adds_losses_whole")
    code, rows = verify(project, CUSTOM, *settings, replicas="4")
    assert (code, rows["mirrored"]["first_step"]) == (1, 1)
    assert "too large by 3 times the model's own losses" in rows["mirrored"]["reasons"][0]


@pytest.mark.slow
def test_a_weight_without_a_gradient_is_named_and_a_shuffle_of_the_pipeline_is_no_fault(project: Path) -> None:
    settings = ("model.function=mine.py:normalised", "data.function=mine.py:shuffled", "data.batched=true")
    kinds = "mirrored,multi_worker_mirrored,dtensor"
    code, rows = verify(project, *settings, "compile.optimizer=adam", kinds=kinds)
    assert code == 0
    for row in rows.values():
        assert row["verdict"] == "equal"
        assert row["weight"].endswith("first/bias")
        assert row["weights"] > 1e-3
        (reason,) = row["reasons"]
        assert "its gradient is only rounding" in reason


@pytest.mark.slow
def test_shards_of_ones_own_are_named(project: Path) -> None:
    settings = ("data.function=mine.py:sharded", "train.steps_per_epoch=3")
    code, rows = verify(project, *settings, kinds="multi_worker_mirrored")
    assert (code, rows["multi_worker_mirrored"]["verdict"]) == (2, "cannot run"), "nothing could be compared"
    assert "the usual reasons are .shard() in the data function" in rows["multi_worker_mirrored"]["reasons"][0]


@pytest.mark.slow
def test_a_metric_that_is_no_share_is_named(project: Path) -> None:
    code, rows = verify(project, CUSTOM, "train.step=mine.py:wrong_metric")
    assert code == 1
    assert "log mean_square: 2 times too large, while loss, gradients" in rows["mirrored"]["reasons"][0]


@pytest.mark.slow
def test_dropout_is_that_of_one_device_and_hides_no_fault(project: Path) -> None:
    residual = ("model.function=mine.py:residual", "model.args.dropout=0.3")
    code, rows = verify(project, *residual, kinds="mirrored,multi_worker_mirrored,dtensor,jax")
    assert code == 0, rows
    assert [row["verdict"] for row in rows.values()] == ["equal"] * 4
    code, rows = verify(project, *residual, "model.args.synchronized=false")
    assert code == 1
    assert rows["mirrored"]["verdict"] == "differs"
    assert "norm_0" in rows["mirrored"]["reasons"][0]


@pytest.mark.slow
def test_a_variable_that_a_layer_changes_is_named(project: Path) -> None:
    code, rows = verify(project, "model.function=mine.py:centred", "compile.metrics=[]", kinds="mirrored,jax")
    assert code == 1
    assert {kind: row["verdict"] for kind, row in rows.items()} == {"mirrored": "differs", "jax": "equal"}
    assert rows["mirrored"]["reasons"][0].startswith("variable sequential/centre/centre: changed in training")


@pytest.mark.slow
def test_a_loss_that_combines_several_examples_is_equal(project: Path) -> None:
    code, rows = verify(project, "compile.loss=mine.py:contrastive", "compile.metrics=[]", kinds="mirrored,jax")
    assert code == 0
    assert {kind: row["verdict"] for kind, row in rows.items()} == {"mirrored": "equal", "jax": "equal"}


@pytest.mark.slow
def test_random_numbers_in_the_data_pipeline(project: Path) -> None:
    code, rows = verify(project, "data.map=mine.py:jitter")
    assert code == 1
    assert "RandomStandardNormal" in rows["mirrored"]["reasons"][0]
    code, rows = verify(project, "data.function=mine.py:unseeded")
    assert code == 1
    assert rows["mirrored"]["reasons"][0].startswith("the data function returned different examples")


@pytest.mark.slow
def test_no_number_never_passes(project: Path) -> None:
    code, rows = verify(project, "model.function=mine.py:broken")
    assert (code, rows["mirrored"]["verdict"], rows["mirrored"]["loss"]) == (1, "differs", "inf")
    code, rows = verify(project, "compile.optimizer.args.learning_rate=1e38", "model.function=mine.py:residual")
    assert (code, rows["mirrored"]["verdict"]) == (1, "differs")
    assert "even on one device" in rows["mirrored"]["reasons"][0]


@pytest.mark.slow
def test_several_processes(project: Path) -> None:
    pytest.importorskip("jax")
    code, rows = verify(project, kinds="multi_worker_mirrored,parameter_server,jax")
    assert code == 0, rows
    assert rows["multi_worker_mirrored"]["processes"] == 2
    assert {row["verdict"] for row in rows.values()} <= {"equal", "not compared"}
    assert rows["parameter_server"]["verdict"] == "not compared"  # the last of its rows: two workers


@pytest.mark.slow
def test_the_configs_own_mesh_and_what_cannot_run(project: Path) -> None:
    mesh = "strategy={kind: dtensor, mesh: {batch: 2, model: 2}, layout: {dense/kernel: [~, model]}}"
    code, rows = verify(project, mesh, kinds="dtensor,mirrored", replicas="2000")
    assert code == 0, rows
    assert (rows["dtensor"]["label"], rows["dtensor"]["verdict"]) == ("dtensor, batch 2 x model 2", "equal")
    assert rows["mirrored"]["verdict"] == "cannot run"
    assert "virtual CPU devices" in rows["mirrored"]["reasons"][0]


def test_where_nothing_can_be_compared(project: Path) -> None:
    """It says so and why, without a word of one device, which would be trained for nothing."""
    words = ("verify", "mine.yaml", "--strategies", "mirrored", "--replicas", "2000,3000")
    code, out, err = run(*words, cwd=project)
    assert (code, err) == (2, "mirrored, 2000 replicas: cannot run\nmirrored, 3000 replicas: cannot run\n")
    assert "needs 2,000 virtual CPU devices in one process; use at most 1,024" in out
    assert out.endswith("Nothing could be compared.\n")
    code, out, _ = run(*words, "--json", cwd=project)
    assert (code, [row["verdict"] for row in json.loads(out)["rows"]]) == (2, ["cannot run", "cannot run"])


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(project: Path) -> None:
    job = start("verify", "mine.yaml", "--keep", "kept", "--steps", "100000", cwd=project)
    events = project / "kept" / "verify" / "events.jsonl"
    wait_until(lambda: events.exists() and "StepsDone" in events.read_text(), timeout_s=180)
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job)
    assert code == 130, err
    assert "Traceback" not in err
    wait_until(lambda: not processes_of(project / "kept"), timeout_s=10)


def test_what_is_asked_for_wrongly(project: Path) -> None:
    code, _, err = run("verify", "mine.yaml", "--strategies", "mirored", cwd=project)
    assert (code, "expected some of mirrored" in err) == (2, True)
    code, _, err = run("verify", "mine.yaml", "--replicas", "1", cwd=project)
    assert (code, "above 1" in err) == (2, True)
    code, _, err = run("verify", "mine.yaml", "--keep", ".", cwd=project)
    assert (code, "new or empty" in err) == (2, True)
    code, _, err = run("verify", "missing.yaml", cwd=project)
    assert (code, "missing.yaml" in err) == (2, True)
    assert "Traceback" not in err


EVERYWHERE = {"mirrored": "equal", "dtensor": "equal", "jax": "equal"}
REFERENCE_CONFIGS = {
    "convnet": EVERYWHERE,
    "fashion_mnist": EVERYWHERE,
    "mnist_mlp": EVERYWHERE,
    "transformer_dtensor": EVERYWHERE,
    # gradients of embeddings are dense on a mesh
    "recommender": {"mirrored": "equal", "dtensor": "differs as documented", "jax": "differs as documented"},
    # a BatchNorm of its own, by each replica's rows; a tf.Module
    "sentiment": {"mirrored": "differs", "dtensor": "equal", "jax": "cannot run"},
    "linear_regression": EVERYWHERE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE_CONFIGS)
def test_the_truth_about_the_reference_configs(name: str, tmp_path: Path) -> None:
    verdicts = REFERENCE_CONFIGS[name]
    words = ("--strategies", "mirrored,dtensor,jax", "--replicas", "2", "--steps", "10", "--json")
    code, out, err = run("verify", str(CONFIGS / f"{name}.yaml"), *words, cwd=tmp_path, limit_s=600)
    assert "Traceback" not in out + err
    rows = {row["strategy"]: row for row in json.loads(out)["rows"] if row["replicas"] == 2}
    assert {kind: rows[kind]["verdict"] for kind in verdicts} == verdicts, rows
    assert code == (1 if "differs" in verdicts.values() else 0)
    documented = [row for row in rows.values() if row["verdict"] == "differs as documented"]
    assert all(row["first_step"] is None for row in documented), "equal with dense gradients"
    if verdicts["mirrored"] == "differs":
        assert "class BatchNorm" in rows["mirrored"]["reasons"][0]
