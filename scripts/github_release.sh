#!/usr/bin/env bash
# Makes the release of the tag in GITHUB_REF_NAME in the repository, with the files of a folder of
# scripts/build_release.sh and the changelog's section as its text. Needs gh and GH_TOKEN:
#     bash scripts/github_release.sh FOLDER
set -euo pipefail
folder="$1" root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
version="${GITHUB_REF_NAME#v}"
notes="$(mktemp)"
trap 'rm -f "$notes"' EXIT
awk -v start="## [$version]" 'index($0, "## [") == 1 { inside = index($0, start) == 1; next } inside' \
    "$root/CHANGELOG.md" >"$notes"
[ -s "$notes" ] || {
    printf "error: CHANGELOG.md has no section '## [%s]'\n" "$version" >&2
    exit 1
}
gh release create "$GITHUB_REF_NAME" --verify-tag --title "Threestep $version" --notes-file "$notes" "$folder"/*
