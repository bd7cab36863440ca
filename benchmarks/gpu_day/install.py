"""Installs the packed wheels beside the torch that is there, without a network, and checks that all of it is imported.

    python carried/install.py [--target DIR]

Runs with the Python that holds torch and needs pip alone: it travels with the wheels, and imports nothing else.
--target DIR: into that folder, which then has to be on PYTHONPATH, instead of into the environment itself.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# What the measurements import; in brackets what they do without.
NEEDED = ("torch", "numpy", "yaml", "pyarrow", "safetensors", "tokenizers", "transformers", "peft", "accelerate",
          "deepspeed")  # fmt: skip
OPTIONAL = ("datasets", "pandas", "tensorboard", "matplotlib", "pytest")


def main() -> int:
    """Install, import, print what is where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        wheels = []
        for packed in sorted((Path(__file__).parent / "wheels").glob("*.whl.xz")):
            wheel = Path(place, packed.stem)
            with lzma.open(packed) as source, wheel.open("wb") as target:
                shutil.copyfileobj(source, target)
            wheels.append(str(wheel))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
        ]
        if arguments.target:
            pip += ["--upgrade", "--target", str(arguments.target)]
            sys.path.insert(0, str(arguments.target))
        done = subprocess.run([*pip, *wheels], check=False)
    if done.returncode:
        return done.returncode
    importlib.invalidate_caches()
    print(f"Python {sys.version.split()[0]}, {len(wheels)} wheels installed")
    failed = [name for name in NEEDED if not _imported(name)]
    for name in OPTIONAL:
        print(f"{name}: {'there' if importlib.util.find_spec(name) else 'not there'}")
    if failed:
        print(f"error: cannot import {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _imported(name: str) -> bool:
    try:
        module = importlib.import_module(name)
    except Exception as problem:  # noqa: BLE001 - whatever a package raises as it is imported
        print(f"{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
        return False
    print(f"{name} {getattr(module, '__version__', '')}: {Path(module.__file__ or '').parent}")
    return True


if __name__ == "__main__":
    sys.exit(main())
