"""Prints whether a step of the recommender has tensors of the size of its table, and of half of it.

python graph_sizes.py CONFIG SETTING ...
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.read.load import load_config
from distlaunch.strategies.coordination import Vote
from distlaunch.training.session import Session


class GivenOutError(Exception):
    """The coordinator has been given a step."""


def sizes_of(call: Any) -> set[tuple[int, ...]]:
    graph = call.graph.as_graph_def(add_shapes=True)
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    shapes = (shape for node in nodes for shape in node.attr["_output_shapes"].list.shape)
    return {tuple(dim.size for dim in shape.dim) for shape in shapes}


def schedule(self: Any, call: Any, args: Any = None, kwargs: Any = None) -> None:
    sizes = sizes_of(call)
    print((20000, 16) in sizes, (10000, 16) in sizes)
    raise GivenOutError


config = load_config(sys.argv[1], tuple(sys.argv[2:]), num_gpus=0).config
session = Session.build(config, RunDir("none"), Task("chief", 0), Process(lambda event: None, lambda: False))
session.program.set_train_data(session.train.training_source(0, 0, ends_visible=False))
tf.distribute.coordinator.ClusterCoordinator.schedule = schedule
try:
    session.program.run_steps(1, Vote())
except GivenOutError:
    sys.exit(0)
sys.exit("the coordinator was given no step")
