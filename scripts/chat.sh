#!/usr/bin/env bash
# Talks with a model, or with two side by side. Takes the flags of `threestep chat` (--help lists them):
#     bash scripts/chat.sh runs/ppo/model
#     bash scripts/chat.sh runs/sft/model runs/ppo/model --reward_model runs/reward/model
# Standard input that is no terminal is one question; --web serves a page on 127.0.0.1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec "$PYTHON" -m threestep.plugins.evaluation.chat "$@"
