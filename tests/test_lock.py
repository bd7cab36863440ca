"""scripts/lock.py: which files a machine may install, the markers of pins, and what constraints.txt takes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

if sys.version_info < (3, 11):
    pytest.skip("scripts/lock.py needs Python 3.11 or newer", allow_module_level=True)

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
lock = importlib.util.module_from_spec(spec)
sys.modules["lock"] = lock  # its dataclasses look their module up
spec.loader.exec_module(lock)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FILE = lock.LockFile("f.txt", (), PYTHONS, (lock.LINUX, lock.ARM_LINUX, lock.MACOS))


@pytest.mark.parametrize(
    ("wheel", "python", "platform", "expected"),
    [
        ("a-1-py3-none-any.whl", "3.10", lock.MACOS, True),
        ("a-1-py2-none-any.whl", "3.10", lock.LINUX, False),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "3.11", lock.LINUX, True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "3.12", lock.LINUX, False),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "3.11", lock.ARM_LINUX, False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "3.11", lock.LINUX, False),
        ("a-1-cp39-abi3-manylinux2014_aarch64.whl", "3.13", lock.ARM_LINUX, True),
        ("a-1-cp312-abi3-manylinux2014_aarch64.whl", "3.11", lock.ARM_LINUX, False),
        ("a-1-cp313-cp313t-manylinux2014_x86_64.whl", "3.13", lock.LINUX, False),
        ("a-1-cp310-cp310-macosx_11_0_universal2.whl", "3.10", lock.MACOS, True),
        ("a-1-cp310-cp310-macosx_10_9_x86_64.whl", "3.10", lock.MACOS, False),
        ("a-1-cp310-cp310-win_amd64.whl", "3.10", lock.LINUX, False),
    ],
)
def test_a_wheel_fits_a_machine(wheel, python, platform, expected):
    assert bool(lock.fits(parse_wheel_filename(wheel)[3], python, platform)) is expected


@pytest.mark.parametrize(
    "machines",
    [
        [(python, platform) for python in PYTHONS for platform in FILE.platforms],
        [("3.10", platform) for platform in FILE.platforms],
        [(python, platform) for python in ("3.11", "3.12") for platform in FILE.platforms],
        [(python, platform) for python in PYTHONS for platform in (lock.LINUX, lock.ARM_LINUX)],
        [(python, lock.MACOS) for python in PYTHONS[1:]],
        [(python, platform) for python in PYTHONS[2:] for platform in (lock.LINUX, lock.MACOS)],
    ],
)
def test_a_short_marker_is_true_on_its_machines_alone(machines):
    marker = lock.short_marker(machines, FILE)
    for python in PYTHONS:
        for platform in FILE.platforms:
            true_here = not marker or Marker(marker).evaluate(lock.machine(python, platform))
            assert true_here == ((python, platform) in machines), (marker, python, platform)


def wheel(name: str, digest: str) -> dict:
    return {"url": f"https://index/{name}", "hashes": {"sha256": digest}}


def test_hashes_are_those_of_the_machines_and_of_the_source_where_a_wheel_lacks():
    wheels = [wheel("a-1-cp310-cp310-win_amd64.whl", "win")]
    wheels += [wheel(f"a-1-cp3{minor}-cp3{minor}-manylinux1_x86_64.whl", f"linux{minor}") for minor in range(10, 15)]
    wheels += [wheel(f"a-1-cp3{minor}-cp3{minor}-manylinux1_aarch64.whl", f"arm{minor}") for minor in range(10, 15)]
    package = {"name": "a", "version": "1", "wheels": wheels, "sdist": {"hashes": {"sha256": "source"}}}
    only_linux = lock.locked({**package, "marker": "sys_platform == 'linux'"}, FILE)
    assert only_linux.hashes == tuple(sorted(f"{kind}{minor}" for kind in ("arm", "linux") for minor in range(10, 14)))
    assert only_linux.marker == 'sys_platform == "linux"' and only_linux.pythons == PYTHONS
    assert "source" in lock.locked(package, FILE).hashes  # macOS has no wheel
    torch = lock.locked({"name": "torch", "version": "2.13.0", "wheels": [wheel("a-1-py3-none-any.whl", "any")]}, FILE)
    assert "any" in torch.hashes and len(torch.hashes) == 1 + len(lock.CPU_BUILDS["torch", "2.13.0"])


def pin(name: str, version: str, *pythons: str) -> object:
    return lock.Locked(name, version, "", pythons or PYTHONS, ("0" * 64,))


def test_constraints_are_what_the_files_agree_in():
    first = [pin("a", "1"), pin("b", "1", "3.10"), pin("b", "2", *PYTHONS[1:]), pin("mcp", "1"), pin("nvidia-x", "1")]
    second = [pin("a", "1", *PYTHONS[1:]), pin("b", "2", *PYTHONS[1:]), pin("mcp", "2", *PYTHONS[1:]), pin("c", "3")]
    text = lock.constraints_text([first, second])
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "a==1", 'b==1; python_version < "3.11"', 'b==2; python_version >= "3.11"', "c==3",
    ]  # fmt: skip
    assert "differ in them: mcp.\n" in text
