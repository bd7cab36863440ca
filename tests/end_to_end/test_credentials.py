"""A run whose data has credentials in its address: they are in nothing that it prints or leaves, and it goes on without
them in its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Ran, run_step, save_start
from training.utils.base.credentials import ADDRESSES_VARIABLE

PASSWORD, SIGNATURE, NEW_SIGNATURE = "Pa55w0rd-of-mine", "0123456789abcdef0123456789abcdef", "fedcba9876543210" * 2
ENVIRONMENT = {
    "HUGGING_FACE_HUB_TOKEN": "hf_planted_here",
    "WANDB_API_KEY": "0f1e2d3c4b5a" * 3,
    "MY_PASSWORD": "planted!!",
}
SECRETS = (PASSWORD, SIGNATURE, NEW_SIGNATURE, *ENVIRONMENT.values())
# A store whose addresses have credentials, and which repeats them in what it reports and in its errors.
VAULT = """
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem


class Vault(LocalFileSystem):
    protocol = "vault"

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def unstrip_protocol(self, name):
        return name

    def _place(self, path):
        return "/" + path.split("@host/")[1].partition("?")[0]

    def exists(self, path, **given):
        return True

    def isdir(self, path):
        return False

    def glob(self, path, **given):
        return [path]

    def info(self, path, **given):
        if "lost" in path:
            raise PermissionError(f"403 Forbidden, {path}, password Pa55w0rd-of-mine")
        return {**super().info(self._place(path)), "name": path, "url": path}

    def _open(self, path, mode="rb", **given):
        return open(self._place(path), mode)


register_implementation("vault", Vault, clobber=True)
"""


def left_by(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def clean(ran: Ran, *folders: Path) -> None:
    """No secret is in what a program said, nor in the names and contents of what it left."""
    for secret in SECRETS:
        assert secret not in ran.stdout + ran.stderr, secret
        for folder in folders:
            assert secret.encode() not in left_by(folder), secret
            assert not [path for path in folder.rglob(f"*{secret}*")]


@pytest.mark.timeout(600)
def test_no_credentials_are_left_and_the_run_goes_on(place, pairs_file):
    folder = place / "credentials"
    folder.mkdir()
    (folder / "vault.py").write_text(VAULT)
    start, runs, cache = save_start(folder / "start"), folder / "runs", folder / "cache"

    def address(signature: str, path: object = pairs_file) -> str:
        return f"jsonl:vault://me:{PASSWORD}@host{path}?X-Amz-Signature={signature}"

    flags = [
        "--dataset_module", folder / "vault.py", "--data_output_path", cache, "--per_device_train_batch_size", 2,
        "--max_seq_len", 100, "--save_every", 1, "--model_name_or_path", start, "--output_dir", runs,
    ]  # fmt: skip
    lost = run_step(1, [*flags, "--data_path", address(SIGNATURE, "/lost.jsonl")], environment=ENVIRONMENT)
    assert lost.code == 2 and "PermissionError" in lost.stderr and "vault://***@host/lost.jsonl" in lost.stderr, (
        lost.words
    )
    clean(lost)

    ran = run_step(1, [*flags, "--data_path", address(SIGNATURE), "--max_train_steps", 2], environment=ENVIRONMENT)
    assert ran.code == 0, ran.words
    clean(ran, runs, cache)
    assert "vault://***@host" in (runs / "config.yaml").read_text()
    assert (runs / "model" / "README.md").exists() and (runs / "report.html").exists()

    again = ["--config", runs / "config.yaml", "--resume"]
    refused = run_step(1, again, environment=ENVIRONMENT)
    assert refused.code == 2 and "--data_path: the credentials in 'jsonl:vault://***@host" in refused.stderr, (
        refused.words
    )
    given = {**ENVIRONMENT, ADDRESSES_VARIABLE: address(NEW_SIGNATURE)}
    resumed = run_step(1, [*again, "--max_train_steps", 2, "--report", "false"], environment=given)
    assert resumed.code == 0, resumed.words
    assert "read from the cache" in resumed.stdout, resumed.words  # a new signature is no new file
    clean(resumed, runs, cache)
