#!/usr/bin/env bash
# The tests that this machine can run: makes the environment where it is missing, checks what scripts/check.sh checks,
# runs pytest.
# Takes --long for the tests marked long and for every case of the others (hours); further words go to pytest too:
# bash scripts/test.sh -k cache. Tests run in two processes;
# THREESTEP_TEST_PROCESSES names another number, and 0 runs them in one, as a debugger wants.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"
bash scripts/check.sh
# A file's tests stay together: they share what is costly to set up. The files come in their own order, in which the small
# ones are last, so that both processes end together.
exec "$PYTHON" -m pytest -n "${THREESTEP_TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder --durations=15 "$@"
