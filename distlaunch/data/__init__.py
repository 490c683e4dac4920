"""Data of a run, and helpers for data functions that read examples from files.

The helpers are imported on first use, because they need NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distlaunch.data.context import StreamContext, WorkerContext

if TYPE_CHECKING:
    from distlaunch.data.files.array_records import array_record
    from distlaunch.data.files.base import IndexedFiles, RecordError
    from distlaunch.data.files.images import image_folder
    from distlaunch.data.files.tables.csv_tables import csv
    from distlaunch.data.files.tables.json_lines import json_lines
    from distlaunch.data.files.tables.parquet_tables import parquet
    from distlaunch.data.files.text_lines import text_lines
    from distlaunch.data.files.tfrecords import tfrecord

__all__ = [
    "IndexedFiles",
    "RecordError",
    "StreamContext",
    "WorkerContext",
    "array_record",
    "csv",
    "image_folder",
    "json_lines",
    "parquet",
    "text_lines",
    "tfrecord",
]

_MODULES = {
    "IndexedFiles": "base",
    "RecordError": "base",
    "array_record": "array_records",
    "csv": "tables.csv_tables",
    "image_folder": "images",
    "json_lines": "tables.json_lines",
    "parquet": "tables.parquet_tables",
    "text_lines": "text_lines",
    "tfrecord": "tfrecords",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"distlaunch.data.files.{_MODULES[name]}"), name)
