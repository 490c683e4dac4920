"""`train --debug` in a terminal: a prompt works where the user's code runs; without it, a task says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import run
from terminal import Terminal

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, RunEnded
from distlaunch.base.run_dir import RunDir

MINE = (Path(__file__).parent / "user_code" / "debug.py").read_text()
CONFIG = """
name: job
model: {function: "mine.py:Mine"}
data: {function: "mine.py:rows", map: "mine.py:add", global_batch: 16, shuffle: false}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 1}
strategy: {kind: multi_worker_mirrored}
cluster: {workers: 2}
export: [saved_model]
"""
ASKING = """

def asking():
    x, where = rows()[0], "data"
    breakpoint()
    return x, x.sum(1, keepdims=True)


def each():
    where = "generator"
    for x, y in zip(*rows()):
        breakpoint()
        yield x, y


def generated():
    signature = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([1], tf.float32))
    return tf.data.Dataset.from_generator(each, output_signature=signature)
"""
PROMPT = r"\(Pdb\) "


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def debug(project: Path, *words: str) -> Terminal:
    return Terminal("train", "mine.yaml", "--debug", *words, cwd=project)


def look(terminal: Terminal, where: str) -> None:
    """Stops at the next prompt, which is in the user's code, and looks at variables."""
    terminal.wait_for(rf"mine\.py\(\d+\)\w+\(\)\n-> .*\n{PROMPT}")
    terminal.type("p where, float(tf.reduce_sum(x)) > 0, 6 * 7\n")
    terminal.wait_for(rf"\('{where}', True, 42\)\n{PROMPT}")


def losses(run_dir: RunDir) -> list[float]:
    return [event.logs["loss"] for event in read_events(run_dir.events) if isinstance(event, EpochEnded)]


def test_prompts_in_the_models_step_and_in_the_map(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stops each; the run has a directory of its own, is complete, and gives the numbers of the run itself."""
    terminal = debug(project)
    for where in ("map", "map", "train_step", "train_step"):
        look(terminal, where)
        terminal.type("c\n")
    terminal.wait_for(r"epoch 1/1  loss")
    assert terminal.wait() == 0, terminal.seen
    assert [path.name for path in (project / "runs").iterdir()] == ["job-debug"]
    mine = ("--set", "strategy={kind: one_device}", "--set", "export=[]", "--set", "data.map=null")
    custom = ("--set", "train={loop: custom, step: 'mine.py:step'}")
    code, _, err = run("train", "mine.yaml", *mine, *custom, cwd=project)
    told = "".join(err.split())  # long paths are broken anywhere
    assert (code, "distlaunchtrain--debugCONFIG" in told) == (3, True), err
    line = MINE[: MINE.index("    breakpoint()\n    with")].count("\n") + 1
    assert f"mine.py:{line}:breakpoint():ataskhasnoterminal" in told
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert run("train", "mine.yaml", *mine, "--set", "name=plain", cwd=project)[0] == 0
    assert losses(RunDir(project / "runs" / "plain")) == pytest.approx(losses(RunDir(project / "runs" / "job-debug")))


@pytest.mark.slow  # in CI the prompts of a model's step and of the map
def test_a_custom_step_a_pipeline_and_keys(project: Path) -> None:
    """Ctrl-C at a prompt gives another one; `q` ends the run as interrupted."""
    options = ("data.function=mine.py:pipeline", "train={loop: custom, step: 'mine.py:step'}", "name=other")
    terminal = debug(project, *(word for option in options for word in ("--set", option)))
    for where in ("map", "map", "step"):
        look(terminal, where)
        terminal.type("c\n")
    look(terminal, "step")
    terminal.press_until("\x03", rf"--KeyboardInterrupt--\n{PROMPT}")
    terminal.type("q\n")
    assert terminal.wait() == 4, terminal.seen
    assert "Traceback" not in terminal.seen
    assert (project / "runs" / "other-debug").is_dir()


@pytest.mark.parametrize(
    ("function", "where", "prompts"),
    [
        pytest.param("rows", "map", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", "map", 1, marks=pytest.mark.slow),
        pytest.param("asking", "data", 1, marks=pytest.mark.slow),
        pytest.param("generated", "generator", 1, marks=pytest.mark.slow),
    ],
)
def test_q_where_data_are_made_ends_the_run_as_interrupted(
    project: Path, function: str, where: str, prompts: int
) -> None:
    """Nothing of what TensorFlow makes of it is shown."""
    (project / "mine.py").write_text(MINE + ASKING)
    options = [f"data.function=mine.py:{function}", "strategy={kind: one_device}", "cluster={}"]
    options += ["data.map=null"] if where != "map" else []
    terminal = debug(project, *(word for option in options for word in ("--set", option)))
    for answer in ["c\n"] * (prompts - 1) + ["q\n"]:
        look(terminal, where)
        terminal.type(answer)
    assert terminal.wait() == 4, terminal.seen
    assert "interrupted" in terminal.seen
    assert "Traceback" not in terminal.seen
    assert "error" not in terminal.seen.partition("interrupted")[2]
    events = read_events(RunDir(project / "runs" / "job-debug").events)
    assert [event.status for event in events if isinstance(event, RunEnded)] == ["interrupted"]


@pytest.mark.slow  # in CI the prompts of a custom step and of a model's
def test_a_step_for_jax(project: Path) -> None:
    """It stays on JAX, with a mesh of one device."""
    options = (
        "strategy={kind: jax, mesh: {batch: 2}}",
        "data.map=null",
        "train={loop: custom, step: 'mine.py:step_on_jax'}",
    )
    sequential = "model={function: 'mine.py:Mine'}"
    terminal = debug(project, *(word for option in (*options, sequential) for word in ("--set", option)))
    for _ in range(2):
        look(terminal, "step on jax")
        terminal.type("c\n")
    assert terminal.wait() == 0, terminal.seen


@pytest.mark.parametrize("other", ["--resume", "--smoke", "--detach", "--json"])
def test_what_does_not_go_together(project: Path, other: str) -> None:
    code, _, err = run("train", "mine.yaml", "--debug", other, cwd=project)
    assert (code, f"leave out {other}" in err) == (2, True), err


def test_mistakes_are_told_by_their_lines(project: Path) -> None:
    terminal = debug(project, "--set", "model.function=mine.py:rows", "--set", "data.map=null")
    assert terminal.wait() == 2, terminal.seen
    assert "model.function=mine.py:rows: model.function: " in terminal.seen
    assert "Traceback" not in terminal.seen
