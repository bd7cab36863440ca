#!/usr/bin/env bash
# Writes constraints.txt and constraints-hashed*.txt by scripts/lock.py, which says what they are, and takes its flags:
#     bash scripts/lock.sh                  after a change of setup.py: keeps the versions, adds what is new
#     bash scripts/lock.sh --upgrade        the newest versions that fit; --upgrade NAME ... those of some packages
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_release_environment.sh"
PATH="$(dirname "$python"):$PATH" exec "$python" "$root/scripts/lock.py" "$@"
