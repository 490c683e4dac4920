#!/usr/bin/env bash
# The static checks: style, formatting, spelling, types, and who may import whom. Needs `pip install -e '.[dev]'`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
git ls-files -z | xargs -0 codespell
basedpyright
basedpyright -p tests
lint-imports
python scripts/count_kinds.py
