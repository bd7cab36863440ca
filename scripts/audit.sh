#!/usr/bin/env bash
# Looks for known vulnerabilities in all pinned versions by pip-audit, which asks PyPI for its advisories. Ends with 1 where
# there is one, or where a package could not be looked up. Further words go to pip-audit.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_release_environment.sh"
code=0
for pins in constraints-hashed.txt constraints-hashed-vllm.txt constraints-hashed-verifiers.txt; do
    "$python" -m pip_audit --strict --disable-pip --require-hashes --requirement "$root/$pins" "$@" || code=1
done
exit "$code"
