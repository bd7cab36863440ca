#!/usr/bin/env bash
# Step 1: supervised fine-tuning. Takes the flags of `python -m training.step1_sft.main` (--help lists them), relative paths from where you are:
#     bash scripts/step1_sft.sh --config run.yaml --output_dir runs/step1_sft
# One rank for each GPU; one in all on a CPU; THREESTEP_RANKS=N sets another number.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export THREESTEP_COMMAND="${THREESTEP_COMMAND:-bash $0}"
exec "$PYTHON" -m training.utils.run.launch training.step1_sft.main "$@"
