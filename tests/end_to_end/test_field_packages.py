"""Packages for tests: fetched by the registry's client, verified by their hash, skipped with a reason without it."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import field_packages
from tests.support.field_packages import FieldPackage, package_folder

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FieldPackage:
    """A package in a folder that stands for the registry."""
    wheel = tmp_path / "shelf" / "oak-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("oak/leaf.txt", "green")
        archive.writestr("oak-1.0.dist-info/METADATA", METADATA.format(name="oak"))
        archive.writestr("oak-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("oak-1.0.dist-info/RECORD", "")
    package = FieldPackage("oak", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), ("oak/*.txt",))
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": package})
    monkeypatch.setenv("THREESTEP_FIELD_PACKAGES", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return package


def test_another_archive_is_refused(shelf: FieldPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": replace(shelf, sha256="0" * 64)})
    with pytest.raises(ValueError, match=f"oak 1.0: sha256 is {shelf.sha256}, expected 0000"):
        package_folder("oak")
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": replace(shelf, holds=("oak/*.json",))})
    with pytest.raises(ValueError, match=r"oak 1.0 has no oak/\*.json"):
        package_folder("oak")
