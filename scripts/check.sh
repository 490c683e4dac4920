#!/usr/bin/env bash
# The static checks: style, formatting, types, and who may import whom. Needs `pip install -e '.[dev]'`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
basedpyright
lint-imports
python scripts/count_kinds.py
