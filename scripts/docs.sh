#!/usr/bin/env bash
# The documentation's site, in build/site (open build/site/index.html): makes the environment where it is missing, adds the
# extra `docs` to it once, and builds. Any warning fails, a broken link among them. Needs no network once all is installed.
# Further words go to docs/site/build.py: bash scripts/docs.sh --without_modules
set -euo pipefail
export THREESTEP_EXTRA=test
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"
if ! "$PYTHON" -c 'import sphinx, furo, myst_parser' 2>/dev/null; then
    threestep_say "installing Sphinx and what the extra docs names besides"
    DS_BUILD_OPS=0 "$PYTHON" -m pip install --disable-pip-version-check --constraint "$THREESTEP_PINS" \
        --no-build-isolation --editable ".[docs]"
fi
exec "$PYTHON" docs/site/build.py "$@"
