"""Configs for tests, and a user's module that they name."""

from __future__ import annotations

from pathlib import Path

MODELS = """\
def net(l2=0.0, *, units=3):
    return None

def needs(width, depth=2):
    return None

def data(source="auto"):
    return None

def anything(**kwargs):
    return None

def bare(seed):
    return 1

def four(x, y, weight, more, seed=None):
    return x, y

def one(x):
    return x

def pair(x, y):
    return x, y

def step(context, batch):
    return {}

async def later():
    return None

LIMIT = 3

def none():
    return None
"""

BASE = """\
model:
  function: models.py:net
data:
  function: models.py:data
  global_batch: 64
"""


def write_models(folder: Path) -> None:
    (folder / "models.py").write_text(MODELS)
    (folder / "broken.py").write_text("def net():\n    return (\n")
    (folder / "star.py").write_text("from os.path import *\n")
