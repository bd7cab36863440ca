"""Reading the reference: the right numbers for the right responses, once; kept by content, whole or not at all."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.subjects import true_logprobs
from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import join
from training.utils.contracts.rows import ResponsesRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings
from training.utils.models.token_model import PolicyModel
from training.utils.preference.batches import preference_batches
from training.utils.preference.reference import (
    ReferenceFile,
    RowLogprobs,
    adapter_off_references,
    known_references,
    read_rows,
    reference_file,
    taken_rows,
)
from training.utils.run.metrics import MetricsWriter
from training.utils.setup.training_run import LoopSettings, TrainingRun


class OneRank:
    """An engine of one rank, in all that reading asks of one; counts the rows it reads."""

    ranks = Ranks(0, 0, 1, torch.device("cpu"))

    def __init__(self, model) -> None:
        self.model = PolicyModel(model)
        self.sequences = 0

    def eval(self) -> None:
        self.model.eval()

    def __call__(self, rows):
        assert not self.model.training and not torch.is_grad_enabled()
        self.sequences += rows.end_B.numel()
        return self.model(rows)


def made(count: int, seed: int) -> list[ResponsesRow]:
    random = np.random.default_rng(seed)

    def ids(most: int) -> np.ndarray:
        return random.integers(3, 64, random.integers(1, most + 1)).astype(np.int32)

    return [ResponsesRow(i, ids(6), tuple(ids(7) for _ in range(2 + (i % 3 == 1)))) for i in range(count)]


def plan(packed: bool) -> PlanSettings:
    return PlanSettings(
        ranks=1, max_tokens_per_micro_batch=64, max_rows_per_micro_batch=3, packed=packed, max_row_tokens=32
    )


def settings(packed: bool = True, steps: int = 2, per_step: int = 3, seed: int = 7) -> LoopSettings:
    return LoopSettings(steps, per_step, plan(packed), plan(packed), 0, 0, seed)


@pytest.mark.parametrize("packed", [False, True])
def test_the_numbers_are_those_of_each_sequence_alone(packed):
    model, rows = tiny_causal_lm("llama"), made(9, seed=1)
    model.train()  # reading puts it into eval mode
    nothing: Any = None
    run = TrainingRun(OneRank(model), rows, [], settings(packed), nothing)
    known = read_rows(run, rows, [0, 1, 4, 8], "test")
    assert known.rows_R.tolist() == [0, 1, 4, 8] and known.logprobs_RK.shape == (4, 3)
    for number, row in ((0, 0), (1, 1), (2, 4), (3, 8)):
        for place, response in enumerate(rows[row].response_ids):
            sequence = join(torch.tensor(rows[row].prompt_ids).long(), torch.tensor(response).long())
            wanted = true_logprobs(model, [sequence]).sum()
            assert known.logprobs_RK[number, place] == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize(("steps", "rows"), [(2, 40), (4, 12), (9, 12), (1, 3)])
def test_the_rows_read_are_those_that_training_takes(steps, rows):
    loop = settings(steps=steps)
    taken = ShuffledStream(rows, loop.seed).take(0, steps * loop.items_per_step)
    assert taken_rows(rows, loop) == sorted(set(taken))


@pytest.fixture
def run(tmp_path, capsys):
    """run(model, ...) -> (references, sequences read, what was said, the metric)."""

    def read(model, loop=None, name="m", eval_rows=4):
        engine = OneRank(model)
        train, evaluation = made(20, seed=1), made(eval_rows, seed=2)
        file = ReferenceFile(str(tmp_path), {"model": name, "data": "d"})
        with MetricsWriter(tmp_path / "run", True) as metrics:
            run = TrainingRun(engine, train, evaluation, loop or settings(), metrics)
            found = known_references(run, file)
        return found, engine.sequences, capsys.readouterr().out, (tmp_path / "run" / "metrics.jsonl").read_text()

    return read


def values(found, split: str, rows: list[ResponsesRow], indices: list[int]) -> list[float]:
    batches = preference_batches(rows, indices, plan(True), OneRank.ranks, pad_token_id=0, are_targets=True)
    return torch.cat([getattr(found, split)(batch) for batch in batches]).tolist()


def test_a_second_run_reads_nothing_and_another_model_everything(run):
    model = tiny_causal_lm("llama")
    train, evaluation = made(20, seed=1), made(4, seed=2)
    first, sequences, said, metric = run(model)
    indices = taken_rows(20, settings())
    everything = sum(len(row.response_ids) for row in [*(train[index] for index in indices), *evaluation])
    assert sequences == everything and said.startswith("reference: computed 10 rows in ")
    assert "(no rows are cached for this model or data)" in said and '"reference/pairs_per_second"' in metric

    again, sequences, said, metric = run(model)
    assert sequences == 0 and said.startswith("reference: 10 rows read from the cache; ") and metric == ""
    for split, rows, picked in (("train", train, indices), ("eval", evaluation, [0, 1, 2, 3])):
        assert values(again, split, rows, picked) == values(first, split, rows, picked)

    other, sequences, said, _ = run(tiny_causal_lm("llama", seed=1), name="another")
    assert sequences == everything and "(changed since the last run: model)" in said
    assert values(other, "train", train, indices) != values(first, "train", train, indices)


def test_a_longer_run_reads_what_it_lacks(run):
    model, train = tiny_causal_lm("llama"), made(20, seed=1)
    short, _, _, _ = run(model)
    longer = settings(steps=5)
    found, sequences, said, _ = run(model, longer)
    new = sorted(set(taken_rows(20, longer)) - set(taken_rows(20, settings())))
    assert len(new) == 9 and sequences == sum(len(train[index].response_ids) for index in new)
    assert said.startswith("reference: computed 9 rows in ") and "(these rows were not cached)" in said
    both = taken_rows(20, settings())
    assert values(found, "train", train, both) == values(short, "train", train, both)
    assert run(model, settings(steps=3))[1] == 0 and run(model, eval_rows=0)[1] == 0


def test_embeddings_that_train_are_no_reference():
    """Step 2 from a model whose tokenizer has just gained tokens."""
    model = add_lora(tiny_causal_lm("llama"), Lora(lora_dim=2))
    adapter_off_references(OneRank(model), model)
    model.get_input_embeddings().requires_grad_(True)
    sentence = "only the adapters train, but model.embed_tokens.weight also trains because tokens were added to"
    with pytest.raises(ThreestepError, match=sentence):
        adapter_off_references(OneRank(model), model)


PARTS = {"format": "1", "data": "d", "model": "m", "dtype": "fp32", "layout": "packed", "transformers": "5"}
KNOWN = RowLogprobs(np.array([1, 4, 6]), np.array([[-1, -2, 0], [-3, -4, -5], [-6, -7, 0]], np.float32))


def test_rows_are_found_by_number():
    got = KNOWN.of(np.array([6, 1, 4]), np.array([1, 0, 2]))
    assert got.tolist() == [-7, -1, -5] and got.dtype == np.float32
    assert KNOWN.of(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    assert KNOWN.lacking([1, 2, 6, 7]) == [2, 7] and RowLogprobs.none().lacking([0, 3]) == [0, 3]
    for row in (0, 5, 7):
        with pytest.raises(AssertionError, match="a row was not read"):
            KNOWN.of(np.array([1, row]), np.array([0, 0]))


def test_rows_of_two_readings_are_joined():
    both = KNOWN.joined(RowLogprobs(np.array([0, 5]), np.array([[-8, -9], [-10, -11]], np.float32)))
    assert both.rows_R.tolist() == [0, 1, 4, 5, 6]
    assert both.logprobs_RK.tolist() == [[-8, -9, 0], [-1, -2, 0], [-3, -4, -5], [-10, -11, 0], [-6, -7, 0]]
    alone = RowLogprobs.none().joined(KNOWN)
    assert alone.logprobs_RK.tolist() == KNOWN.logprobs_RK.tolist()


def kept(folder, **changes) -> ReferenceFile:
    return ReferenceFile(str(folder), {**PARTS, **changes})


def test_what_is_written_is_read(tmp_path):
    assert kept(tmp_path).read() == ({}, "no rows are cached for this model or data")
    kept(tmp_path).write({"train": KNOWN, "eval": RowLogprobs.none()})
    splits, reason = kept(tmp_path).read()
    assert reason == "" and splits.keys() == {"train", "eval"} and len(splits["eval"].rows_R) == 0
    assert splits["train"].rows_R.tolist() == [1, 4, 6]
    assert splits["train"].logprobs_RK.tolist() == KNOWN.logprobs_RK.tolist()
    assert [path.name for path in tmp_path.iterdir()] == [kept(tmp_path).path.name]  # nothing half-made beside it
    assert ReferenceFile(str(tmp_path), PARTS, rebuild=True).read() == ({}, "--rebuild_cache is set")


@pytest.mark.parametrize("part", ["data", "model", "dtype", "layout", "transformers"])
def test_every_part_counts_and_the_changed_one_is_said(tmp_path, part):
    kept(tmp_path).write({"train": KNOWN})
    assert kept(tmp_path, **{part: "other"}).read() == ({}, f"changed since the last run: {part}")
    assert kept(tmp_path, data="other", model="other").read()[1] == "no rows are cached for this model or data"


@pytest.mark.parametrize("how", ["a byte", "cut", "empty", "another's"])
def test_a_damaged_file_is_not_used(tmp_path, how):
    file = kept(tmp_path)
    file.write({"train": KNOWN})
    content = file.path.read_bytes()
    if how == "a byte":
        content = content[:-1] + bytes([content[-1] ^ 1])
    elif how == "another's":
        kept(tmp_path, dtype="bf16").write({"train": KNOWN})
        content = kept(tmp_path, dtype="bf16").path.read_bytes()
    file.path.write_bytes({"cut": content[:-5], "empty": b""}.get(how, content))
    assert file.read() == ({}, "the cached file was damaged")
    file.write({"train": KNOWN})
    assert file.read()[1] == ""


def test_the_parts_are_content(tmp_path):
    """A model that was moved is the same, one whose weights or configuration changed is another."""
    data = data_flags(data_output_path=str(tmp_path / "cache"))
    names = {"one": (b"weights", {"a": 1}), "moved": (b"weights", {"a": 1})}
    names |= {"trained": (b"weightz", {"a": 1}), "reshaped": (b"weights", {"a": 2})}
    for name, (weights, config) in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer.json").write_text(name)  # no part: the data's fingerprint has it

    def path(name, fingerprint="d", dtype="fp32", packed=True, others=None):
        rows = SimpleNamespace(manifest={"fingerprint": fingerprint})
        return reference_file(str(tmp_path / name), rows, data, dtype, packed=packed, others=others).path

    assert path("one") == path("moved")
    others = [path("trained"), path("reshaped"), path("one", "e"), path("one", dtype="bf16"), path("one", packed=False)]
    others += [path("one", others={"responses": "of other rows"})]
    assert path("one") == path("one", others={}) and len({path("one"), *others}) == 7
    assert path("one").parent == tmp_path / "cache"
