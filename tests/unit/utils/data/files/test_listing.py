"""Which files of a folder are rows: none that is hidden, and each real file once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.files.listing import PassedOver, find_files


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(address: object, *endings: str) -> tuple[list[str], list[str]]:
    """The names of the files, below the working folder, and the sentences on the others."""
    passed = PassedOver()
    files = find_files(str(address), endings or (".jsonl",), "data_path", passed)
    return [os.path.relpath(file) for file in files], passed.sentences


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


HIDDEN = (
    ".git/keep/rows.jsonl", ".ipynb_checkpoints/rows-checkpoint.jsonl", "__MACOSX/._rows.jsonl", "._rows.jsonl",
    "_temporary/0/part-0.jsonl", "part/.rows.jsonl",
)  # fmt: skip


def test_hidden_files_are_counted_and_not_read(here):
    touch(here / "data", "rows.jsonl", "part/b.jsonl", *HIDDEN, ".git/config", "_SUCCESS", ".DS_Store")
    files, (sentence,) = found("data")
    assert files == ["data/part/b.jsonl", "data/rows.jsonl"]
    assert sentence.startswith("not read: 6 hidden files (._rows.jsonl, .git/keep/rows.jsonl, .ipynb_checkpoints/")
    assert found("data/**/*.jsonl")[0] == files
    assert found("data/", ".parquet", ".jsonl")[0] == files


@pytest.mark.parametrize("folder", [".git/keep", "__MACOSX", "_temporary"])
def test_a_hidden_folder_that_is_named_is_read(here, folder):
    touch(here / "data" / folder, "rows.jsonl")
    assert found(f"data/{folder}") == ([f"data/{folder}/rows.jsonl"], [])
    assert found(f"data/{folder}/*.jsonl") == ([f"data/{folder}/rows.jsonl"], [])
    with pytest.raises(ThreestepError, match="the folder 'data' holds no file that ends in .jsonl, but 1 hidden; name"):
        found("data")


def test_a_hidden_folder_above_the_data_hides_nothing(here):
    touch(here / ".cache" / "_mine" / "data", "rows.jsonl")
    assert found(".cache/_mine/data") == ([".cache/_mine/data/rows.jsonl"], [])
    assert found(here / ".cache/_mine/data/*.jsonl") == ([".cache/_mine/data/rows.jsonl"], [])


def test_links_are_followed_and_a_real_file_is_read_once(here):
    touch(here / "data", "rows.jsonl", "part/b.jsonl")
    touch(here / "far", "c.jsonl", "sub/d.jsonl")
    (here / "data" / "all").symlink_to("part")
    (here / "data" / "again.jsonl").symlink_to("rows.jsonl")
    os.link(here / "data" / "rows.jsonl", here / "data" / "z_same_file.jsonl")
    (here / "data" / "more").symlink_to(here / "far")
    (here / "data" / "sub").symlink_to(here / "far" / "sub")
    files, (sentence,) = found("data")
    assert files == ["data/more/c.jsonl", "data/more/sub/d.jsonl", "data/part/b.jsonl", "data/rows.jsonl"]
    assert sentence.startswith("read once: 4 links (again.jsonl, all, sub, ...) to what is read under another name")
    assert len(found("data/**/*.jsonl")[0]) == 4


def test_links_in_a_circle_end(here):
    touch(here / "data", "rows.jsonl", "part/b.jsonl")
    touch(here, "beside.jsonl")
    for name, target in (("loop", "."), ("part/up", ".."), ("out", "..")):
        (here / "data" / name).symlink_to(target)
    files, (sentence,) = found("data")
    assert files == ["data/part/b.jsonl", "data/rows.jsonl"] and sentence.startswith("read once: 3 links (loop, out, ")
    assert found("data/part/**/*.jsonl")[0] == ["data/part/b.jsonl"]
    assert found("**/rows.jsonl")[0] == ["data/rows.jsonl"]


def test_a_visible_link_into_a_hidden_folder_is_read(here):
    """As git-annex, DVC and the hub's cache store files."""
    touch(here / "data", ".store/1.jsonl", ".store/folder/2.jsonl")
    (here / "data" / "rows.jsonl").symlink_to(".store/1.jsonl")
    (here / "data" / "part").symlink_to(".store/folder")
    assert found("data")[0] == ["data/part/2.jsonl", "data/rows.jsonl"]


def test_a_snapshot_of_the_hubs_cache(here):
    cache = here / "datasets--a--b"
    touch(cache, "blobs/1", "blobs/2", "blobs/3")
    for commit, rows in (("c1", "1"), ("c2", "2")):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "train.jsonl").symlink_to(f"../../blobs/{rows}")
        (cache / "snapshots" / commit / "test.jsonl").symlink_to("../../blobs/3")
    files = [f"datasets--a--b/snapshots/c2/{name}.jsonl" for name in ("test", "train")]
    assert found("datasets--a--b/snapshots/c2") == (files, [])
    with pytest.raises(ThreestepError, match="holds 2 versions of a dataset; name one, as in '.*snapshots/c1'"):
        found("datasets--a--b")


def test_a_delta_table_is_refused(here):
    touch(here / "data", "_delta_log/0.json", "part-0.parquet")
    with pytest.raises(ThreestepError, match="'data' is a Delta table, whose files also hold rows that were replaced"):
        found("data", ".parquet")


def test_a_link_to_nothing_is_named(here):
    touch(here / "data", "rows.jsonl")
    (here / "data" / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(ThreestepError, match="'data/gone.jsonl' is a link to '.*nowhere', which is not there; fetch"):
        found("data")


def test_a_pipe_is_no_file_of_rows(here):
    touch(here / "data", "rows.jsonl")
    os.mkfifo(here / "data" / "pipe.jsonl")
    assert found("data")[0] == ["data/rows.jsonl"]
