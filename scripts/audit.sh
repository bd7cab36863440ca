#!/usr/bin/env bash
# Looks for known vulnerabilities in the pinned versions, by pip-audit and the advisories of PyPI and OSV. Ends with 1 where
# it finds one. Takes no arguments (further words go to pip-audit); needs the environment of scripts/build_release.sh,
# or a python3 that has pip-audit (THREESTEP_VENV=none).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${THREESTEP_VENV_RELEASE:-$root/.venv_release}/bin/python"
if [ "${THREESTEP_VENV:-}" = none ] || ! [ -x "$python" ]; then python=python3; fi
exec "$python" -m pip_audit --disable-pip --require-hashes --requirement "$root/constraints-hashed.txt" "$@"
