"""Datasets on the hub that nobody registered: addresses, splits, commits, and one sentence for each failure. The hub
is replaced where its client is called; rows are loaded from folders by `datasets` itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from tests.support.data_flags import data_flags
from threestep.plugins.hub_datasets import hub_rows
from threestep.plugins.hub_datasets.hub_rows import HubAddress, HubRows, parse_hub_address
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.file_dataset import look_at_data
from training.utils.data.registry import find_dataset

ONE, TWO = "1" * 40, "2" * 40
REFUSED = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with the dataset own/rows: `splits` by name, at `commit`; `asked` are the calls that loaded it."""
    fake = SimpleNamespace(splits={}, commit=ONE, asked=[], revisions=[])

    def dataset_info(self, name, revision=None, timeout=None):
        assert name == "own/rows" and timeout
        fake.revisions.append(revision)
        return SimpleNamespace(sha=fake.commit)

    load_folder = datasets.load_dataset

    def load_dataset(name, config, revision=None):
        fake.asked.append((name, config, revision))
        folder = tmp_path / f"hub{len(fake.asked)}"
        folder.mkdir()
        for split, rows in fake.splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {split: str(folder / f"{split}.jsonl") for split in fake.splits}
        return load_folder("json", data_files=files, cache_dir=str(tmp_path / "loaded"))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return fake


def rows_of(count: int, word: str = "Yes") -> list[dict]:
    return [{"question": f"Is {i} a number?", "answer": f"{word}, {i} is."} for i in range(count)]


@pytest.mark.parametrize(
    ("address", "read"),
    [
        ("own/rows", HubAddress("own/rows")),
        ("own/rows,config=main", HubAddress("own/rows", "main")),
        ("o-w.n/r_1,revision=v1.0,split=train", HubAddress("o-w.n/r_1", None, "train", None, "v1.0")),
        ("own/rows,config=a,b,split=s,eval_split=t", HubAddress("own/rows", "a,b", "s", "t")),
    ],
)
def test_settings_stand_behind_commas(address, read):
    assert parse_hub_address(address, "data_path") == read


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hub:rows", "expected hub:OWNER/NAME[,config=...][,split=...][,eval_split=...][,revision=...], got 'rows'"),
        ("hub:own/rows?split=train", "got 'own/rows?split=train' as the name"),
        ("hub:own/rows,splits=train", "expected config, split, eval_split, revision after the name, got 'splits'; di"),
        ("hub:own/rows,split=", "expected one value for split, got none"),
        ("hub:own/rows,split=a,split=b", "expected one value for split, got two"),
        ("hub:own/rows,eval_split=b", "eval_split also needs a split to train on; add split=NAME"),
        ("own/rows", "a hub dataset as hub:OWNER/NAME"),
    ],
)
def test_addresses_that_cannot_be_right(address, message):
    with pytest.raises(ThreestepError) as mistake:
        find_dataset(address)
    assert message in str(mistake.value) and str(mistake.value).startswith("--data_path: ")


def test_rows_are_read_at_the_commit_of_the_revision_and_split_as_a_folder_of_files(hub):
    hub.splits = {"train": rows_of(3), "validation": rows_of(2), "test": rows_of(1), "extra": rows_of(9)}
    found = HubRows("own/rows,config=main,revision=v2", "data_path")
    assert hub.revisions == ["v2"] and hub.asked == []  # nothing is downloaded before rows are opened
    train, held_out = found.open()
    assert hub.asked == [("hf://datasets/own/rows", "main", ONE)]
    assert len(train) == 3 and held_out is not None and len(held_out) == 2 + 1
    assert train[2] == rows_of(3)[2] and train[2].where == "hub:own/rows,config=main,revision=v2 (train), row 2"


@pytest.mark.parametrize(
    ("splits", "settings", "training", "evaluation"),
    [
        (["train", "train_extra", "dev"], "", 1, 3),
        (["train_sft", "test_sft"], "", 1, 2),
        (["everything"], "", 1, None),
        (["train", "test"], ",split=test", 2, None),
        (["train_sft", "train_gen", "test_gen"], ",split=train_gen,eval_split=test_gen", 2, 3),
    ],
)
def test_which_splits_are_which(hub, splits, settings, training, evaluation):
    hub.splits = {name: rows_of(1 + place) for place, name in enumerate(splits)}
    train, held_out = HubRows(f"own/rows{settings}", "data_path").open()
    assert (len(train), held_out and len(held_out)) == (training, evaluation)


@pytest.mark.parametrize(
    ("splits", "settings", "message"),
    [
        (["train_sft", "train_gen"], "", "its splits are train_sft, train_gen; name the training split, as in"),
        (["first", "second"], "", "name the training split, as in hub:own/rows,split=first"),
        (["train"], ",split=trian", "its splits are train; split expects one of them, got 'trian'; did you mean 'trai"),
        (["train"], ",split=train,eval_split=test", "eval_split expects one of them, got 'test'"),
    ],
)
def test_splits_that_do_not_decide(hub, splits, settings, message):
    hub.splits = {name: rows_of(1) for name in splits}
    with pytest.raises(ThreestepError) as mistake:
        HubRows(f"own/rows{settings}", "data_path").open()
    assert message in str(mistake.value)


def test_a_build_depends_on_the_commit_and_reads_the_format_as_of_a_file(hub, tmp_path, tiny_tokenizer):
    hub.splits = {"train": rows_of(4)}
    given = {"data_path": ["hub:own/rows"], "data_output_path": str(tmp_path / "cache")}
    data = data_flags(data_split="1,0,0", eval_fraction=0.25, **given)

    def learnt() -> list[str]:
        rows = build_phase(1, data, tiny_tokenizer, seed=1).train
        return [tiny_tokenizer.decode(row.input_ids[row.loss_mask]) for row in rows]

    first = learnt()
    assert len(first) == 3 and all(text.startswith(" Yes, ") for text in first)
    hub.splits = {"train": rows_of(4, "No")}
    assert learnt() == first and len(hub.asked) == 1  # the same commit: from the cache, nothing is loaded
    hub.commit = TWO
    assert all(text.startswith(" No, ") for text in learnt())


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (OSError("Name or service not known"), "the hub could not be reached (OSError: Name or service not known); ch"),
        (RevisionNotFoundError("404", response=REFUSED), "the dataset has no revision 'v2'; name a branch, a tag or a"),
        (RepositoryNotFoundError("404", response=REFUSED), "the hub has no dataset of this name that you can read"),
        (
            GatedRepoError("403", response=REFUSED),
            "request it at https://huggingface.co/datasets/own/rows, then log in",
        ),
    ],
)
def test_a_hub_that_does_not_answer_is_one_sentence(hub, monkeypatch, problem, message):
    def fail(self, *names, **settings):
        raise problem

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(ThreestepError) as mistake:
        HubRows("own/rows,revision=v2", "data_path")
    assert message in str(mistake.value) and "\n" not in str(mistake.value)


def test_a_configuration_that_is_missing_is_named_with_the_choices(hub, monkeypatch):
    def fail(*names, **settings):
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ThreestepError, match=r"configs: \['main', 'socratic'\]; name a configuration, as in hub:own/row"
    ):
        HubRows("own/rows", "data_path").open()


@pytest.fixture
def cached(hub, monkeypatch, tmp_path):
    """HF_HUB_OFFLINE, and the cache of `datasets` as an earlier download of own/rows at commit TWO left it."""
    hub.splits = {"train": rows_of(2)}
    loaded = datasets.load_dataset("own/rows", None)["train"]
    folder = tmp_path / "cache_of_datasets" / "own___rows" / "default" / "0.0.0" / TWO
    loaded.save_to_disk(str(tmp_path / "saved"))
    folder.mkdir(parents=True)
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(folder / "rows-train.arrow")
    split = {"name": "train", "num_bytes": 1, "num_examples": 2, "dataset_name": "rows"}
    info = {"features": loaded.features.to_dict(), "splits": {"train": split}, "config_name": "default",
            "dataset_name": "rows", "builder_name": "json", "version": "0.0.0"}  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.undo()  # the real `load_dataset` again
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder.parents[3]))


def test_offline_the_cached_commit_is_read(cached, capsys):
    found = HubRows("own/rows", "data_path")
    assert found.commit == TWO and TWO in found.fingerprint()
    assert f"hub:own/rows is at commit {TWO} (cached; HF_HUB_OFFLINE is set)" in capsys.readouterr().out
    train, held_out = found.open()
    assert train[1] == rows_of(2)[1] and held_out is None


def test_offline_another_revision_or_nothing_cached_is_one_sentence(cached):
    with pytest.raises(
        ThreestepError, match=f"at commit {TWO}, which is not known to be revision {ONE}; remove revision"
    ):
        HubRows(f"own/rows,revision={ONE}", "data_path")
    with pytest.raises(ThreestepError, match="could not be loaded: .*; HF_HUB_OFFLINE is set: unset it, or download"):
        HubRows("own/others", "data_path")


def test_a_cached_copy_of_another_commit_does_not_stand_in(cached, hub, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, *a, **k: SimpleNamespace(sha=ONE))
    with pytest.raises(
        ThreestepError, match=f"the hub became unreachable, and the cached copy is at commit {TWO}, not {ONE}"
    ):
        HubRows("own/rows", "data_path").open()


def test_the_hub_is_asked_before_anything_loads(monkeypatch):
    asked = []
    monkeypatch.setattr(hub_rows, "check_hub", lambda *words: asked.append(words))
    look_at_data(1, data_flags(data_path=["hub:openai/gsm8k,config=main"]).source)
    assert asked == [("--data_path: 'hub:openai/gsm8k,config=main'", "datasets", "openai/gsm8k")]
