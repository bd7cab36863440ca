#!/usr/bin/env bash
# Compares two folders of scripts/build_release.sh, byte for byte, and copies the two files for the package index into a
# third:
#     bash scripts/compare_releases.sh FIRST SECOND PACKAGES
set -euo pipefail
first="$1" second="$2" packages="$3"
(cd "$first" && sha256sum --check --strict SHA256SUMS)
diff --recursive --brief "$first" "$second" || {
    printf 'error: %s and %s were built from one commit and differ: see above\n' "$first" "$second" >&2
    exit 1
}
mkdir -p "$packages"
cp "$first"/threestep-*.whl "$first"/threestep-*.tar.gz "$packages"
