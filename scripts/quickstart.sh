#!/usr/bin/env bash
# From nothing to three trained phases: makes the environment, then trains SFT, the reward model and PPO on the embedded
# task, and ends with a table (also in runs/quickstart/summary.json). Takes no arguments; can be run again.
#     bash scripts/quickstart.sh
#     SEED=2 bash scripts/quickstart.sh      another seed, another run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec "$PYTHON" -m training.all_steps --work_dir "$THREESTEP_ROOT" --config training/configs/quickstart.yaml \
    ${SEED:+--seed "$SEED"}
