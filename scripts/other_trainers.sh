#!/usr/bin/env bash
# Environments of other trainers, one each, for the tests of threestep/plugins/audit/tests/end_to_end/test_other_trainers.py and for comparisons.
#
#   bash scripts/other_trainers.sh FOLDER [NAME ...]     default: all of them
#
# Names: trl116 trl024 trl016 trl013 trl012 llamafactory axolotl verl (verl, OpenRLHF and AReaL in one: functions alone),
# as benchmarks/conformance/environments.py has them. One that is there is left as it is. Then:
#   THREESTEP_OTHER_TRAINERS=FOLDER python -m pytest --long threestep/plugins/audit/tests/end_to_end/test_other_trainers.py
#
#   THREESTEP_PYTHON  the Python that makes them, 3.11 for the old releases; default: python3
#   THREESTEP_TORCH   a Python that has torch 2.13, to be linked by all of them in place of a copy each
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
[ $# -gt 0 ] || set -- trl116 trl024 trl016 trl013 trl012 llamafactory axolotl verl

cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${THREESTEP_PYTHON:-python3}" -m benchmarks.conformance.environments "$@" --folder "$folder" \
    ${THREESTEP_TORCH:+--torch_from "$THREESTEP_TORCH"}
printf 'THREESTEP_OTHER_TRAINERS=%s python -m pytest --long threestep/plugins/audit/tests/end_to_end/test_other_trainers.py\n' "$folder"
