"""Built once, published whole, found by content; whatever stands in the way of that is found out."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.unit.utils.data.conftest import cut_short, flip_a_byte
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import TextBlock
from training.utils.data.cache import cache
from training.utils.data.cache.cache import open_or_build
from training.utils.data.rows.dataset import write_rows

PARTS = {"datasets": "a", "seed": "1", "length": "2"}


def blocks(count=3):
    def build(folder):
        rows = (TextBlock(row, np.array([row, row], np.int32)) for row in range(count))
        return {"splits": {"train": asdict(write_rows(os.path.join(folder, "train.arrow"), TextBlock, rows))}}

    return build


@pytest.fixture
def ask(tmp_path):
    """Ask for a folder; returns (opened folder, lines logged)."""

    def call(parts=None, build=None, rebuild=False):
        log: list[str] = []
        parts = PARTS if parts is None else parts
        return open_or_build(str(tmp_path), "phase1", parts, build or blocks(), rebuild=rebuild, log=log.append), log

    return call


def never(folder):
    raise AssertionError("built although the cache has it")


def test_the_second_run_resumes_by_a_manifest_in_clear(ask):
    first, log = ask()
    assert not first.resumed and any("step 1 rows tokenized in" in line for line in log)
    second, log = ask(build=never)
    assert second.resumed and len(log) == 1 and "step 1 rows read from the cache in" in log[0]
    assert second.path == first.path and [row.input_ids[0] for row in second.splits["train"]] == [0, 1, 2]
    assert sorted(os.listdir(first.path)) == ["manifest.json", "train.arrow"]
    manifest = json.loads(Path(first.path, "manifest.json").read_text())
    assert manifest["parts"]["seed"] == "1" and manifest["parts"]["cache format"] == "4"
    train = manifest["splits"]["train"]
    assert (train["rows"], train["tokens"], len(train["sha256"])) == (3, 6, 64)
    assert first.splits["train"].manifest["fingerprint"] == manifest["fingerprint"]


def test_the_log_says_which_part_changed(ask):
    ask()
    _, log = ask({**PARTS, "seed": "2"})
    assert "tokenizing step 1 rows: changed since the last build: seed" in log[-2] and "length" not in log[-2]
    assert "changed" not in log[-1]  # said once
    _, log = ask({**PARTS, "seed": "2", "length": "3"})
    assert "changed since the last build: length" in log[-2]  # against the nearest, which has seed 2
    _, log = ask({**PARTS, "datasets": "b"})
    assert "not cached yet" in log[-2]
    assert ask(build=never)[0].resumed  # going back finds the first one


def of_other_data(path):
    path.write_text(path.read_text().replace('"seed": "1"', '"seed": "2"'))


@pytest.mark.parametrize(
    ("name", "harm", "fragment"),
    [
        ("train.arrow", cut_short, "bytes, expected"),
        ("train.arrow", flip_a_byte, "does not match the checksum"),
        ("train.arrow", os.remove, "does not open"),
        ("manifest.json", os.remove, "no readable manifest"),
        ("manifest.json", cut_short, "no readable manifest"),
        ("manifest.json", lambda path: path.write_text("[]"), "no readable manifest"),
        ("manifest.json", of_other_data, "belongs to other data"),
    ],
)
def test_a_damaged_folder_is_found_out_and_built_again(ask, name, harm, fragment):
    folder, _ = ask()
    harm(Path(folder.path, name))
    again, log = ask()
    assert not again.resumed and any("was damaged" in line and fragment in line for line in log), log
    assert len(again.splits["train"]) == 3
    assert ask(build=never)[0].resumed
    assert not [entry for entry in os.listdir(Path(folder.path).parent) if ".old" in entry or ".building" in entry]


def test_a_byte_flipped_anywhere_in_the_manifest_is_found_out(ask):
    folder, _ = ask()
    path = Path(folder.path, "manifest.json")
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            cache._open(folder.path, json.loads(content)["fingerprint"])
        except cache.Damaged:
            continue
        # A blank between two values may be another one, and a number's last digit may say the same.
        assert json.loads(path.read_bytes()) == json.loads(content)


@pytest.mark.parametrize("earlier", [False, True], ids=["", "of_an_earlier_version"])
def test_a_bit_that_flips_in_a_large_file_is_found_and_the_file_built_again(ask, earlier):
    """20 MB; an earlier version compared up to 16, and wrote no quick checksum."""

    def large(folder):
        rows = (TextBlock(row, np.full(2**20, row, np.int32)) for row in range(5))
        written = asdict(write_rows(os.path.join(folder, "train.arrow"), TextBlock, rows))
        if earlier:
            written.pop("xxh3")
        return {"splits": {"train": written}}

    folder, _ = ask(build=large)
    path = Path(folder.path, "train.arrow")
    assert path.stat().st_size > 20 * 2**20 and ask(build=never)[0].resumed
    state = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    again, log = ask(build=large)
    assert not again.resumed and "was damaged: train.arrow does not match the checksum in its manifest" in log[-2]
    assert again.splits["train"][2].input_ids.tolist() == [2] * 2**20 and ask(build=never)[0].resumed


def test_a_file_without_its_end_does_not_open(ask, monkeypatch):
    monkeypatch.setattr(cache, "damage_of", lambda *_: None)
    folder, _ = ask()
    path = Path(folder.path, "train.arrow")
    path.write_bytes(path.read_bytes()[:-20] + b"\0" * 20)  # the same size, no footer
    again, log = ask()
    assert not again.resumed and "does not open" in log[-2]


def test_rebuild_builds_what_is_there(ask):
    first, _ = ask()
    again, log = ask(build=blocks(5), rebuild=True)
    assert not again.resumed and "--rebuild_cache is set" in log[-2] and len(again.splits["train"]) == 5
    assert len(ask(build=never)[0].splits["train"]) == 5
    assert [row.input_ids[0] for row in first.splits["train"]] == [0, 1, 2]  # rows that are read stay readable


def test_a_build_that_fails_leaves_nothing(ask, tmp_path):
    def fails(folder):
        blocks()(folder)
        raise ThreestepError("a wrong row")

    with pytest.raises(ThreestepError, match="a wrong row"):
        ask(build=fails)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []
    assert not ask()[0].resumed


def test_a_folder_that_may_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ThreestepError, match="--data_output_path: the folder .* cannot be created or written to"):
        open_or_build(str(tmp_path / "file" / "cache"), "phase1", PARTS, blocks(), rebuild=False, log=print)


@pytest.fixture
def nobody():
    """Permissions do not bind root: be somebody else for a while."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.fixture
def open_folder():
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_folder_that_may_not_be_written(open_folder, request):
    os.chmod(open_folder, 0o555)
    request.getfixturevalue("nobody")
    with pytest.raises(ThreestepError) as mistake:
        open_or_build(str(open_folder), "phase1", PARTS, blocks(), rebuild=False, log=print)
    assert str(mistake.value) == (
        f"--data_output_path: the folder '{open_folder}' is not writable (Permission denied); use one that is"
    )
    assert os.listdir(open_folder) == []


def test_what_is_there_needs_no_permission_to_write(open_folder, request):
    open_or_build(str(open_folder), "phase1", PARTS, blocks(), rebuild=False, log=print)
    os.chmod(open_folder, 0o555)
    request.getfixturevalue("nobody")
    assert open_or_build(str(open_folder), "phase1", PARTS, never, rebuild=False, log=print).resumed


def test_this_process_began_before_its_imports_and_not_long_ago():
    began = cache._process_started_at()
    assert cache._IMPORTED_AT - 3600 < began <= cache._IMPORTED_AT + 0.1
