#!/usr/bin/env bash
# Step 3: PPO. Takes the flags of `python -m training.step3_ppo.main` (--help lists them), relative paths from where you are:
#     bash scripts/step3_ppo.sh --config run.yaml --output_dir runs/step3_ppo
# One rank for each GPU; one in all on a CPU; THREESTEP_RANKS=N sets another number.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export THREESTEP_COMMAND="${THREESTEP_COMMAND:-bash $0}"
exec "$PYTHON" -m training.utils.run.launch training.step3_ppo.main "$@"
