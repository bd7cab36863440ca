#!/usr/bin/env bash
# All three steps from one YAML file, each fed with the one before, and a table at the end:
#     bash scripts/all_steps.sh --config examples/gsm8k.yaml
# It works in the checkout's folder: relative paths inside the YAML file start there. --help lists the flags.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export THREESTEP_COMMAND="${THREESTEP_COMMAND:-bash $0}"
export THREESTEP_OWN_WORDS=2 # --work_dir and its folder
exec "$PYTHON" -m threestep.plugins.programs.all_steps --work_dir "$THREESTEP_ROOT" "$@"
