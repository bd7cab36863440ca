#!/usr/bin/env bash
# The files of a release, in dist/ (or the folder that is named): the source distribution, the wheel, an SBOM of what the
# wheel needs (CycloneDX), a requirement with the hashes of both, and SHA256SUMS. Built from the last commit in an
# environment of its own (.venv_release, which --require-hashes fills): two checkouts of a commit give the same bits.
#     bash scripts/build_release.sh [FOLDER]
# The environment: scripts/_release_environment.sh.
set -euo pipefail
umask 022
case "${1:-}" in
    -*)
        printf 'error: expected a folder, got %s; this script has no flags\n' "$1" >&2
        exit 1
        ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/_release_environment.sh"
out="${1:-$root/dist}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

git rev-parse --verify --quiet HEAD >/dev/null || fail "expected a git checkout with a commit in $root, found none"
[ -z "$(git status --porcelain --untracked-files=no)" ] || fail "tracked files of $root have changes that no commit holds: commit or stash them"
version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' training/__init__.py)"
grep -q "^## \[$version\] - [0-9-]*\$" CHANGELOG.md || fail "CHANGELOG.md has no line '## [$version] - DATE', the version of training/__init__.py"
if [ -n "${GITHUB_REF_NAME:-}" ] && [ "${GITHUB_REF_TYPE:-}" = tag ]; then
    [ "$GITHUB_REF_NAME" = "v$version" ] || fail "the tag is $GITHUB_REF_NAME, and training/__init__.py has version $version"
fi

# The time in the archives is the commit's, and their files are the commit's, without what lies beside them.
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH PYTHONHASHSEED=0 TZ=UTC LC_ALL=C.UTF-8
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/checkout" "$work/made"
git archive HEAD | tar --extract --directory "$work/checkout"
"$python" -m build --no-isolation --sdist --outdir "$work/made" "$work/checkout" >"$work/log" || { cat "$work/log" >&2; exit 1; }
sdist="$work/made/threestep-$version.tar.gz"
"$python" scripts/plain_archive.py "$sdist"
# The wheel is that of the source distribution, as whoever builds from the registry's file gets it.
tar --extract --directory "$work" --file "$sdist"
"$python" -m build --no-isolation --wheel --outdir "$work/made" "$work/threestep-$version" >"$work/log" || { cat "$work/log" >&2; exit 1; }
wheel="$work/made/threestep-$version-py3-none-any.whl"
"$python" -m twine check --strict "$sdist" "$wheel"

printf '[project]\nname = "threestep"\nversion = "%s"\n' "$version" >"$work/pyproject.toml"
# The root component has no dependencies of its own in this form, of which the program warns.
"$python" -W ignore::UserWarning -m cyclonedx_py requirements constraints-hashed-base.txt --pyproject "$work/pyproject.toml" \
    --output-reproducible --output-format JSON --output-file "$work/made/threestep.cdx.json"
digest() { sha256sum "$1" | cut -d' ' -f1; }
printf 'threestep==%s --hash=sha256:%s --hash=sha256:%s\n' "$version" "$(digest "$wheel")" "$(digest "$sdist")" \
    >"$work/made/threestep.requirements.txt"
(cd "$work/made" && sha256sum threestep* >SHA256SUMS)
cp "$work/made/"* "$out"
cat "$out/SHA256SUMS"
