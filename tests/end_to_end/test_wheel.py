"""What is published: a source distribution that builds, a wheel that is complete, and a program that imports it.

Built without a network, installed outside of the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from threestep.command import commands

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SHORTEST = """\
import threestep
rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(9) for b in range(9)]
result = threestep.sft("start", rows, max_train_steps=2)
print(result.figures)
print(sum(weight.numel() for weight in result.model.parameters()))
"""


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("the files of the checkout are listed by git, and this is none of its")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the unpacked source distribution, the folder that its wheel is installed in)"""
    place = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (place / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / "checkout" / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(place)!r})"
    ran(place / "checkout", [sys.executable, "-c", build])
    (archive,) = place.glob("threestep-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = place / archive.name.removesuffix(".tar.gz")
    ran(place, [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", "wheels", str(source)])
    (wheel,) = (place / "wheels").glob("threestep-*.whl")
    ran(place, [*PIP, "install", "--no-deps", "--no-index", "--target", "site", str(wheel)])
    return source, place / "site"


def ran(folder, command, **variables):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_source_distribution_holds_the_checkout(built):
    missing = [name for name in tracked() if not (built[0] / name).is_file()]
    assert missing == []


def test_the_wheel_holds_the_packages(built):
    of_packages = [name for name in tracked() if name.startswith(("training/", "threestep/"))]
    of_pages = re.compile(r"(?<!README)\.md$|\.png$")
    wanted = [name for name in of_packages if "/tests/" not in name and not of_pages.search(name)]
    assert [name for name in wanted if not (built[1] / name).is_file()] == []
    assert not [*built[1].rglob("test_*.py")]


def test_the_command_is_installed(built, tmp_path):
    (tmp_path / "training.py").write_text("raise SystemExit('the one of the current folder')\n")
    said = ran(tmp_path, [str(built[1] / "bin" / "threestep")], PYTHONPATH=str(built[1]))
    assert all(word in said for word in commands())


def test_the_shortest_program_trains_from_the_wheel(built, tmp_path):
    config = save_start(tmp_path / "start") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 512}))
    (tmp_path / "shortest.py").write_text(SHORTEST + "print(threestep.__file__)\n")
    assert len(SHORTEST.splitlines()) == 5
    said = ran(
        tmp_path, [sys.executable, "shortest.py"], PYTHONPATH=str(built[1]), CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1", HOME=str(tmp_path),
    )  # fmt: skip
    assert said.endswith(f"\n{built[1] / 'threestep' / '__init__.py'}\n")
    assert "'eval_loss_after': " in said
    assert (tmp_path / "runs" / "sft" / "report.html").is_file()
