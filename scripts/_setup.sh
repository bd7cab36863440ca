# The set-up that every script here shares. Sourced, never run: it leaves THREESTEP_ROOT (the checkout) and PYTHON
# (the environment's Python) behind, and the environment's programs first on PATH.
#
#   THREESTEP_VENV    where the environment is or shall be; default: .venv in the checkout.
#                     `none` uses the python3 on PATH as it is (a container that has everything).
#   THREESTEP_PYTHON  the Python that makes the environment; default: python3
#   THREESTEP_PINS    the file of exact versions, beside setup.py; default: constraints.txt
#   THREESTEP_EXTRA   extras of setup.py to install too, such as `test`; set by the scripts that need them
#   THREESTEP_TORCH_INDEX  an index that is asked for torch's CPU build alone, before and without any other

THREESTEP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

THREESTEP_PINS="${THREESTEP_PINS:-constraints.txt}"

threestep_say() { printf 'threestep: %s\n' "$*" >&2; }

threestep_fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Everything that the installed environment depends on; the stamp in the environment holds it.
threestep_fingerprint() {
    "$1" - "$THREESTEP_ROOT" "$THREESTEP_PINS" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
content = b"".join((root / name).read_bytes() for name in (sys.argv[2], "setup.py", "pyproject.toml"))
print(hashlib.sha256(content).hexdigest(), root, "%d.%d" % sys.version_info[:2])
PYTHON
}

threestep_make_environment() {
    local venv="$1" base="${THREESTEP_PYTHON:-python3}"
    command -v "$base" >/dev/null || threestep_fail "expected Python 3.10 or newer as '$base', found none: install it, or name one in THREESTEP_PYTHON"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        threestep_fail "expected Python 3.10 or newer, got $("$base" --version 2>&1): name a newer one in THREESTEP_PYTHON"
    threestep_say "making a Python environment in $venv"
    "$base" -m venv "$venv" ||
        threestep_fail "$base cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
}

threestep_install() {
    local python="$1" pins="$THREESTEP_ROOT/$THREESTEP_PINS" torch version
    local pip=("$python" -m pip install --disable-pip-version-check --constraint "$pins")
    version="$(sed -n 's/^torch==//p' "$pins")"
    torch="torch==$version"
    # A bare `torch` would bring gigabytes of CUDA packages to a machine that cannot use them, so its exact version
    # comes first. `==` takes the build +cpu where a package source offers it; `===` takes only the
    # registry's own build, the one that knows CUDA.
    if nvidia-smi >/dev/null 2>&1; then
        torch="torch===$version"
        threestep_say "an NVIDIA GPU is here: installing the registry's own build of torch $version, with CUDA"
    else
        threestep_say "no NVIDIA GPU here: installing torch $version, the CPU build where a package source offers it"
    fi
    if [ -n "${THREESTEP_TORCH_INDEX:-}" ]; then
        "${pip[@]}" --no-deps --index-url "$THREESTEP_TORCH_INDEX" "torch==$version+cpu"
    fi
    "${pip[@]}" setuptools wheel "$torch"
    threestep_say "installing the packages that $THREESTEP_PINS pins, and this checkout"
    # DeepSpeed compiles what it needs when it needs it (DS_BUILD_OPS=0), and its build reads the torch that is
    # installed (no build isolation).
    DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation --editable "$THREESTEP_ROOT${THREESTEP_EXTRA:+[$THREESTEP_EXTRA]}"
}

threestep_set_up() {
    if [ "${THREESTEP_VENV:-}" = none ]; then
        PYTHON="$(command -v python3)" || threestep_fail "THREESTEP_VENV=none expects a python3 on PATH, found none"
        export PYTHONPATH="$THREESTEP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    local venv="${THREESTEP_VENV:-$THREESTEP_ROOT/.venv}"
    local stamp="$venv/threestep.stamp" extra="$venv/threestep_${THREESTEP_EXTRA:-}.stamp"
    mkdir -p "$venv"
    # Two scripts started at once make the environment once (where the system has flock): its folder is the lock.
    if command -v flock >/dev/null; then
        exec 9<"$venv"
        flock --nonblock 9 || { threestep_say "waiting for another script that sets up $venv" && flock 9; }
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || threestep_make_environment "$venv"
    venv="$(cd "$venv" && pwd)"
    PYTHON="$venv/bin/python"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(threestep_fingerprint "$PYTHON")" ] ||
        { [ -n "${THREESTEP_EXTRA:-}" ] && [ ! -e "$extra" ]; }; then
        local started=$SECONDS
        rm -f "$stamp" "$venv"/threestep_*.stamp
        threestep_install "$PYTHON"
        if [ -n "${THREESTEP_EXTRA:-}" ]; then touch "$extra"; fi
        threestep_fingerprint "$PYTHON" >"$stamp"
        threestep_say "the environment $venv is ready after $((SECONDS - started)) seconds"
    fi
    if command -v flock >/dev/null; then exec 9<&-; fi
    export PATH="$venv/bin:$PATH"
}

threestep_note_compiler() {
    local compiler
    for compiler in "${CXX:-c++}" g++ clang++; do
        if command -v "$compiler" >/dev/null; then return; fi
    done
    threestep_say "no C++ compiler here: DeepSpeed's compiled extensions are left out, and the run goes on without them"
}

threestep_set_up
threestep_note_compiler
