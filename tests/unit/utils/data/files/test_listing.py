"""Where files of rows lie, local and remote: none that is hidden, each real file once, some held out by name."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import fsspec
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.files.content import content_of_files, open_local, open_stream
from training.utils.data.files.listing import PassedOver, check_address, find_files
from training.utils.data.files.readers import share_files


def touch(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return [str(folder / name) for name in names]


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
    with pytest.raises(
        ThreestepError, match="the folder 'data' contains no file ending in .jsonl, except 1 hidden; name"
    ):
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
    assert sentence.startswith(
        "read once: 4 links (again.jsonl, all, sub, ...) to files that are read under another name"
    )
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
    with pytest.raises(ThreestepError, match="holds 2 versions of a dataset; pass one, such as '.*snapshots/c1'"):
        found("datasets--a--b")


def test_what_is_refused_and_a_pipe_that_is_passed_over(here):
    touch(here / "table", "_delta_log/0.json", "part-0.parquet")
    with pytest.raises(ThreestepError, match="'table' is a Delta table, whose files also hold rows that were replaced"):
        found("table", ".parquet")
    touch(here / "data", "rows.jsonl")
    os.mkfifo(here / "data" / "pipe.jsonl")
    assert found("data")[0] == ["data/rows.jsonl"]
    (here / "data" / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(ThreestepError, match="'data/gone.jsonl' is a link to '.*nowhere', which does not exist; fetch"):
        found("data")
    with pytest.raises(ThreestepError, match="jsonl_flag: the folder '.*' contains no file ending in .csv or .tsv"):
        find_files(str(here / "data"), [".csv", ".tsv"], "jsonl_flag")


@pytest.fixture
def memory():
    """fsspec's file system in memory, which stands for S3 and its like."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_a_file_a_pattern_and_a_folder(tmp_path):
    b, a, gz, _, bracket = touch(tmp_path, "b.csv", "sub/a.csv", "c.csv.gz", "notes.txt", "rows[1].tsv")
    assert find_files(b, [".csv"], "data_path") == [b]
    assert find_files(str(tmp_path / "*.csv"), [".csv"], "data_path") == [b]
    assert find_files(str(tmp_path), [".csv"], "data_path") == [b, gz, a]
    assert find_files(bracket, [".csv"], "data_path") == [bracket]  # a file, where there is one, and no pattern


def test_what_datasets_writes_beside_rows_is_no_data(tmp_path):
    rows, result = touch(tmp_path, "data-0.arrow", "cache-1.arrow")
    beside, _, _ = touch(tmp_path, "cache-rows.json", "dataset_info.json", "state.json")
    assert find_files(str(tmp_path), [".arrow"], "data_path") == [rows]
    assert find_files(str(tmp_path), [".json"], "data_path") == [beside]
    assert find_files(str(tmp_path / "*.arrow"), [".arrow"], "data_path") == [result, rows]  # named


@pytest.mark.parametrize(
    ("address", "fragment"),
    [
        ("missing.csv", "data_path: 'missing.csv' does not exist; the current folder is '"),
        ("missing-*.csv", "data_path: 'missing-*.csv' matches no file"),
    ],
)
def test_an_address_that_names_nothing(tmp_path, monkeypatch, address, fragment):
    monkeypatch.chdir(tmp_path)
    for look in (check_address, lambda address, flag: find_files(address, [".csv"], flag)):
        with pytest.raises(ThreestepError) as caught:
            look(address, "data_path")
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        (["train.csv", "test.csv"], ["test.csv"]),
        (["train-0.csv", "train-1.csv", "validation-0.csv", "test.csv"], ["test.csv", "validation-0.csv"]),
        (["train/data-0.arrow", "validation/data-0.arrow"], ["validation/data-0.arrow"]),
        (["train/test-like.csv", "test/rows.csv"], ["test/rows.csv"]),
        (["train.csv", "evaluation_of_models.csv"], []),  # no part of the name is "eval" alone
        (["test.csv", "more.csv"], []),  # nothing is for training by its name
        (["a.csv", "b.csv"], []),
        (["train.csv", "other.csv", "dev.csv"], ["dev.csv"]),
    ],
)
def test_evaluation_files_by_their_names(tmp_path, names, held_out):
    files = sorted(touch(tmp_path / "train" / "mine", *names))
    train, found = share_files(files)
    assert [Path(name).relative_to(tmp_path / "train" / "mine").as_posix() for name in found] == sorted(held_out)
    assert sorted(train + found) == files


def test_hidden_files_of_a_store_are_not_read(memory):
    names = ("data/a.csv", "data/.git/b.csv", "data/_temporary/c.csv", "data/.d.csv")
    memory.pipe(dict.fromkeys((f"/bucket/{name}" for name in names), b"1"))
    for address in ("memory://bucket/data", "memory://bucket/data/**/*.csv"):
        passed = PassedOver()
        assert find_files(address, [".csv"], "data_path", passed) == ["memory:///bucket/data/a.csv"]
        assert passed.sentences[0].startswith("not read: 3 hidden files (.d.csv, .git/b.csv, _temporary/c.csv)")
    assert find_files("memory://bucket/data/.git", [".csv"], "data_path") == ["memory:///bucket/data/.git/b.csv"]


def test_remote_addresses(memory):
    memory.pipe({"/bucket/train.csv": b"1", "/bucket/test.csv": b"2", "/bucket/x.txt": b"3"})
    assert find_files("memory://bucket/x.txt", [".csv"], "data_path") == ["memory:///bucket/x.txt"]
    files = find_files("memory://bucket", [".csv"], "data_path")
    assert files == find_files("memory://bucket/*.csv", [".csv"], "data_path")
    assert share_files(files) == (["memory:///bucket/train.csv"], ["memory:///bucket/test.csv"])
    with open_local(files[1], None) as file:
        assert file.read() == b"1"


@pytest.mark.parametrize(
    ("address", "fragment"),
    [
        ("memory://bucket/none.csv", "data_path: 'memory://bucket/none.csv' matches no file"),
        ("memory://bucket/*.parquet", "matches no file"),
        ("memory://bucket", "the folder 'memory://bucket' contains no file ending in .parquet"),
        ("teleport://bucket/a", "'teleport://bucket/a' could not be read: ValueError: Protocol not known"),
        ("s3://b/a.csv", "'s3://b/a.csv' could not be read: ImportError"),
    ],
)
def test_mistakes_in_remote_addresses(memory, monkeypatch, address, fragment):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # not installed
    memory.pipe("/bucket/a.csv", b"1")
    with pytest.raises(ThreestepError) as caught:
        find_files(address, [".parquet"], "data_path")
    assert fragment in str(caught.value)


def test_compressed_files_are_read_as_what_they_hold(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    with open_local(str(path), str(tmp_path / "spool")) as file:
        assert file.readlines() == [b"one\n", b"two\n"]
    assert list((tmp_path / "spool").iterdir()) == []  # the copy has no name that could be left behind
    with open_stream(str(path)) as file:
        assert file.read() == b"one\ntwo\n"


def test_a_damaged_compressed_file(tmp_path):
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"some text that is long enough " * 100)[:60])
    with pytest.raises(ThreestepError, match="'.*rows.csv.gz' could not be read: EOFError.*check the address"):
        open_local(str(path), None)
    with pytest.raises(ThreestepError, match="could not be read: EOFError"), open_stream(str(path)) as file:
        file.read()


def test_the_content_of_files_changes_with_them(tmp_path, memory):
    first, second = touch(tmp_path, "a", "b")
    assert content_of_files([first], None) != content_of_files([second], None)
    assert content_of_files([first, second], None) != content_of_files([second, first], None)
    (tmp_path / "moved").write_text("a")
    assert content_of_files([first], None) == content_of_files([str(tmp_path / "moved")], None)

    memory.pipe("/a.csv", b"12")
    before = content_of_files(["memory:///a.csv"], None)
    assert content_of_files(["memory:///a.csv"], None) == before
    memory.pipe("/a.csv", b"123")
    assert content_of_files(["memory:///a.csv"], None) != before
