#!/usr/bin/env bash
# Every test that this machine can run: makes the environment where it is missing, checks the style, runs pytest.
# Takes no arguments (further words go to pytest: bash scripts/test.sh -k cache).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest --durations=15 "$@"
