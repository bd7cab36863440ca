#!/usr/bin/env bash
# From nothing to three trained phases: makes the environment, then trains SFT, the reward model and PPO on the embedded
# task, and ends with a table (also in runs/quickstart/summary.json). Can be run again: it replaces what it left.
#     bash scripts/quickstart.sh
#     bash scripts/quickstart.sh --resume    after Ctrl-C: from where it was stopped
#     SEED=2 bash scripts/quickstart.sh      another seed, another run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export THREESTEP_COMMAND="${SEED:+SEED=$SEED }bash $0" THREESTEP_OWN_WORDS=5 # --work_dir, --config, their values, --overwrite
if [ -n "${SEED:-}" ]; then THREESTEP_OWN_WORDS=7; fi
exec "$PYTHON" -m threestep.plugins.programs.all_steps --work_dir "$THREESTEP_ROOT" --config training/configs/quickstart.yaml \
    --overwrite ${SEED:+--seed "$SEED"} "$@"
