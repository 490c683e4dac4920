"""Configs for tests, and a user's module that they name."""

from __future__ import annotations

from pathlib import Path

MODELS = (Path(__file__).parent / "user_code" / "config_files.py").read_text()

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
