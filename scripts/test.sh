#!/usr/bin/env bash
# The tests that this machine can run: makes the environment where it is missing, checks what scripts/check.sh checks,
# runs pytest.
# Takes --long for the tests marked long and for every case of the others (hours), and then all but those with the
# oldest versions that setup.py promises; --oldest, as the first word, for the latter alone, in an environment of their
# own (.venv_oldest); --core, as the first word, for the core's alone, five minutes on two cores, in a copy of the
# checkout without threestep/plugins: every part on its own, a short run of each step, and what is computed against a
# reference in a minute.
# Further words go to pytest too: bash scripts/test.sh -k cache. Tests run in two processes;
# THREESTEP_TEST_PROCESSES names another number, and 0 runs them in one, as a debugger wants.
set -euo pipefail
oldest="" core=""
if [ "${1:-}" = --core ]; then
    shift
    core=yes
fi
if [ "${1:-}" = --oldest ]; then
    shift
    oldest=yes
    here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    export THREESTEP_PINS=constraints-oldest.txt THREESTEP_VENV="${THREESTEP_VENV_OLDEST:-$here/.venv_oldest}"
fi
export THREESTEP_EXTRA=test
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"
ignored=()
if [ -n "$core" ]; then
    copy="$(mktemp -d)"
    trap 'rm -rf "$copy"' EXIT
    mkdir "$copy/checkout"
    git ls-files | grep -v '^threestep/plugins/' | tar -c -T - | tar -x -C "$copy/checkout"
    if [ -d ../shared ]; then ln -s "$THREESTEP_ROOT/../shared" "$copy/shared"; fi # data for tests
    cd "$copy/checkout"
    export PYTHONPATH="$copy/checkout"
    # Or what is missing here would be found in the checkout that is installed.
    cat >sitecustomize.py <<'END'
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
END
    # The pages are those of all, and benchmarks are no part of a program.
    ignored=(--ignore tests/unit/docs --ignore tests/unit/benchmarks tests/unit tests/end_to_end/test_without_plugins.py)
    ignored+=(tests/invariants/test_float64.py)
elif [ -z "$oldest" ]; then
    bash scripts/check.sh
    ignored=(--ignore tests/test_house.py) # the house rules, which have just been tested
fi
unset PYTHONDONTWRITEBYTECODE # or every program that a test starts would compile the package again
# A file's tests stay together: they share what is costly to set up. The files come in their own order, in which the small
# ones are last, so that both processes end together.
pytest=("$PYTHON" -m pytest -n "${THREESTEP_TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder --durations=15)
"${pytest[@]}" ${ignored[@]+"${ignored[@]}"} "$@"
for word in "$@"; do
    if [ "$word" = --long ] && [ -z "$oldest$core" ]; then exec bash scripts/test.sh --oldest; fi
done
