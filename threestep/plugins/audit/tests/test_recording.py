"""Records on disk and their parts: numbers, sequences, sums and hashes, states about a step; the kinds of steps."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import nn

from threestep.plugins.audit.recording import states, sums
from threestep.plugins.audit.recording.content import WatchedBatch, of_sequences
from threestep.plugins.audit.recording.files import RecordHead, StepRecord, read_record, write_record
from threestep.plugins.audit.recording.hashes import (
    bit_sum,
    end_keys,
    float_hash,
    float_sums,
    mixed,
    random_states_hash,
    target_keys,
    token_keys,
    tokens_hash,
)
from threestep.plugins.audit.recording.numbers import check_state, check_tensors
from threestep.plugins.audit.recording.sequences import RowSequences, sequences_of
from threestep.plugins.audit.recording.states import StateWatch, digest
from threestep.plugins.audit.recording.sums import Sums
from threestep.plugins.audit.recording.template_prompts import template_prompt
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.layout.trie import trie_document

pytestmark = pytest.mark.unit


def record(**tensors: np.ndarray) -> StepRecord:
    own = {"lengths": np.array([2, 1]), "logprobs": np.zeros(3, np.float32), "loss_mask": np.zeros(3, bool), **tensors}
    head = RecordHead("sft", 3, 2, {"reduction": "token mean"}, {"loss": 1.5}, {"name": "trl", "version": "1.16.0"})
    return StepRecord(head, [own, own], {"gradients.a.weight": np.ones((2, 2), np.float32)})


def test_a_record_comes_back(tmp_path: Path):
    write_record(tmp_path / "step", record())
    found = read_record(tmp_path / "step")
    assert found.head == record().head
    assert all((found.ranks[1][name] == values).all() for name, values in record().ranks[1].items())
    assert found.state["gradients.a.weight"].shape == (2, 2)
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == [
        "rank0.safetensors", "rank1.safetensors", "record.json", "state.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"logprob": np.zeros(3, np.float32)}, ": unknown tensor 'logprob'; did you mean 'logprobs'"),
        ({"logprobs": np.zeros(3, np.int64)}, "expects floating-point numbers in 1 dimension(s) [T], got int64"),
        ({"loss_mask": np.zeros(4, bool)}, "loss_mask expects 3 entries, as in logprobs, got 4"),
        ({"lengths": np.array([2, 2])}, "lengths must add up to the 3 entries of logprobs, got 4"),
        ({"rollout_values": np.zeros(1, np.float32)}, "rollout_lengths must add up to the 1 entries"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(tmp_path: Path, tensors, words):
    with pytest.raises(ThreestepError) as refusal:
        write_record(tmp_path / "step", record(**tensors))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2, but this threestep reads schema threestep-record, version 1"),
        ({"objective": "orpo"}, "objective expects one of sft, reward, dpo, policy, got 'orpo'"),
        ({"settings": {"beto": 1}}, "unknown name 'beto' in settings; did you mean 'beta'"),
        ({"settings": {"beta": "x"}}, "beta expects a number, got 'x'"),
        ({"figures": {"los": 1}}, "unknown name 'los' in figures; did you mean 'loss'"),
        ({"ranks": 3}, "rank2.safetensors is missing: expected the tensors of one rank"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, changes, words):
    write_record(tmp_path, record())
    content = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ThreestepError) as refusal:
        read_record(tmp_path)
    assert words in str(refusal.value)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path):
    write_record(tmp_path, record())
    from safetensors.numpy import save_file

    save_file({"momentum.a": np.zeros(1)}, str(tmp_path / "state.safetensors"))
    with pytest.raises(ThreestepError, match="expects names that begin with gradients"):
        read_record(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes(b"{}")
    with pytest.raises(ThreestepError, match="is not a safetensors file"):
        read_record(tmp_path)


WHOLE = {
    "lengths": np.array([2, 3]), "token_ids": np.arange(5), "chosen": np.array([0]), "rejected": np.array([1]),
    "micro_batches": np.array([0, 1]), "micro_losses": np.zeros(2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("lengths", [-1, 6], "lengths expects numbers from 0 to 5, got -1"),
        ("lengths", [2, 2**62], "lengths expects numbers from 0 to 5, got 4,611,686,018,427,387,904"),
        ("token_ids", [0, 1, 2, 3, -1], "token_ids expects numbers from 0"),
        ("chosen", [2], "chosen expects numbers from 0 to 1, got 2"),
        ("rejected", [-1], "rejected expects numbers from 0 to 1, got -1"),
        ("micro_batches", [0, 2], "micro_batches expects numbers from 0 to 1, got 2"),
    ],
)
def test_counts_and_places_are_within_what_they_are_of(name, values, sentence):
    check_tensors(WHOLE, "rank0")
    with pytest.raises(ThreestepError, match=f"rank0: {sentence}"):
        check_tensors({**WHOLE, name: np.array(values)}, "rank0")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"exp_avg.a": np.zeros(2)},
            r"state: exp_avg.a expects the shape \[3\], as in the other tensors of this parameter, got \[2\]",
        ),
        ({"exp_avg.b": np.zeros(3)}, r"state: exp_avg.b expects the shape none"),
        ({"weights_before.a": np.zeros(4)}, r"state: weights_before.a expects the shape \[3\]"),
        ({"gradients.a": np.zeros(3, dtype=np.int64)}, "gradients.a expects floating-point numbers, got int64"),
        ({"moments.a": np.zeros(3)}, "state expects names that begin with gradients., .*got 'moments.a'"),
    ],
)
def test_a_parameter_is_the_same_in_all_parts_of_a_state(change, sentence):
    kinds = ("gradients.", "exp_avg.", "weights_before.", "critic_gradients.")
    state = {f"{kind}a": np.zeros(3) for kind in kinds} | {"weights_before.frozen": np.zeros(7)}
    check_state(state, "state")
    with pytest.raises(ThreestepError, match=sentence):
        check_state({**state, **change}, "state")


def sequence(ids: list[int], targets: list[int]) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.tensor([place in targets for place in range(len(ids))]))


def run(ids: list[int], is_target: bool) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.full((len(ids),), is_target))


FIRST, SECOND = sequence([5, 6, 7], [2]), sequence([8, 9], [1])


@pytest.mark.parametrize("rows", [padded_rows([FIRST, SECOND], 0), packed_rows([[plain(FIRST), plain(SECOND)]], 0)])
def test_the_worked_example(rows):
    found = sequences_of(rows)
    assert found.lengths_S.tolist() == [3, 2] and found.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert found.place_M.tolist() == [2, 4]
    assert found.spread(torch.tensor([1.5, -2.5])).tolist() == [0, 0, 1.5, 0, -2.5]


def test_a_shared_prompt_stands_in_each():
    document = shared_prompt(run([5, 6], False), [run([7, 8], True), run([9], True)])
    found = sequences_of(packed_rows([[plain(SECOND), document]], 0))
    assert found.lengths_S.tolist() == [2, 4, 3]
    assert found.token_ids_T.tolist() == [8, 9, 5, 6, 7, 8, 5, 6, 9]
    assert found.place_M.tolist() == [1, 4, 5, 8]


def test_equal_beginnings_stand_in_each():
    both = [sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 7, 9], [2, 3])]
    found = sequences_of(packed_rows([[trie_document(both, 1)]], 0))
    assert found.token_ids_T.tolist() == [5, 6, 7, 8, 5, 6, 7, 9] and found.place_M.tolist() == [2, 3, 6, 7]


def test_a_rank_without_rows_has_nothing():
    found = sequences_of(padded_rows([], 0))
    assert found.lengths_S.tolist() == [] and found.token_ids_T.tolist() == []


def test_parts_that_are_no_run_are_refused():
    from training.utils.contracts.documents import Document, Segment

    trunk, path = Segment(run([5], False)), Segment(run([6, 7], True), sees=(0,), first_position=1, predecessor=0)
    other = Segment(run([8, 9], True), sees=(0,), first_position=1, predecessor=0)
    end = Segment(run([4], False), sees=(0, 1, 2), first_position=3)
    document = Document((trunk, path, other, end), ends=(3,), owners=((0,), (0,), (0,), (0,)))
    with pytest.raises(
        ThreestepError, match="one contiguous run of tokens, got parallel paths or a conversation with forks"
    ):
        sequences_of(packed_rows([[document]], 0))


def _batch(lengths: list[int], begins: list[int]) -> WatchedBatch:
    tokens = torch.arange(sum(lengths))
    media = {"media_begins": torch.tensor(begins), "media_tokens": torch.ones(len(begins), dtype=torch.int64)}
    sequences = RowSequences(torch.tensor(lengths), tokens, tokens[:0], media if begins else {})
    return WatchedBatch(sequences, None, torch.tensor(0.5))


def test_media_of_later_micro_batches_stand_behind_the_tokens_of_earlier_ones():
    """5 tokens with one medium, 4 without any, 3 with two, which begin at 9 + 0 and 9 + 2."""
    found = of_sequences([_batch([2, 3], [1]), _batch([4], []), _batch([3], [0, 2])])
    assert found["media_begins"].tolist() == [1, 9, 11]
    assert found["media_tokens"].tolist() == [1, 1, 1]
    assert found["micro_batches"].tolist() == [0, 0, 1, 2]
    assert "media_begins" not in of_sequences([_batch([4], [])])


class Letters:
    """Every character is a token; `<` is a special one."""

    all_special_ids = (ord("<"),)

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def rendered(messages: list[dict[str, str]], system: str, end: str = "\n") -> str:
    own = "" if messages[0]["role"] == "system" else system
    return own + "".join(f"{message['role']}: {message['content']}{end}" for message in messages)


@pytest.mark.parametrize(
    ("system", "found"),
    [("", ""), ("<", ""), ("<<", ""), ("<system: be kind\n", "<system: be kin"), ("be\n", "be")],
)
def test_what_stands_before_a_first_message_alone(system: str, found: str):
    ids = template_prompt(lambda messages: rendered(messages, system), Letters())
    assert "".join(chr(int(word)) for word in ids.split()) == found


def test_a_template_that_leaves_messages_out():
    assert template_prompt(lambda messages: messages[-1]["content"], SimpleNamespace()) == ""


def rows(*sequences: list[int]):
    own = [TokenSequence(torch.tensor(ids), torch.arange(len(ids)) > 0) for ids in sequences]
    return padded_rows(own, 0)


def hash_of(*sequences: list[int]) -> tuple[int, int]:
    own = rows(*sequences)
    keys_NT = token_keys(own)
    return int(tokens_hash(own, keys_NT)), int(target_keys(own, keys_NT).sum())


def test_mixed_is_splitmix():
    value = 12345
    expected = value * 0xBF58476D1CE4E5B9 % 2**64
    signed = expected - 2**64 if expected >> 63 else expected
    expected = (signed ^ signed >> 31) * 0x94D049BB133111EB % 2**64
    signed = expected - 2**64 if expected >> 63 else expected
    assert mixed(torch.tensor([value])).tolist() == [signed ^ signed >> 29]


def test_padding_and_order_change_nothing():
    whole = hash_of([5, 6, 7], [8, 9])
    parts = [hash_of([8, 9]), hash_of([5, 6, 7])]
    assert whole == tuple(sum(each) - (2**64 if sum(each) >= 2**63 else 0) for each in zip(*parts, strict=True)) or all(
        (whole[place] - parts[0][place] - parts[1][place]) % 2**64 == 0 for place in (0, 1)
    )


@pytest.mark.parametrize("other", [([5, 6, 8], [8, 9]), ([5, 7, 6], [8, 9]), ([5, 6, 7], [9, 8]), ([5, 6, 7],)])
def test_another_token_or_place_is_another_hash(other):
    assert hash_of([5, 6, 7], [8, 9]) != hash_of(*other)


def test_a_bit_of_a_float_counts():
    values, keys = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 8, 9])
    moved = torch.nextafter(values, torch.tensor(9.0))
    assert float_hash(values, keys) == float_hash(values.flip(0), keys.flip(0)) != float_hash(moved, keys)
    assert float_hash(values, keys) != float_hash(values.flip(0), keys) and bit_sum(values) != bit_sum(moved)


def test_the_sums_of_floats():
    keys = torch.tensor([1 << 20, 0, 3 << 20, 5])
    values = torch.tensor([1.0, 2.0, 4.0, float("nan")])
    assert float_sums(values, keys).tolist() == [3.0, 7.0, 21.0, 1.0 - 2.0 + 4.0]


def test_ends_have_a_key_each():
    own = rows([5, 6, 7], [8, 9])
    keys_NT = token_keys(own)
    assert end_keys(own, keys_NT).tolist() == [int(keys_NT[0, 2]), int(keys_NT[1, 1])]


def test_every_generator_counts():
    seen = [random_states_hash(0), random_states_hash(1)]
    assert random_states_hash(0) == seen[0]
    for draw in (random.random, numpy.random.random, lambda: torch.rand(1)):
        draw()
        seen.append(random_states_hash(0))
    assert len(set(seen)) == len(seen)


def test_the_totals_of_one_rank_are_its_own():
    own = Sums()
    for value in (-1, 2**62, 2**62, 2**62):
        own.add_hashes("b", torch.tensor([value, 1]))
    own.add_hashes("a", torch.tensor(-2))
    own.add_floats("x", torch.tensor([0.5, 2.0]))
    own.add_floats("x", torch.tensor([0.5, -1.0]))
    expected = f"{(-1 + 3 * 2**62) % 2**64:016x}"
    assert own.totals(torch.device("cpu")) == (
        {"a": [f"{2**64 - 2:016x}"], "b": [expected, f"{4:016x}"]},
        {"x": [1.0, 1.0]},
    )
    assert own.own() == ({"b": [expected, f"{4:016x}"], "a": [f"{2**64 - 2:016x}"]}, {"x": [1.0, 1.0]})


def test_the_halves_of_hashes_add_up_over_ranks(monkeypatch):
    monkeypatch.setattr(sums, "summed", lambda values: 3 * values)  # three ranks with the same numbers
    own = Sums()
    own.add_hashes("a", torch.tensor(-5))
    own.add_floats("x", torch.tensor(0.25))
    assert own.totals(torch.device("cpu")) == ({"a": [f"{-15 % 2**64:016x}"]}, {"x": [0.75]})


def test_nothing_has_no_totals():
    assert Sums().totals(torch.device("cpu")) == ({}, {})


class Deep:
    """As much of DeepSpeed's engine as a plain float32 step needs."""

    def __init__(self, optimizer: torch.optim.Optimizer, is_applied: bool) -> None:
        self.optimizer, self.is_applied, self.updates = optimizer, is_applied, 0

    def _take_model_step(self, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([weight for group in self.optimizer.param_groups for weight in group["params"]], 0.5)
        self.optimizer.step()
        self.updates = 1

    def was_step_applied(self) -> bool:
        return self.is_applied

    def gradient_clipping(self) -> float:
        return 0.5


@dataclass
class Engine:
    module: nn.Module
    engine: Deep
    settings: EngineSettings = field(default_factory=EngineSettings)
    total_steps: int = 10
    ranks: Ranks = field(default_factory=lambda: Ranks(0, 0, 1, torch.device("cpu")))

    @property
    def updates(self) -> int:
        return self.engine.updates


def stepped(
    keeps: bool,
    is_applied: bool = True,
    *,
    settings: EngineSettings | None = None,
    optimizer: Any = torch.optim.AdamW,
) -> tuple[StateWatch, torch.Tensor]:
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    engine = Engine(module, Deep(optimizer([module.weight], lr=0.1), is_applied), settings or EngineSettings())
    watch = StateWatch(engine, keeps)  # type: ignore[arg-type]
    watch.start()
    (3.0 * module(torch.ones(1, 2))).sum().backward()
    before = module.weight.detach().clone()
    engine.engine._take_model_step(None)
    assert "_take_model_step" not in vars(engine.engine)
    return watch, before


def test_values_are_those_before_the_clip_and_about_the_update():
    watch, before = stepped(keeps=True)
    assert watch.values["gradients.weight"].tolist() == [[3.0, 3.0]]
    assert watch.values["weights_before.weight"].tolist() == before.tolist()
    assert {"weights_before.bias", "exp_avg.weight", "exp_avg_after.weight"} < set(watch.values)
    # Clipped from 3 sqrt(2) to 0.5, each is 0.5 / sqrt(2); a tenth of it is in the moment.
    assert watch.values["exp_avg_after.weight"] == pytest.approx(0.1 * 0.5 / np.sqrt(2.0))
    assert watch.digests["gradients.weight"]["norm"] == pytest.approx(3.0 * np.sqrt(2.0))


def test_without_values_there_are_digests_alone():
    watch, _ = stepped(keeps=False)
    assert not watch.values and set(watch.digests) == {
        "gradients.weight", "weights_before.weight", "weights_after.weight",
    }  # fmt: skip
    assert watch.digests["weights_before.weight"] != watch.digests["weights_after.weight"]


def test_a_skipped_step_has_no_state():
    watch, _ = stepped(keeps=True, is_applied=False)
    assert not watch.values and not watch.digests


def test_a_large_model_has_digests_alone(monkeypatch, capsys):
    monkeypatch.setattr(states, "MOST_WEIGHTS", 1)
    assert not stepped(keeps=True)[0].values
    assert (
        "--record_values is for models up to 1 weights, but this model has 3; recording only digests"
        in capsys.readouterr().out
    )


def test_a_digest_by_hand():
    numbers = np.array([3.0, 4.0], dtype=np.float32)
    assert digest(numbers) == {"norm": 5.0, "sha256": hashlib.sha256(numbers.tobytes()).hexdigest()}


def test_the_settings_of_the_optimizer():
    watch, _ = stepped(keeps=False)
    found = watch.settings()
    assert (found["max_grad_norm"], found["total_steps"], found["updates_before"]) == (0.5, 10.0, 0.0)
    assert "adapter_learning_rate" not in found and found["schedule"] == "cosine"


def test_another_optimizer_and_schedule_are_left_out():
    """A record holds what its reader knows: without them the update is not judged."""
    settings = EngineSettings(optimizer="sign_sgd", lr_scheduler_type="inverse_time")
    watch, _ = stepped(keeps=True, settings=settings, optimizer=torch.optim.SGD)
    assert {"gradients.weight", "weights_before.weight", "weights_after.weight"} <= set(watch.values)
    assert not [name for name in watch.values if name.startswith("exp_avg")]
    assert {"schedule", "beta1", "beta2", "adam_epsilon", "weight_decay"}.isdisjoint(watch.settings())
