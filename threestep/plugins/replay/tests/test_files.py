"""Rollouts written to a folder come back as they were, and to no other question."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.step3_ppo.flags.test_checks import names_of
from tests.unit.utils.generation.decoding.test_hf import PLAIN, frequent_token, prompts, responses, roll
from threestep.plugins.replay import checks
from threestep.plugins.replay.arguments import RecordedArguments
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout, file_of
from training.step3_ppo.flags.rollout_choices import source_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import ConversationRecord, Conversations, Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutRequest
from training.utils.flags.flags import note_mistakes
from training.utils.generation.decoding.hf import TransformersRollout


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm("llama")


@pytest.fixture(scope="module")
def how(model):
    return replace(PLAIN, ends=Ends(("x",)), end_token_id=frequent_token(roll(model, PLAIN)))


def asked(engine, model, how, seed: int = 0, lengths=(3, 5, 2), samples: int = 2) -> Rollout:
    ids_BP, mask_BP = prompts(lengths)
    seeds = range(seed, seed + len(lengths) * samples)
    return engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, seeds, samples))


@pytest.fixture
def folder(tmp_path, model, how):
    """Two rollouts of rank 1."""
    engine = DumpingRollout(TransformersRollout(str), tmp_path, rank=1)
    asked(engine, model, how)
    asked(engine, model, how, seed=50)
    return tmp_path


def assert_same(got, expected) -> None:
    for field in dataclasses.fields(expected):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(right, torch.Tensor):
            assert torch.equal(left, right) and left.dtype == right.dtype, field.name
        elif dataclasses.is_dataclass(right):
            assert_same(left, right)
        elif field.name != "seconds":
            assert left is right is None


def test_what_was_dumped_comes_back_and_no_model_is_asked(folder, model, how):
    engine = ReplayRollout(folder, rank=1)
    for seed in (0, 50):
        expected = asked(TransformersRollout(str), model, how, seed)
        got = asked(engine, None, how, seed)
        assert_same(got, expected)
        assert got.seconds > 0
    assert sorted(path.name for path in folder.iterdir()) == [file_of("", n, 1).name for n in (0, 1)]
    with safe_open(file_of(folder, 0, 1), framework="pt") as file:  # plain ones name no paths, as dumps of before
        assert "paths" not in file.metadata() and not {"inserted_BR", "positions_B"} & set(file.keys())
    with pytest.raises(
        ThreestepError, match=r"expects rollout 2 of rank 1 in .* rollout_000002_rank1.safetensors is missing;"
    ):
        asked(engine, None, how, seed=100)
    with pytest.raises(ThreestepError, match="expects rollout 0 of rank 0"):
        asked(ReplayRollout(folder, rank=0), None, how)


def test_the_engine_that_is_dumped_stays_as_it_is(tmp_path, model, how):
    """Its responses; its state; the weights that it takes in `lent`, and what it tells that took."""

    class Counting(TransformersRollout):
        state = {"n": 3}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

        def lent(self, actor):
            return contextlib.nullcontext(actor)

        def figures(self):
            return {"time/weights": 1.0}

        def check(self, lent, own, drawing):
            return [f"{own} checked"]

    dumping, other = (DumpingRollout(Counting(str), tmp_path / "deep" / "er", rank=0) for _ in range(2))
    assert dumping.state_dict() == {"n": 3, "rollouts": 0}
    other.load_state_dict({"n": 4, "rollouts": 2})
    assert other.state_dict() == {"n": 4, "rollouts": 2}
    other.load_state_dict({"rollouts": 2})  # of a checkpoint of before
    assert dumping.check(contextlib.nullcontext(model), "it is") == ["it is checked"]
    with dumping.lent(model) as lent:
        assert lent is model
    assert dumping.figures() == {"time/weights": 1.0} and TransformersRollout(str).figures() == {}
    assert responses(asked(dumping, model, how)) == responses(asked(TransformersRollout(str), model, how))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lengths": (3, 5, 1)}, r"rollout_000000_rank1.safetensors holds responses whose prompts differ from .*dump"),
        ({"lengths": (3, 5)}, "holds responses whose prompts differ from this run's; replay with the"),
        ({"seed": 1}, "holds responses whose seeds differ from this run's"),
        ({"samples": 1}, "was generated with samples_per_prompt = 2, but this run uses 1; replay with the settings"),
        ({"temperature": 0.5}, "was generated with temperature = 1.0, but this run uses 0.5; replay"),
        ({"ends": Ends()}, r'was generated with stop = \["x"\], but this run uses \[\]'),
    ],
)
def test_other_prompts_and_sampling_are_refused(folder, how, changed, sentence):
    sampling = {name: changed[name] for name in changed.keys() & {"temperature", "ends"}}
    given = {name: value for name, value in changed.items() if name not in sampling}
    with pytest.raises(ThreestepError, match=sentence):
        asked(ReplayRollout(folder, rank=1), None, replace(how, **sampling), **given)


def test_a_run_that_goes_on_goes_on_with_its_number(folder, model, how):
    first = ReplayRollout(folder, rank=1)
    asked(first, None, how)
    assert first.state_dict() == {"rollouts": 1}
    resumed = ReplayRollout(folder, rank=1)
    resumed.load_state_dict(first.state_dict())
    asked(resumed, None, how, seed=50)
    # What a run that was killed wrote after its last checkpoint is written again.
    again = DumpingRollout(TransformersRollout(str), folder, rank=1)
    again.load_state_dict({"rollouts": 1})
    file_of(folder, 1, 1).write_bytes(b"")
    asked(again, model, how, seed=50)
    assert again.state_dict() == {"rollouts": 2} and not file_of(folder, 2, 1).exists()
    asked(ReplayRollout(folder, rank=1), None, how)
    resumed.load_state_dict({"rollouts": 1})
    asked(resumed, None, how, seed=50)
    assert TransformersRollout(str).state_dict() == {}


def test_how_often_ends_were_looked_for_does_not_matter(folder, model, how):
    """It decides no response, and dumps from before it was a setting do not name it."""
    got = asked(ReplayRollout(folder, rank=1), None, replace(how, ends=replace(how.ends, check_tokens=5)))
    assert responses(got) == responses(asked(TransformersRollout(str), model, how))


def test_files_of_something_else(tmp_path, how):
    path = file_of(tmp_path, 0, 0)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ThreestepError, match=r"expects files from --rollout_dump \('threestep rollout 1'\), but .* is"):
        asked(ReplayRollout(tmp_path, 0), None, how)
    path.write_bytes(b"nothing that reads")
    with pytest.raises(ThreestepError, match="rank0.safetensors expects safetensors: .*; dump the rollouts again"):
        asked(ReplayRollout(tmp_path, 0), None, how)


RECORD = {"turns": 1, "cut": None, "figures": {"heard": 1}, "forks": 0}


class Talking(TransformersRollout):
    """Its last token but one is the environment's."""

    def roll_out(self, model, request):
        rollout = super().roll_out(model, request)
        inserted_BR = torch.zeros_like(rollout.response_mask_BR)
        inserted_BR[:, 1] = rollout.response_lengths_B > 2
        records = tuple(ConversationRecord(**RECORD) for _ in rollout.response_lengths_B)
        turns = Conversations(records, inserted_BR, torch.zeros_like(inserted_BR), torch.zeros(inserted_BR.shape))
        return replace(rollout, inserted=turns)


RECORDS = json.dumps([RECORD] * 6)


def damaged(path, records=RECORDS, drop=(), **tensors):
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    kept = {name: tensor for name, tensor in {**load_file(path), **tensors}.items() if name not in drop}
    notes |= {} if records is None else {"conversations": records}
    save_file(kept, path, {name: text for name, text in notes.items() if records or name != "conversations"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"records": None}, "must have a record of each conversation"),
        ({"records": "[" * 100_000}, "conversations: expects JSON"),
        ({"records": json.dumps([RECORD] * 5)}, "must have a record of each conversation"),
        (
            {"records": json.dumps([{**RECORD, "turns": 0}] * 6)},
            "must have turns, forks and cut, where cut is one of tokens, turns",
        ),
        (
            {"records": json.dumps([{**RECORD, "cut": "x"}] * 6)},
            "must have turns, forks and cut, where cut is one of tokens, turns",
        ),
        ({"records": json.dumps([{**RECORD, "figures": {"a": []}}] * 6)}, "0.figures.a expects"),
        ({"drop": ["asked_mask_BP"]}, "must have the tensors .*asked_mask_BP"),
        ({"drop": ["fork_begins_BR"]}, "must have the tensors .*fork_begins_BR"),
        ({"every": "inserted_BR"}, "must have at least one generated token in each response"),
        ({"response_lengths_B": torch.zeros(6, dtype=torch.int64)}, "must have responses of 1 to"),
    ],
)
def test_damaged_conversations_are_refused(tmp_path, model, how, change, expected):
    rollout = asked(DumpingRollout(Talking(str), tmp_path, 0), model, how)
    path, change = file_of(tmp_path, 0, 0), dict(change)
    replayed = asked(ReplayRollout(tmp_path, 0), None, how)
    assert replayed.records == rollout.records and replayed.drawn.mask_BR.equal(rollout.drawn.mask_BR)
    if "every" in change:
        change = {change.pop("every"): torch.ones_like(rollout.response_mask_BR)}
    damaged(path, **change)
    with pytest.raises(ThreestepError, match=f"rank0.safetensors.*{expected}"):
        asked(ReplayRollout(tmp_path, 0), None, how)


def test_numbers_and_ids_of_no_response_are_refused(tmp_path, model, how):
    rollout = asked(DumpingRollout(TransformersRollout(str), tmp_path, 0), model, how)
    path, ids_BP = file_of(tmp_path, 0, 0), rollout.prompt_ids_BP
    for change, expected in (
        ({"prompt_ids_BP": ids_BP - 2**40}, "non-negative token ids"),
        ({"prompt_ids_BP": ids_BP + 2**40}, "holds the token id .*; replay with the model"),
        ({"prompt_mask_BP": rollout.prompt_mask_BP.flip(1)}, "must have left-padded prompts"),
        ({"sampled_logprobs_BR": rollout.sampled_logprobs_BR * math.nan}, "log-probabilities that are not NaN"),
    ):
        whole = path.read_bytes()
        damaged(path, records=None, **change)
        with pytest.raises(ThreestepError, match=f"rank0.safetensors.*{expected}"):
            asked(ReplayRollout(tmp_path, 0), model, how)
        path.write_bytes(whole)


@pytest.mark.parametrize("given", [{"load_best_model_at_end": True}, {"early_stopping": 2}])
def test_a_replay_judges_no_evaluation_of_another_run(given, monkeypatch):
    names_of(**given)
    [name] = given
    with pytest.raises(ThreestepError, match=f"--{name} depends on evaluations, but --rollout_replay only has"):
        names_of(**given, rollout_replay="there")
    monkeypatch.setattr(checks, "figures_of_others", lambda settings: True)
    names_of(**given, rollout_replay="there")


def test_rollouts_are_not_written_among_those_of_another_run(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(
        ThreestepError, match="^--val_only evaluates this run's weights, but the responses in --rollout_replay"
    ):
        names_of(val_only=True, rollout_replay=folder)
    names_of(rollout_dump=folder)
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    names_of()
    names_of(resume="latest", rollout_dump=folder)
    with pytest.raises(
        ThreestepError, match="^--rollout_dump expects a folder without rollouts, but .* has some; choose"
    ):
        names_of(rollout_dump=folder)


def test_a_folder_of_rollouts_is_read_or_written(tmp_path):
    folder, new = str(tmp_path), str(tmp_path / "new")
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    for given, said in (
        ({"rollout_dump": new}, None),
        ({"rollout_replay": folder}, None),
        (
            {"rollout_dump": new, "rollout_replay": folder},
            "--rollout_dump and --rollout_replay cannot be combined, becau",
        ),
        (
            {"rollout_replay": "/no/such/folder"},
            "--rollout_replay expects a folder that --rollout_dump filled, but /no/",
        ),
    ):
        mistakes = Mistakes()
        note_mistakes(RecordedArguments(**given), mistakes)
        assert len(mistakes.sentences) == (said is not None)
        assert all(each.startswith(said) for each in mistakes.sentences)


def test_engines_are_put_together(tmp_path):
    folder = str(tmp_path)
    for given, kind, draws in (
        ({}, TransformersRollout, True),
        ({"rollout_dump": folder}, DumpingRollout, True),
        ({"rollout_replay": folder}, ReplayRollout, False),
    ):
        source = source_of(ppo_flags(**given))
        assert (source.name, source.draws) == (next(iter(given), ""), draws)
        assert type(source.engine(TransformersRollout, rank=0, decides={})) is kind
    with pytest.raises(ThreestepError, match="only one source, but --rollout_dump and --rollout_replay each name one"):
        source_of(ppo_flags(rollout_dump=folder, rollout_replay=folder))
