"""Pictures of meshes and of what is split over them, whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import VariablesPlaced
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.plan.train import LaunchPlan, plan_json
from distlaunch.runs.report import read_report
from distlaunch.ui.placement import mesh_lines, placement_sections, task_lines, variable_pictures
from distlaunch.ui.run_report import print_report
from distlaunch.ui.tables import ASCII, UNICODE, line_style_for

Sizes = dict[str, int]
MESH: Sizes = {"batch": 4, "model": 2}


def mesh(sizes: Sizes, inputs: list[str | None]) -> dict[str, Any]:
    number = 1
    for size in sizes.values():
        number *= size
    return {"axes": list(sizes), "shape": list(sizes.values()), "devices": list(range(number)), "inputs": inputs}


def variable(name: str, shape: list[int], layout: list[str | None], sizes: Sizes = MESH) -> dict[str, Any]:
    """Return the placement of a variable in the form in which a program reports it."""
    parts = []
    for device, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        at = dict(zip(sizes, place, strict=True))
        each = [size // sizes[axis] if axis else size for size, axis in zip(shape, layout, strict=True)]
        first = [at[axis] * size if axis else 0 for size, axis in zip(each, layout, strict=True)]
        bounds = [[start, start + size] for start, size in zip(first, each, strict=True)]
        parts.append({"task": f"device:{device}", "rows": None, "bounds": bounds, "bytes": 4})
    return {"name": name, "shape": shape, "dtype": "float32", "layout": layout, "parts": parts}


def text(lines: list[str]) -> str:
    return "\n" + "\n".join(lines) + "\n"


def test_two_axes() -> None:
    assert text(mesh_lines(mesh(MESH, ["batch"]), UNICODE)) == """
mesh: batch 4 x model 2, 8 devices
          model 0   model 1
        ┌─────────┬─────────┐
batch 0 │    0    │    1    │
        ├─────────┼─────────┤
batch 1 │    2    │    3    │
        ├─────────┼─────────┤
batch 2 │    4    │    5    │
        ├─────────┼─────────┤
batch 3 │    6    │    7    │
        └─────────┴─────────┘

inputs [batch]
        ┌─────┐
batch 0 │ 0 1 │
        ├─────┤
batch 1 │ 2 3 │
        ├─────┤
batch 2 │ 4 5 │
        ├─────┤
batch 3 │ 6 7 │
        └─────┘
"""  # fmt: skip


def test_three_axes_in_ascii() -> None:
    sizes = {"batch": 2, "feature": 2, "model": 2}
    assert text(mesh_lines(mesh(sizes, ["batch", "feature"]), ASCII)) == """
mesh: batch 2 x feature 2 x model 2, 8 devices
batch 0
            model 0   model 1
          +---------+---------+
feature 0 |    0    |    1    |
          +---------+---------+
feature 1 |    2    |    3    |
          +---------+---------+
batch 1
            model 0   model 1
          +---------+---------+
feature 0 |    4    |    5    |
          +---------+---------+
feature 1 |    6    |    7    |
          +---------+---------+

inputs [batch, feature]
          feature 0   feature 1
        +-----------+-----------+
batch 0 |    0 1    |    2 3    |
        +-----------+-----------+
batch 1 |    4 5    |    6 7    |
        +-----------+-----------+
"""  # fmt: skip


def test_one_axis_and_inputs_that_are_whole() -> None:
    """Devices in the order of the mesh, which need not be that of their numbers."""
    reordered = {**mesh({"model": 3}, [None]), "devices": [2, 0, 1]}
    assert text(mesh_lines(reordered, UNICODE)) == """
mesh: model 3, 3 devices
  model 0   model 1   model 2
┌─────────┬─────────┬─────────┐
│    2    │    0    │    1    │
└─────────┴─────────┴─────────┘

inputs: every device has the whole batch
"""  # fmt: skip


def test_a_large_mesh_is_abbreviated() -> None:
    lines = mesh_lines(mesh({"batch": 64, "model": 16}, ["batch"]), UNICODE)
    assert lines[1].split()[-2:] == ["model", "15"]
    assert lines[3].replace(" ", "") == "batch0│0│1│2│3│4│5│…│15│"
    assert lines[15].replace(" ", "") == "│…│…│…│…│…│…│…│…│"
    assert lines[17].replace(" ", "") == "batch63│1008│1009│1010│1011│1012│1013│…│1023│"
    assert lines[20:23] == ["inputs [batch]", lines[21], "batch 0  │           0 1 2 3 4 5 … 15           │"]
    assert len(lines) == 38
    assert len(mesh_lines(mesh({"a": 64, "b": 2, "c": 2}, ["a"]), UNICODE)) < 50


def test_what_is_split_alike_has_one_picture() -> None:
    split = [variable(f"model/d{n}/kernel", [784, 128], [None, "model"]) for n in range(5)]
    slot = variable("optimizer/adam/d0_kernel_momentum", [784, 128], [None, "model"])
    other = variable("model/d5/kernel", [128, 10], ["model", None])
    bias, scalar = variable("model/d5/bias", [10], [None]), variable("optimizer/adam/iteration", [], [])
    assert text(variable_pictures([*split, other, bias, scalar, slot], UNICODE)) == """
[~, model]: model/d0/kernel, model/d1/kernel, model/d2/kernel, 2 more, 1 optimizer variable
  model 0   model 1
┌─────────┬─────────┐
│ 0 2 4 6 │ 1 3 5 7 │
└─────────┴─────────┘

[model, ~]: model/d5/kernel
        ┌─────────┐
model 0 │ 0 2 4 6 │
        ├─────────┤
model 1 │ 1 3 5 7 │
        └─────────┘

whole on all devices: model/d5/bias, 1 optimizer variable
"""  # fmt: skip


def test_at_most_two_dimensions_are_drawn() -> None:
    sizes = {"batch": 2, "feature": 2, "model": 2}
    heads = variable("model/query/kernel", [8, 4, 2], [None, "model", None], sizes)
    both = variable("model/d1/kernel", [8, 4], ["feature", "model"], sizes)
    three = variable("model/filters", [2, 4, 4], ["batch", "feature", "model"], sizes)
    assert text(variable_pictures([heads, both, three], ASCII)) == """
[~, model, ~]: model/query/kernel (drawn: dimension 1 of 3)
  model 0   model 1
+---------+---------+
| 0 2 4 6 | 1 3 5 7 |
+---------+---------+

[feature, model]: model/d1/kernel
            model 0   model 1
          +---------+---------+
feature 0 |   0 4   |   1 5   |
          +---------+---------+
feature 1 |   2 6   |   3 7   |
          +---------+---------+

[batch, feature, model]: model/filters (drawn: dimensions 0 and 1 of 3)
          feature 0   feature 1
        +-----------+-----------+
batch 0 |    0 1    |    2 3    |
        +-----------+-----------+
batch 1 |    4 5    |    6 7    |
        +-----------+-----------+
"""  # fmt: skip


def test_many_devices_that_hold_as_much_are_one_line() -> None:
    kernel = variable("model/kernel", [64, 64], [None, "model"], {"batch": 8, "model": 4})
    slot = {**kernel, "name": "optimizer/kernel_momentum"}
    assert task_lines([kernel, slot]) == [
        "task         variables   weights   optimizer   total",
        "each of 32           2       4 B         4 B     8 B",
    ]


@pytest.mark.parametrize(
    ("encoding", "pen"), [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("nonsense", ASCII)]
)
def test_box_characters_only_where_they_can_be_shown(encoding: str | None, pen: Any) -> None:
    assert line_style_for(encoding) == pen


def test_the_report_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("")
    run.task(0, "worker:0").path.mkdir(parents=True)
    kernel = variable("model/kernel", [4, 4], [None, "model"])
    writer = EventWriter(run.events, attempt=0, task="worker:0")
    writer.write(VariablesPlaced(variables=[kernel], mesh=mesh(MESH, ["batch"])))
    print_report(Console(width=200), read_report(run))
    shown = capsys.readouterr().out
    assert "mesh: batch 4 x model 2, 8 devices" in shown
    assert "│ 0 2 4 6 │ 1 3 5 7 │" in shown
    told = json.loads(CliRunner().invoke(cli, ["report", str(tmp_path), "--json"], catch_exceptions=False).output)
    assert told["mesh"] == mesh(MESH, ["batch"])


def test_the_plan_as_json_has_the_mesh() -> None:
    plan = LaunchPlan(Path("runs/a"), 0, "train", (), 1, 1)
    kernel = variable("model/kernel", [4, 4], [None, "model"])
    told = json.loads(plan_json(plan, VariablesPlaced(variables=[kernel], mesh=mesh(MESH, ["batch"]))))
    assert (told["mesh"], told["variables"]) == (mesh(MESH, ["batch"]), [kernel])
    assert "mesh" not in json.loads(plan_json(plan, VariablesPlaced(variables=[kernel])))
    assert "variables" not in json.loads(plan_json(plan))


def test_runs_from_before_there_was_a_mesh_in_their_events() -> None:
    """They have the layouts, which is enough for the variables' pictures."""
    sections = placement_sections([variable("model/kernel", [4, 4], [None, "model"])], None, UNICODE)
    assert [section[0].split()[0] for section in sections] == ["variable", "[~,", "task"]
