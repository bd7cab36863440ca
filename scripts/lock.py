"""Write the pinned versions of all that setup.py names: constraints.txt, and three files with hashes.

    python scripts/lock.py                        keeps the versions of constraints.txt, and adds what it lacks
    python scripts/lock.py --upgrade NAME ...     takes the newest of these that fit; without a name, of all
    python scripts/lock.py --names test web       prints what setup.py asks for, with these extras

Needs Python 3.11 or newer, uv and packaging (the extra `release`), and a package index. The versions are those for
Linux and macOS (Apple silicon) on each Python of setup.py's classifiers.

constraints.txt                exact versions without hashes, for `pip install -c`: the scripts and the tests use them
constraints-hashed-base.txt    with hashes: what Threestep needs, without extras
constraints-hashed.txt         with hashes: all extras but vllm and verifiers
constraints-hashed-vllm.txt    all but openenv and verifiers, for Linux: vllm and openenv want different versions of mcp
constraints-hashed-verifiers.txt  the extra verifiers alone, which wants an openai of before 3

Hashes are those of wheels, and of the source distribution where a package has no wheel for one of these machines.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

if TYPE_CHECKING:
    from packaging.tags import Tag

ROOT = Path(__file__).parents[1]
ALONE = ("verifiers",)  # fits beside no other extra that asks for openai
FREED = ("openai", "mcp", "mcp-types")  # of which it has versions of its own
LINUX, MACOS = ("linux", "x86_64"), ("darwin", "arm64")
ARM_LINUX = ("linux", "aarch64")
# The CPU builds of torch 2.13.0 lie on PyTorch's index alone, under the version 2.13.0+cpu, which `==2.13.0` allows.
# The digest of cp311 on x86_64 was computed from the wheel; the others are those that public lock files record of that
# index. For Python 3.10 on x86_64 none was found, so that its CPU build is not allowed.
CPU_BUILDS = {
    ("torch", "2.13.0"): {
        "cp310-cp310-manylinux_2_28_aarch64": "f028e428bddee95cdb86e2470254e95c9af629362488550c200ed4793125a817",
        "cp311-cp311-manylinux_2_28_aarch64": "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "cp311-cp311-manylinux_2_28_x86_64": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "cp312-cp312-manylinux_2_28_aarch64": "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        "cp312-cp312-manylinux_2_28_x86_64": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "cp313-cp313-manylinux_2_28_aarch64": "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
        "cp313-cp313-manylinux_2_28_x86_64": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    }
}
CONSTRAINTS_HEAD = """\
# The exact versions that the tests ran with (Python 3.11, no GPU). Every set-up uses them:
#     pip install -c constraints.txt -e .[test]
# Written by scripts/lock.py, which also says what constraints-hashed.txt is. Where a version needs a newer Python, the
# older one has a pin of its own: those sets were resolved, and not run.
# Not here, because the extras vllm and openenv differ in them: {differing}.
# torch stands without a local version, so that 2.13.0+cpu satisfies it where a package source offers that build.
"""
HASHED_HEAD = """\
# constraints.txt with the hashes of all files that may be installed: {extras}.
#     pip install --require-hashes -r {name}                         all of it, with any pip
#     pip install --require-hashes -c {name} torch==2.13.0           some of it, with pip 26.1 or newer
# DeepSpeed has no wheel: install setuptools and wheel first, and the rest with DS_BUILD_OPS=0 and --no-build-isolation.
# docs/releasing.md has the commands. Written by scripts/lock.py.
"""


@dataclass(frozen=True)
class Locked:
    """A version of a package: the machines that get it, and the files that they may install."""

    name: str
    version: str
    marker: str
    pythons: tuple[str, ...]
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class LockFile:
    """A file with hashes: the extras that it serves, and the machines."""

    name: str
    extras: tuple[str, ...]
    pythons: tuple[str, ...]
    platforms: tuple[tuple[str, str], ...]


def main(argv: Sequence[str]) -> int:
    """Write the files, or print the names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="packages that may change; none: all of them")
    parser.add_argument("--names", nargs="*", metavar="EXTRA", help="print the requirements, and write nothing")
    arguments = parser.parse_args(argv)
    if arguments.names is not None:
        print("\n".join(sorted(requirements(arguments.names))))
        return 0
    kept = kept_pins((ROOT / "constraints.txt").read_text(), arguments.upgrade)
    others = kept_pins(kept, FREED)
    locks = [(lock, resolve(lock, others if lock.extras == ALONE else kept)) for lock in lock_files()]
    for lock, packages in locks:
        extras = (
            f"all extras but {', '.join(sorted(set(project()[1]) - set(lock.extras)))}" if lock.extras else "no extra"
        )
        head = HASHED_HEAD.format(name=lock.name, extras=extras)
        (ROOT / lock.name).write_text(head + hashed_text(packages))
    known = {each.name for lock, packages in locks for each in packages if lock.extras != ALONE}
    agreeing = [
        [each for each in packages if lock.extras != ALONE or each.name not in known] for lock, packages in locks
    ]
    (ROOT / "constraints.txt").write_text(constraints_text(agreeing))
    return 0


def lock_files() -> list[LockFile]:
    """The files with hashes; vLLM is for Linux and Python 3.11 or newer."""
    pythons = classifiers((ROOT / "setup.py").read_text())
    extras = [extra for extra in project()[1] if extra not in ALONE]
    most = tuple(extra for extra in extras if extra != "vllm")
    vllm = tuple(extra for extra in extras if extra != "openenv")
    return [
        LockFile("constraints-hashed-base.txt", (), pythons, (LINUX, ARM_LINUX, MACOS)),
        LockFile("constraints-hashed.txt", most, pythons, (LINUX, ARM_LINUX, MACOS)),
        LockFile("constraints-hashed-vllm.txt", vllm, pythons[1:], (LINUX,)),
        LockFile("constraints-hashed-verifiers.txt", ALONE, pythons[1:], (LINUX, ARM_LINUX, MACOS)),
    ]


def classifiers(setup: str) -> tuple[str, ...]:
    """The Pythons that setup.py names in its classifiers, oldest first."""
    return tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup))


def project() -> tuple[list[str], list[str]]:
    """(requirements, extras) as setup.py declares them; `dev` is another name of `test`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (made,) = Path(folder).glob("*.egg-info")
        found = Distribution.at(made)
        return found.requires or [], sorted(set(found.metadata.get_all("Provides-Extra") or []) - {"dev"})


def requirements(extras: Iterable[str]) -> set[str]:
    """What setup.py asks for with these extras, markers of Pythons included."""
    found = set()
    for word in project()[0]:
        requirement = Requirement(word)
        extra = re.search(r'(?: and )?extra == "([^"]+)"', str(requirement.marker or ""))
        if extra is None or extra[1] in extras:
            rest = str(requirement.marker or "").replace(extra[0] if extra else "", "")
            requirement.marker = Marker(rest) if rest else None
            found.add(str(requirement))
    return found


def kept_pins(text: str, upgrade: Sequence[str] | None) -> str:
    """The lines of constraints.txt that stay: all, those without the named packages, or none."""
    if upgrade is not None and not upgrade:
        return ""
    gone = {canonicalize_name(name) for name in upgrade or ()}
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return "".join(f"{line}\n" for line in lines if canonicalize_name(Requirement(line).name) not in gone)


def resolve(lock: LockFile, kept: str) -> list[Locked]:
    """The versions that fit together on all machines of the file."""
    # soupsieve and others leave out the first releases of 3.11, which would have a set of their own.
    spans = ["python_full_version < '3.11'"] * ("3.10" in lock.pythons)
    spans.append(f"python_full_version >= '3.11.5' and python_full_version < '3.{int(lock.pythons[-1][2:]) + 1}'")
    places = [f"sys_platform == '{system}' and platform_machine == '{cpu}'" for system, cpu in lock.platforms]
    environments = [f"{place} and {span}" for place in places for span in spans]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "constraints.txt").write_text(kept)
        (Path(folder) / "pyproject.toml").write_text(
            f'[project]\nname = "locked"\nversion = "0"\nrequires-python = ">={lock.pythons[0]}"\n'
            f"dependencies = {sorted(requirements(lock.extras))!r}\n[tool.uv]\nenvironments = {environments!r}\n"
        )
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--format", "pylock.toml", "--no-header"]
        command += ["--no-annotate", "--python-version", lock.pythons[0], "-c", "constraints.txt"]
        subprocess.run([*command, "pyproject.toml", "-o", "pylock.toml"], cwd=folder, check=True)
        packages = tomllib.loads((Path(folder) / "pylock.toml").read_text())["packages"]
    return sorted((locked(package, lock) for package in packages), key=lambda each: (each.name, each.pythons))


def locked(package: Mapping, lock: LockFile) -> Locked:
    """A package of uv's lock with the files that the machines of `lock` may install."""
    marker = Marker(package["marker"]) if "marker" in package else None
    machines = [
        (python, platform)
        for python in lock.pythons
        for platform in lock.platforms
        if marker is None or marker.evaluate(machine(python, platform))
    ]
    hashes, served = [], set()
    for wheel in package.get("wheels", ()):
        name = wheel.get("name") or wheel["url"].rsplit("/", 1)[1].replace("%2B", "+")
        fitting = {each for each in machines if fits(parse_wheel_filename(name)[3], *each)}
        hashes += [wheel["hashes"]["sha256"]] if fitting else []
        served |= fitting
    if served != set(machines):
        hashes.append(package["sdist"]["hashes"]["sha256"])
    hashes += CPU_BUILDS.get((package["name"], package["version"]), {}).values()
    pythons = tuple(python for python in lock.pythons if any(python == each for each, _ in machines))
    return Locked(package["name"], package["version"], short_marker(machines, lock), pythons, tuple(sorted(hashes)))


def machine(python: str, platform: tuple[str, str]) -> dict[str, str]:
    """The environment in which that machine evaluates markers."""
    system, cpu = platform
    patch = f"{python}.9"
    interpreter = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    versions = {"python_version": python, "python_full_version": patch, "implementation_version": patch}
    system_words = {"sys_platform": system, "platform_system": system.capitalize(), "os_name": "posix"}
    return {**interpreter, **versions, **system_words, "platform_machine": cpu, "extra": ""}


def fits(tags: Iterable[Tag], python: str, platform: tuple[str, str]) -> bool:
    """True if a wheel of these tags can be installed there."""
    system, cpu = platform
    minor = int(python[2:])
    for tag in tags:
        old = re.fullmatch(r"cp3(\d+)", tag.interpreter)
        runs = tag.interpreter in ("py3", f"py3{minor}") or (old and int(old[1]) == minor and tag.abi == f"cp3{minor}")
        runs = runs or (old and int(old[1]) <= minor and tag.abi in ("abi3", "none"))
        starts = ("manylinux", "linux") if system == "linux" else ("macosx",)
        ends = (cpu, "universal2") if system == "darwin" else (cpu,)
        here = tag.platform == "any" or (tag.platform.startswith(starts) and tag.platform.endswith(ends))
        if runs and here:
            return True
    return False


def short_marker(machines: Sequence[tuple[str, tuple[str, str]]], lock: LockFile) -> str:
    """The marker of just these machines among all those of the file."""
    parts = [span([each for each in lock.pythons if any(each == python for python, _ in machines)], lock.pythons)]
    platforms = {platform for _, platform in machines}
    if platforms != set(lock.platforms):
        systems = {system for system, _ in platforms}
        whole = {each for each in lock.platforms if each[0] in systems} == platforms
        parts.append(f'sys_platform == "{systems.pop()}"' if whole and len(systems) == 1 else _each(platforms))
    return " and ".join(part for part in parts if part)


def _each(platforms: Iterable[tuple[str, str]]) -> str:
    words = [f'sys_platform == "{system}" and platform_machine == "{cpu}"' for system, cpu in sorted(platforms)]
    return words[0] if len(words) == 1 else f"({' or '.join(words)})"


def span(pythons: Sequence[str], all_pythons: Sequence[str]) -> str:
    """The marker of neighbouring Pythons among all; empty for all of them."""
    first, last = all_pythons.index(pythons[0]), all_pythons.index(pythons[-1])
    lower = [f'python_version >= "{pythons[0]}"'] if first else []
    upper = [f'python_version < "{all_pythons[last + 1]}"'] if last + 1 < len(all_pythons) else []
    return " and ".join(lower + upper)


def hashed_text(packages: Iterable[Locked]) -> str:
    """The lines of a file with hashes."""
    lines = []
    for each in packages:
        marker = f" ; {each.marker}" if each.marker else ""
        lines += [f"{each.name}=={each.version}{marker} \\"]
        lines += [f"    --hash=sha256:{digest} \\" for digest in each.hashes]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "".join(f"{line}\n" for line in lines)


def constraints_text(locks: Sequence[Sequence[Locked]]) -> str:
    """The lines of constraints.txt: the versions in which the files agree, or that one of them alone has."""
    versions: dict[str, dict[str, set[str]]] = {}
    for packages in locks:
        for each in packages:
            for python in each.pythons:
                versions.setdefault(each.name, {}).setdefault(python, set()).add(each.version)
    differing = [name for name, found in versions.items() if any(len(each) > 1 for each in found.values())]
    lines = []
    for name, found in sorted(versions.items()):
        if name in differing or name.startswith(("nvidia-", "cuda-")) or name == "triton":  # torch's to choose
            continue
        pins = {python: next(iter(each)) for python, each in found.items()}
        pythons = list(pins)
        for version in dict.fromkeys(pins.values()):
            here = [python for python in pythons if pins[python] == version]
            marker = span(here, pythons)
            lines.append(f"{name}=={version}" + (f"; {marker}" if marker else ""))
    return CONSTRAINTS_HEAD.format(differing=", ".join(sorted(differing))) + "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
