"""Rollouts ahead: flags that do not go with them, groups that are begun and taken, kept weights, and what is saved."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.ahead.admission import Admission
from threestep.plugins.ahead.arguments import AheadArguments
from threestep.plugins.ahead.kept_model import kept_model
from threestep.plugins.ahead.saved import rollouts_of, saved_rollouts
from threestep.plugins.ahead.scheduler import rollout_scheduler
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.replay.rollout_tensors import tensors_of
from training.step3_ppo.flags.algorithm import experience_settings
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import ConversationRecord, Conversations, DrawnExperts, FormedResponses, Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout


def flags_of(**given):
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    return ppo_flags(**{**names, "rollouts_ahead": 1, **given})


def settings_of(**given):
    flags = flags_of(**given)
    return experience_settings(checked_components(flags).algorithm, flags.ppo, SequenceLayout(PlanSettings(1), 1))


def test_older_weights_are_corrected_unless_that_is_refused():
    ahead = settings_of()
    assert ahead.correction.settings.correction == "truncate" and ahead.reading.reads_old_logprobs
    assert not settings_of(mismatch_correction="none").correction.settings.acts
    assert not settings_of(rollouts_ahead=0).correction.settings.acts


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"dynamic_sampling_tries": 2},
            "--dynamic_sampling_tries 2 draws more prompts after a step has seen the scores",
        ),
        ({"prompt_sampler": "a.py:B"}, "--prompt_sampler chooses prompts by the scores of the previous step"),
        ({"prompt_dataset": "a.py:B"}, "--prompt_dataset chooses prompts by the scores of the previous step"),
        ({"advantage": "remax"}, "--advantage remax generates greedy responses with the newest weights"),
        ({"advantage": "optimal_token_baseline"}, "--advantage optimal_token_baseline needs the distributions of"),
        (
            {"report_variance": True},
            "--report_variance needs the distributions of the policy that generated the responses, whose weights",
        ),
        (
            {"speculate": "1", "mtp_num_layers": 1},
            "--speculate 1 drafts tokens with weights that are trained in the meantime; remove one of",
        ),
        ({"val_only": True}, "--val_only does not train, so there are no steps to run ahead of; remove one of them"),
    ],
)
def test_what_it_does_not_go_with(given, why):
    wanted = f"--rollouts_ahead 1 generates responses before the step that trains on them, but {why}"
    with pytest.raises(ThreestepError, match=wanted):
        checked_components(flags_of(**given))
    checked_components(flags_of(**{**given, "rollouts_ahead": 0}))


def test_engines_in_the_processes_of_training_do_not_draw_beside_it():
    wanted = "--rollout_engine hybrid does not support --rollouts_ahead 1; remove it, or use another engine"
    with pytest.raises(ThreestepError, match=wanted):
        checked_components(flags_of(rollout_engine="hybrid"))


def check_ahead_of_run(flags, engine, media, *, rollouts, ranks):
    scheduler = rollout_scheduler(flags)
    if scheduler is not None:
        scheduler.check_run(engine, media, rollouts=rollouts, prompts_of_step=4, ranks=ranks)


class Sent(TransformersRollout):
    takes_weights = True


class Met(Sent):
    meets_other_ranks = True


def test_runs_that_cannot_be_ahead():
    flags = flags_of()
    check_ahead_of_run(flags, TransformersRollout, None, rollouts=2, ranks=2)
    check_ahead_of_run(flags_of(rollouts_ahead=0), Sent, None, rollouts=1, ranks=2)
    with pytest.raises(
        ThreestepError, match="--rollouts_ahead 1 needs a run of more than 1 rollouts, but this run has 1, so"
    ):
        check_ahead_of_run(flags, TransformersRollout, None, rollouts=1, ranks=1)
    images = object.__new__(RowImages)
    with pytest.raises(ThreestepError, match="--rollouts_ahead 1 does not work with prompts that have images, because"):
        check_ahead_of_run(flags, TransformersRollout, images, rollouts=2, ranks=1)
    with pytest.raises(
        ThreestepError,
        match="--rollouts_ahead 1 with --rollout_engine hf works on one rank only, .* this run has 2 ranks",
    ):
        check_ahead_of_run(flags, Sent, None, rollouts=2, ranks=2)
    check_ahead_of_run(flags, Sent, None, rollouts=2, ranks=1)
    check_ahead_of_run(flags, Met, None, rollouts=2, ranks=2)


def test_free_has_settings_of_its_own():
    assert flags_of(rollouts_ahead="free").added.of(AheadArguments).steps_ahead == 2
    assert flags_of(rollouts_ahead="free", max_rollout_age=5).added.of(AheadArguments).steps_ahead == 5
    assert settings_of(rollouts_ahead="free").correction.settings.correction == "truncate"
    check_ahead_of_run(flags_of(rollouts_ahead="free"), TransformersRollout, None, rollouts=1, ranks=2)
    check_ahead_of_run(flags_of(rollouts_ahead="free"), Sent, None, rollouts=2, ranks=1)
    check_ahead_of_run(flags_of(rollouts_ahead="free"), Met, None, rollouts=2, ranks=2)
    with pytest.raises(ThreestepError, match="--rollouts_ahead free with --rollout_engine hf works on one rank only"):
        check_ahead_of_run(flags_of(rollouts_ahead="free"), Sent, None, rollouts=2, ranks=2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollouts_ahead": "soon"}, "--rollouts_ahead expects a number of steps, 0 or more, or free, got 'soon'"),
        (
            {"max_rollout_age": 3},
            "--max_rollout_age 3 needs --rollouts_ahead free, but --rollouts_ahead is 1; set",
        ),
        ({"replay_schedule": "a"}, "--replay_schedule a needs --rollouts_ahead free, but --rollouts_ahead is 1; set"),
    ],
)
def test_flags_of_free_and_of_no_other(given, why):
    mistakes = Mistakes()
    flags_of(**given).added.of(AheadArguments).validate(mistakes)
    with pytest.raises(ThreestepError, match=why):
        mistakes.raise_if_any()


def test_groups_that_end_in_any_order_have_no_numbers(tmp_path):
    with pytest.raises(ThreestepError, match="--rollout_dump numbers rollouts in the order they are generated"):
        checked_components(flags_of(rollouts_ahead="free", rollout_dump=str(tmp_path)))


def test_a_step_takes_what_ended_first_by_hand():
    """Two groups a batch, oldest 2: step 1 leaves four of version 0, which may train in the steps 2 and 3, so that it
    takes what it likes; step 3 takes all that are left of version 0."""
    admission = Admission(oldest=2, groups=2, steps=9)
    assert [admission.admitted(step) for step in (1, 2, 7, 8, 9)] == [6, 8, 18, 18, 18]
    assert admission.taken(1, [0], [0] * 5) is None
    assert admission.taken(1, [0, 0, 0], [0] * 3) == [0, 1]
    assert admission.taken(2, [1, 0, 1], [0, 0, 0]) is None  # after step 2 at most two of version 0 may be left
    assert admission.taken(2, [1, 0, 1, 0], [0, 0]) == [1, 3]
    assert admission.taken(3, [2, 1, 0, 2], [0, 1]) is None
    assert admission.taken(3, [2, 1, 0, 2], [1]) == [0, 2]
    assert admission.taken(3, [2, 1, 0, 2], [1, 1]) == [1, 2]  # step 4 takes two of version 1, and there are three


def test_the_worked_example():
    assert Admission(1, 2, 9).taken(2, [0, 1, 1], [0]) is None
    assert Admission(1, 2, 9).taken(2, [1, 0, 1, 0], []) == [1, 3]


@pytest.mark.parametrize("oldest", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_every_group_trains_once_and_none_is_older_than_the_bound(oldest, seed):
    """A queue whose groups end in any order, some of them as late as they can."""
    dice = random.Random(f"{oldest} {seed}")
    admission = Admission(oldest, dice.randint(1, 4), steps=12)
    begun, trained = 0, list[int]()
    waiting, drawing, ended = 0, list[tuple[int, int]](), list[tuple[int, int]]()  # number and version
    for step in range(1, 13):
        waiting += admission.admitted(step) - begun
        begun += admission.admitted(step) - begun
        assert waiting + len(drawing) + len(ended) <= (oldest + 1) * admission.groups
        while True:
            others = [version for _, version in drawing] + [step - 1] * waiting
            places = admission.taken(step, [version for _, version in ended], others)
            if places is not None:
                break
            if waiting and (not drawing or dice.random() < 0.6):
                drawing.append((begun - waiting, step - 1))
                waiting -= 1
            else:  # the newest first, most of the time
                ended.append(drawing.pop(-1 if dice.random() < 0.8 else 0))
        assert len(places) == admission.groups
        assert max(step - 1 - ended[place][1] for place in places) <= oldest
        trained += [ended[place][0] for place in places]
        ended = [group for place, group in enumerate(ended) if place not in places]
    assert sorted(trained) == list(range(12 * admission.groups)) and not waiting and not drawing and not ended


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_kept_weights_are_those_of_their_moment(zero_stage):
    trained: Any = tiny_causal_lm("llama").eval()
    ids = torch.tensor([[3, 5, 7]])
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(zero_stage=zero_stage),
        ranks=SimpleNamespace(device=torch.device("cpu"), is_main=True),
        full_tensors=lambda part: part.named_parameters(),
        updates=4,
    )
    whole = WholeModel(engine, trained)
    with torch.no_grad():
        before = trained(ids).logits
        first = kept_model(whole)
        for weight in trained.parameters():
            weight.mul_(1.5)
        engine.updates = 5
        second, after = kept_model(whole), trained(ids).logits
        assert not torch.equal(before, after)
        for kept, wanted, updates in ((first, before, 4), (second, after, 5), (first, before, 4)):
            assert kept.updates == updates and not kept.is_sharded
            with kept.lent() as model:
                assert not model.training and model is not trained
                assert torch.equal(model(ids).logits, wanted)
    sent: list[str] = []
    first.send(lambda tensors: sent.extend(name for name, _ in tensors))
    assert sent == [name for name, _ in trained.named_parameters()]


SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, top_k=0, top_p=1.0, end_token_id=9, pad_token_id=0)


def rollout(kind: str, prompts: list[int], longest: int = 3) -> Rollout:
    """Two samples of each prompt, whose tokens tell the prompt and the sample."""
    count, dice = 2 * len(prompts), torch.Generator().manual_seed(len(prompts))
    lengths_B = torch.tensor([1 + row % longest for row in range(count)])
    inside_BR = torch.arange(longest) < lengths_B.unsqueeze(1)
    ids_BR = torch.tensor([[10 * prompts[row // 2] + row % 2] * longest for row in range(count)]) * inside_BR
    logprobs_BR = torch.randn(count, longest, generator=dice) * inside_BR
    ids_BP = torch.tensor([[prompt] for prompt in prompts]).repeat_interleave(2, dim=0)
    ended_B = torch.tensor([row % 3 == 0 for row in range(count)])
    made = Rollout(ids_BP, ids_BP > 0, ids_BR, lengths_B, logprobs_BR, ended_B, seconds=0.25)
    nothing_BR = torch.zeros_like(inside_BR)
    if kind == "paths":
        made = Rollout(*made_columns(made), inserted=FormedResponses(nothing_BR, lengths_B), seconds=0.25)
    if kind == "turns":
        records = tuple(
            ConversationRecord(1 + row, "turns" if row else None, {"calls": 0.1 * row}) for row in range(count)
        )
        turns = Conversations(records, nothing_BR, nothing_BR.clone(), logprobs_BR.abs())
        made = Rollout(*made_columns(made), inserted=turns, seconds=0.25)
    if kind == "experts":
        of_prompt, of_response = (
            torch.randint(0, 8, (*ids.shape, 3, 2), generator=dice).short() for ids in (ids_BP, ids_BR)
        )
        made = Rollout(*made_columns(made), seconds=0.25, experts=DrawnExperts(of_prompt, of_response))
    return made


def made_columns(made: Rollout) -> tuple[torch.Tensor, ...]:
    return (
        made.prompt_ids_BP, made.prompt_mask_BP, made.response_ids_BR, made.response_lengths_B,
        made.sampled_logprobs_BR, made.ended_B,
    )  # fmt: skip


def ranks(world_size: int, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["plain", "paths", "turns", "experts"])
def test_every_bit_comes_back(kind):
    before = rollout(kind, [3, 5, 7])
    saved = json.loads(json.dumps(saved_rollouts([before])))
    (after,) = rollouts_of([saved], [SimpleNamespace()], ranks(1))
    (one, records), (other, same) = tensors_of(before), tensors_of(after)
    assert records == same and (records is None) == (kind != "turns") and after.seconds == 0.25
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["plain", "turns", "experts"])
def test_prompts_are_dealt_anew_to_other_ranks(kind):
    """Prompts 1, 2, 3, 4 of two ranks, whose responses have other widths: one rank has them in order, four one each."""
    saved = [saved_rollouts([rollout(kind, [1, 3])]), saved_rollouts([rollout(kind, [2, 4], longest=2)])]
    for world_size, own in ((1, [[1, 2, 3, 4]]), (4, [[1], [2], [3], [4]])):
        for rank, prompts in enumerate(own):
            request = RolloutRequest(torch.zeros(len(prompts), 1), torch.ones(len(prompts), 1), SAMPLING, (), 2)
            (found,) = rollouts_of(saved, [request], ranks(world_size, rank))
            assert found.prompt_ids_BP.flatten().tolist() == [prompt for prompt in prompts for _ in range(2)]
            firsts = found.response_ids_BR[:, 0].tolist()
            assert firsts == [10 * prompt + sample for prompt in prompts for sample in range(2)]
            assert len(found.records) == (2 * len(prompts) if kind == "turns" else 0)
