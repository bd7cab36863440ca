# The environment that the scripts of a release share, .venv_release: sourced, never run. It leaves root (the checkout) and
# python (the environment's Python) behind. Each of its packages is checked by the hashes of constraints-hashed.txt.
#
#   THREESTEP_VENV_RELEASE  where the environment is or shall be; default: .venv_release in the checkout
#   THREESTEP_PYTHON        the Python that makes it; default: python3 (3.11 or newer)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${THREESTEP_VENV_RELEASE:-$root/.venv_release}"
python="$venv/bin/python"
if ! [ "$(cat "$venv/release.stamp" 2>/dev/null)" = "$(cksum <"$root/constraints-hashed.txt")" ]; then
    "${THREESTEP_PYTHON:-python3}" -m venv --clear "$venv"
    # The pip of the venv takes hashes from a requirement alone; this newer one takes them from constraints too.
    sed -n '/^pip==/,/[^\\]$/p' "$root/constraints-hashed.txt" >"$venv/pip.txt"
    "$python" -m pip --disable-pip-version-check install --quiet --require-hashes --requirement "$venv/pip.txt"
    "$python" -m pip --disable-pip-version-check install --quiet --require-hashes \
        --constraint "$root/constraints-hashed.txt" \
        build cyclonedx-bom packaging pip pip-audit setuptools twine uv wheel
    cksum <"$root/constraints-hashed.txt" >"$venv/release.stamp"
fi
