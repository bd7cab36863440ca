"""What travels to a machine without a network: which wheels, and that each is the same wheel."""

from __future__ import annotations

import io
import lzma
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_day import pack

MADE = {
    "threestep_a": ["torch>=2.11", "small_b>=1", "other ; python_version < '3.11'", "extra_c ; extra == 'x'"],
    "small-b": ["numpy>=1", "threestep_a"],
    "numpy": [],
    "other": [],
}


def wheel(folder: Path, name: str, needs: list[str], more: dict[str, str] = {}) -> Path:  # noqa: B006
    base = name.replace("-", "_")
    path = folder / f"{base}-1.0-py3-none-any.whl"
    files = {f"{base}/__init__.py": "x = 1\n" * 1000, **more}
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(
        f"Requires-Dist: {need}\n" for need in needs
    )
    files[f"{base}-1.0.dist-info/METADATA"] = meta
    files[f"{base}-1.0.dist-info/RECORD"] = "".join(f"{file},sha256=abc,1\n" for file in files)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for file, text in files.items():
            target.writestr(file, text)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name, needs in MADE.items():
        wheel(tmp_path, name, needs)
    monkeypatch.setattr(pack, "pinned", lambda python: {pack.canonicalize_name(name): "1.0" for name in MADE})
    return tmp_path


def names(cache: Path, python: str, there: dict[str, str]) -> set[str]:
    return set(pack.closure([Requirement("threestep_a")], python, there, cache))


def test_what_is_needed_is_followed_but_for_what_is_there(cache):
    assert names(cache, "3.12", {}) == {"threestep-a", "small-b", "numpy"}
    assert names(cache, "3.10", {}) == {"threestep-a", "small-b", "numpy", "other"}
    assert names(cache, "3.12", {"numpy": "2.5.2"}) == {"threestep-a", "small-b"}
    assert names(cache, "3.12", {"small-b": "0.9", "numpy": "2"}) == {"threestep-a", "small-b"}  # too old to serve
    assert names(cache, "3.12", {"small-b": "1.1"}) == {"threestep-a"}  # what it needs is there with it


def test_a_package_without_a_pin_is_named(cache, monkeypatch):
    monkeypatch.setattr(pack, "pinned", lambda python: {"threestep-a": "1.0"})
    with pytest.raises(SystemExit, match="has none for small-b"):
        names(cache, "3.12", {})


def test_the_wheel_is_the_same_less_what_is_trimmed(tmp_path):
    path = wheel(tmp_path, "pyarrow", [], {"pyarrow/libarrow_flight.so": "f" * 99, "pyarrow/lib.so": "l" * 99})
    packed = pack.compressed({"pyarrow": path})["pyarrow"]
    assert packed.name == path.name + ".xz"
    with zipfile.ZipFile(io.BytesIO(lzma.decompress(packed.read_bytes()))) as made, zipfile.ZipFile(path) as given:
        left_out = set(given.namelist()) - set(made.namelist())
        assert left_out == {"pyarrow/libarrow_flight.so"}
        record = "pyarrow-1.0.dist-info/RECORD"
        for name in set(made.namelist()) - {record}:
            assert made.read(name) == given.read(name)
        assert {line.split(b",")[0].decode() for line in made.read(record).splitlines()} == set(made.namelist()) - {
            record
        }


def test_what_fits_is_carried_in_order(tmp_path, monkeypatch):
    sizes = {"needed": 50, "one": 30, "two": 20, "three": 5}
    monkeypatch.setattr(pack, "LEFT_OUT", dict.fromkeys(("three", "two", "one"), "nothing"))
    monkeypatch.setattr(pack, "required", lambda: [Requirement(name) for name in sizes])

    def closure(roots, python, there, cache):
        for root in roots:
            (cache / root.name).write_bytes(b"x" * sizes[root.name] * 1000)
        return {root.name: cache / root.name for root in roots}

    monkeypatch.setattr(pack, "closure", closure)
    monkeypatch.setattr(pack, "compressed", lambda wheels: wheels)
    packed = pack.pack(tmp_path / "out", "3.12", {}, most_mb=0.06)
    assert (set(packed.files), packed.left_out, packed.total_bytes) == ({"needed", "three"}, ("one", "two"), 55_000)
    assert sorted(path.name for path in (tmp_path / "out" / "wheels").iterdir()) == ["needed", "three"]
    assert (tmp_path / "out" / "install.py").is_file()
    assert pack.pack(tmp_path / "out", "3.12", {"one": "1"}, most_mb=0.08).left_out == ()


def test_the_lists_are_those_of_the_project():
    required = {pack.canonicalize_name(each.name) for each in pack.required()}
    assert {"torch", "deepspeed", "datasets", "pyarrow", "pytest", "pytest-timeout", "hypothesis"} <= required
    assert set(pack.LEFT_OUT) <= required
    assert pack.frozen("torch==2.11.0+cu130\n-e git+x\nNumPy==2.5.2\n# a\nb @ file:///b\n") == {
        "torch": "2.11.0+cu130", "numpy": "2.5.2",
    }  # fmt: skip
    assert pack.pinned("3.10")["numpy"] != pack.pinned("3.12")["numpy"]
    assert pack.is_there(Requirement("nvidia-cublas-cu13>=1"), {}) and not pack.is_there(Requirement("numpy"), {})
