#!/usr/bin/env bash
# What can be checked without running anything: style, format, types, house rules. Takes no arguments; `make check` and
# scripts/test.sh call it. Half a minute the first time, seconds after that (mypy keeps what it has read in .mypy_cache).
set -euo pipefail
export THREESTEP_EXTRA=test
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy --no-error-summary
exec "$PYTHON" -m pytest -q tests/test_house.py
