"""Packs what a machine with a GPU, torch and no network lacks: wheels, and their installation.

    python -m benchmarks.gpu_day.pack [--python 3.12] [--there FREEZE.txt] [--out carried] [--most_mb 60]

Versions are constraints.txt's; requirements are followed from setup.py's through the wheels' own metadata. Taken as
there is torch with what it requires, and what --there names (`pip freeze` on that machine), where that version serves
whoever asks for it. DeepSpeed is built from its source without compiled operators, by this Python, which needs torch
for that; every other wheel is the registry's for --python on x86-64 Linux. Each is compressed by xz instead of zip,
which takes a quarter off. What does not fit is left out and named (`LEFT_OUT`). On the machine:

    python carried/install.py
"""

from __future__ import annotations

import argparse
import email
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# torch brings these (its metadata, 2.11 to 2.13); of CUDA's packages, all.
TORCH_BRINGS = ("torch", "triton", "filelock", "typing-extensions", "setuptools", "sympy", "mpmath", "networkx",
                "jinja2", "markupsafe", "fsspec")  # fmt: skip
BUILT = "deepspeed"  # the registry has its source alone
# The package imports pyarrow, which datasets brings; the others are of the tests marked gpu and their configuration.
ALSO = ("pyarrow", "pytest", "pytest-timeout", "hypothesis")
# Left out of a wheel, with their lines in its RECORD: what nothing here imports, and the rest of it does without.
TRIMMED = {
    "pyarrow": (
        "pyarrow/include/*", "pyarrow/tests/*", "pyarrow/src/*", "*.pxd", "*.pyx", "pyarrow/*flight*",
        "pyarrow/_substrait*", "pyarrow/*s3*", "pyarrow/_gcsfs*", "pyarrow/_azurefs*", "pyarrow/_hdfs*",
        "pyarrow/_orc*",
    ),
    "numpy": ("numpy/*/tests/*", "numpy/tests/*"),
    "pandas": ("pandas/tests/*",),
}  # fmt: skip
# Not on any path of the measurements; the last is the first to be carried. What is lost without each.
LEFT_OUT = {
    "tensorboard": "runs need --report_to none; metrics.jsonl has the figures",
    "matplotlib": "no charts as PNG",
    "datasets": "no rows of the hub, or of a folder that datasets saved; files are read without it",
}
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
LEAST_SHARE = 0.3  # of a wheel's size that xz left: 0.32 of transformers', which is text
WHEELS = "wheels"  # the folder of NAME.whl.xz, beside install.py


@dataclass(frozen=True)
class Packed:
    """files: each wheel, compressed, by canonical name. left_out: of `LEFT_OUT`, what is not carried."""

    files: dict[str, Path]
    left_out: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def main() -> None:
    """Download, build, pack, say what it weighs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the Python of that machine, as 3.12")
    parser.add_argument("--there", type=Path, help="what `pip freeze` prints there")
    parser.add_argument("--out", type=Path, default=Path("carried"))
    parser.add_argument("--most_mb", type=float, default=60.0, help="of the archive, in millions of bytes")
    arguments = parser.parse_args()
    there = frozen(arguments.there.read_text()) if arguments.there else {}
    packed = pack(arguments.out, arguments.python, there, arguments.most_mb)
    for path in sorted(packed.files.values(), key=lambda path: -path.stat().st_size):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    for name in packed.left_out:
        print(f"left out: {name}: {LEFT_OUT[name]}")
    size = packed.total_bytes / 1e6
    print(f"{len(packed.files)} wheels for Python {arguments.python} in {arguments.out / WHEELS}, {size:.1f} MB")
    if size > arguments.most_mb:
        sys.exit(f"expected at most {arguments.most_mb:g} MB, got {size:.1f}: name what is there with --there")


def pack(out: Path, python: str, there: Mapping[str, str], most_mb: float) -> Packed:
    """Write the wheels and install.py to `out`: what is needed, then of `LEFT_OUT` what fits."""
    cache = out.parent / f"{out.name}_downloaded" / python
    cache.mkdir(parents=True, exist_ok=True)
    roots = {canonicalize_name(each.name): each for each in required()}
    kept, left_out = [name for name in roots if name not in LEFT_OUT], list[str]()
    files = compressed(closure([roots[name] for name in kept], python, there, cache))
    for name in reversed([name for name in LEFT_OUT if not is_there(roots[name], there)]):
        wheels = closure([roots[each] for each in (*kept, name)], python, there, cache)
        room = most_mb * 1e6 - Packed(files, ()).total_bytes
        at_least = LEAST_SHARE * sum(path.stat().st_size for each, path in wheels.items() if each not in files)
        more = compressed(wheels) if at_least <= room else {}  # minutes, for what cannot fit
        if more and Packed(more, ()).total_bytes <= most_mb * 1e6:
            kept, files = [*kept, name], more
        else:
            left_out.append(name)
    place = out / WHEELS
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = {name: Path(shutil.copy(path, place)) for name, path in files.items()}
    shutil.copy(Path(__file__).parent / "install.py", out)
    return Packed(files, tuple(left_out))


def required() -> list[Requirement]:
    """What setup.py requires, and `ALSO`."""
    found = re.search(r"^INSTALL_REQUIRES = \[(.*?)^\]", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return [Requirement(name) for name in [*re.findall(r'"([^"]+)"', found[1]), *ALSO]]


def frozen(text: str) -> dict[str, str]:
    """Return versions by canonical name of `pip freeze`'s lines; what has no version there is not taken as there."""
    pairs = (re.match(r"([\w.\-]+)==([\w.+!\-]+)", line.strip()) for line in text.splitlines())
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def pinned(python: str) -> dict[str, str]:
    """Return constraints.txt's versions for that Python, by canonical name."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(machine(python)):
                pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return pins


def machine(python: str) -> dict[str, str]:
    """Return the environment in which that machine evaluates markers."""
    words = {"python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython"}
    words |= {"platform_machine": "x86_64", "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    return {**default_environment(), **words, "extra": ""}  # type: ignore[dict-item]


def is_there(wanted: Requirement, there: Mapping[str, str]) -> bool:
    """Whether the machine has it: from torch, or in a version that serves."""
    name = canonicalize_name(wanted.name)
    if name in there:
        return wanted.specifier.contains(there[name], prereleases=True)
    return name in TORCH_BRINGS or name.startswith("nvidia-")


def closure(roots: Iterable[Requirement], python: str, there: Mapping[str, str], cache: Path) -> dict[str, Path]:
    """Return the wheels that `roots` need there, in `cache`, by canonical name."""
    pins, wheels = pinned(python), dict[str, Path]()
    wanted = [each for each in roots if not is_there(each, there)]
    while wanted:
        names = sorted({canonicalize_name(each.name) for each in wanted} - set(wheels))
        if lacking := [name for name in names if name not in pins]:
            sys.exit(f"constraints.txt expects a line for each package, and has none for {', '.join(lacking)}")
        wheels |= fetched({name: pins[name] for name in names}, python, cache)
        needs = [need for name in names for need in needs_of(wheels[name], python)]
        wanted = [each for each in needs if canonicalize_name(each.name) not in wheels and not is_there(each, there)]
    return wheels


def needs_of(wheel: Path, python: str) -> list[Requirement]:
    """Return what a wheel requires on that machine, without extras."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(files.read(name)).get_all("Requires-Dist") or []
    needs = [Requirement(line) for line in lines]
    return [need for need in needs if need.marker is None or need.marker.evaluate(machine(python))]


def fetched(versions: Mapping[str, str], python: str, cache: Path) -> dict[str, Path]:
    """Download, or for DeepSpeed build, what `cache` lacks."""
    pip = [sys.executable, "-m", "pip"]
    lacking = {name: version for name, version in versions.items() if cached(name, version, cache) is None}
    if version := lacking.pop(BUILT, None):
        build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(cache), f"{BUILT}=={version}"]
        subprocess.run([*pip, *build], check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, stdout=sys.stderr)
    if lacking:
        kind = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
        kind += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        names = [f"{name}=={version}" for name, version in lacking.items()]
        subprocess.run(
            [*pip, "download", "-q", "--no-deps", *kind, "-d", str(cache), *names], check=True, stdout=sys.stderr
        )
    found = {name: cached(name, version, cache) for name, version in versions.items()}
    return {name: path for name, path in found.items() if path is not None}


def cached(name: str, version: str, cache: Path) -> Path | None:
    """Return the wheel of this version in `cache`."""
    for path in cache.glob("*.whl"):
        parts = path.name.split("-")
        if canonicalize_name(parts[0]) == name and parts[1] == version:
            return path
    return None


def compressed(wheels: Mapping[str, Path]) -> dict[str, Path]:
    """Return each wheel as NAME.whl.xz beside it: the same wheel without compression (its hashes are those of the files
    in it), less what is `TRIMMED`, compressed as a whole."""
    made = {}
    for name, wheel in wheels.items():
        path = wheel.with_name(wheel.name + ".xz")
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(lzma.compress(stored(wheel), preset=6))
            part.rename(path)
        made[name] = path
    return made


def stored(wheel: Path) -> bytes:
    """Return the wheel without compression and without what is trimmed."""
    whole, patterns = io.BytesIO(), TRIMMED.get(canonicalize_name(wheel.name.split("-")[0]), ())
    with zipfile.ZipFile(wheel) as files, zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as target:
        for info in files.infolist():
            if any(fnmatch(info.filename, pattern) for pattern in patterns):
                continue
            data = files.read(info)
            if patterns and info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                kept = [line for line in lines if not any(fnmatch(line.split(",")[0], each) for each in patterns)]
                data = "".join(kept).encode()
            info.compress_type = zipfile.ZIP_STORED
            target.writestr(info, data)
    return whole.getvalue()


if __name__ == "__main__":
    main()
