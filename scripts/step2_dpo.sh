#!/usr/bin/env bash
# Step 2 without a reward model: direct preference optimisation. Takes the flags of `python -m training.step2_dpo.main` (--help lists them), relative paths from where you are:
#     bash scripts/step2_dpo.sh --config run.yaml --output_dir runs/step2_dpo
# One rank for each GPU; one in all on a CPU; THREESTEP_RANKS=N sets another number.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export THREESTEP_COMMAND="${THREESTEP_COMMAND:-bash $0}"
exec "$PYTHON" -m training.utils.run.launch training.step2_dpo.main "$@"
