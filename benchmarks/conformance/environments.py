"""The environments of the trainers, made from the registry: for this table and for
threestep/plugins/audit/tests/other_trainers.

    python -m benchmarks.conformance.environments NAME ... [--folder runs/conformance_venvs] [--torch_from PYTHON]

NAME: one of those below. Needs nothing but Python, 3.11 for the old releases. torch==2.13.0 goes in first, since a bare
torch pulls gigabytes of CUDA; with --torch_from, the torch of that Python is linked instead of installed again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "runs/conformance_venvs"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """needs: what pip resolves. alone: installed without dependencies. removed: uninstalled again."""

    needs: Sequence[str]
    alone: Sequence[str] = ()
    removed: Sequence[str] = ()
    stubs: Sequence[str] = field(default_factory=tuple)


FUNCTIONS = (
    "ray[default]==2.55.0 tensordict==0.10.0 transformers==5.10.4 deepspeed==0.19.6 codetiming hydra-core torchdata "
    "loralib optimum optree pylatexenc peft datasets accelerate colorlog aiofiles uvloop tenacity cachetools "
    "werkzeug lark pillow"
).split()
ENVIRONMENTS = {
    "trl116": Environment(["trl==1.16.0", "peft"]),
    "trl024": Environment(["trl==0.24.0", "transformers==4.57.6"]),
    "trl016": Environment(["trl==0.16.0", "transformers==4.50.3", "rich"]),
    "trl013": Environment(["trl==0.13.0", "transformers==4.47.1", "rich", "numpy<2.3", "accelerate<1.4"]),
    "trl012": Environment(["trl==0.12.0", "transformers==4.46.0", "rich", "numpy<2.3", "accelerate<1.4"]),
    # Its torchvision and torchaudio are built for other torches, and it asks for torchaudio's name alone.
    "llamafactory": Environment(["llamafactory==0.9.5"], removed=["torchvision", "torchaudio"], stubs=["torchaudio"]),
    "axolotl": Environment(["axolotl==0.19.0"]),
    # Functions alone: the three packages pin releases that exclude each other, and whole they need CUDA.
    "verl": Environment(FUNCTIONS, alone=["verl==0.9.1", "openrlhf==0.11.2", "areal==1.0.4"]),
}


def main(argv: Sequence[str]) -> None:
    """Make those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, default=Path(FOLDER))
    parser.add_argument("--torch_from", metavar="PYTHON", help="a Python whose torch is linked")
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        print(f"{name} ...", flush=True)
        make(ENVIRONMENTS[name], arguments.folder.absolute() / name, arguments.torch_from)


def make(environment: Environment, folder: Path, torch_from: str | None = None) -> None:
    """Make one; a folder whose `ready` exists is left as it is."""
    if (folder / "ready").exists():
        return
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    if torch_from:
        _link_torch(folder, torch_from)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", TORCH], check=True)
    subprocess.run([*pip, "install", "-q", TORCH, *environment.needs], check=True)
    if environment.alone:
        subprocess.run([*pip, "install", "-q", "--no-deps", *environment.alone], check=True)
    if environment.removed:
        subprocess.run([*pip, "uninstall", "-q", "-y", *environment.removed], check=True)
    for stub in environment.stubs:
        (_site(python) / f"{stub}.py").write_text('"""Nothing: its name is imported and no more."""\n')
    (folder / "ready").touch()


def _link_torch(folder: Path, torch_from: str) -> None:
    """Link the packages of torch into a folder beside, so that pip sees them and does not remove them."""
    site, beside = _site(torch_from), folder / "torch"
    beside.mkdir()
    for name in ("torch", "torchgen", "functorch", *(path.name for path in site.glob("torch-*.dist-info"))):
        if (site / name).exists():
            (beside / name).symlink_to(site / name)
    (_site(str(folder / "bin" / "python")) / "torch.pth").write_text(f"{beside}\n")


def _site(python: str) -> Path:
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    main(sys.argv[1:])
