"""Step 3 by its own parts: equal to plain PyTorch, the same at any number of ranks and ZeRO stage, with each row on one
rank or over several, and the ratios, log-probabilities, advantages and collectives that PPO relies on."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.invariants import plain_ppo
from tests.invariants import ppo_program as program
from tests.invariants.plain import residual
from tests.invariants.ppo_program import EVERY, ONE, ORDINARY, TWO, World

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def cases(section: str, *without: tuple[World, str]) -> pytest.MarkDecorator:
    """Every case of the section on each number of ranks, marked `long` unless every run has it."""
    found = []
    for world, names in EVERY[section].items():
        for case in names:
            marks = [] if case in ORDINARY[section].get(world, ()) else [pytest.mark.long]
            if (world, case) not in without:
                found.append(pytest.param(world, case, marks=marks, id=f"{world[0]}_by_{world[1]}-{case}"))
    return pytest.mark.parametrize("world, layout", found)


def of_two_ranks(section: str, *with_worlds: World) -> pytest.MarkDecorator:
    """The same of two ranks alone, or of what every run has in each of `with_worlds`."""
    ordinary = set.intersection(*(set(ORDINARY[section].get(world, ())) for world in (TWO, *with_worlds)))
    marks = {case: [] if case in ordinary else [pytest.mark.long] for case in EVERY[section][TWO]}
    return pytest.mark.parametrize("layout", [pytest.param(case, marks=marks[case]) for case in marks])


@pytest.fixture
def section(launched):
    """section(name, world) -> what rank 0 reports of it."""
    return lambda name, world: launched("ppo_program", world[0], size=world[1])[1][0][name]


@pytest.fixture
def kept(launched):
    """kept(world, name) -> weights that a section left behind."""
    return lambda world, name: torch.load(launched("ppo_program", world[0], size=world[1])[0] / f"{name}.pt")


def pairs_of(iteration: dict) -> list[tuple[list[int], list[int]]]:
    """All ranks' prompts and responses in the order of the stream, which deals them out one by one."""
    parts = [rank["pairs"] for rank in iteration["ranks"]]
    return [(prompt, response) for turn in zip(*parts, strict=True) for prompt, response in turn]


def learned(figures: dict[str, float]) -> dict[str, float]:
    """What was learned: without times, and without the tokens each rank computed, which depend on how the sequences
    were dealt to ranks and forwards (padding, and a shared prompt once a forward)."""
    assert figures["train/rank_tokens_max"] >= figures["train/rank_tokens_min"] > 0
    return {k: v for k, v in figures.items() if "time" not in k and not k.startswith("train/rank_tokens_")}


def first_weights(models: Path, role: str, mixture: bool = False) -> torch.nn.Module:
    if role in ("actor", "thinker"):
        name, auto_class = "mixture" if mixture else role, AutoModelForCausalLM
    else:
        name, auto_class = "mixture_scalar" if mixture else "scalar", AutoModelForSequenceClassification
    model = auto_class.from_pretrained(models / name, dtype=torch.float32).double()
    if mixture:
        model.set_experts_implementation("eager")  # the others compute in no float64
    return model


@cache
def plain_outcome(models: Path, pairs: tuple, mixture: bool = False) -> plain_ppo.Outcome:
    actor, critic = (first_weights(models, role, mixture) for role in ("actor", "critic"))
    return plain_ppo.ppo(actor, critic, [[(list(p), list(r)) for p, r in iteration] for iteration in pairs])


def frozen(pairs: list) -> tuple:
    return tuple((tuple(prompt), tuple(response)) for prompt, response in pairs)


@cases("iterations")
def test_two_iterations_equal_plain_pytorch(section, kept, models, world: World, layout: str):
    found = section("iterations", world)[layout]
    want = check_iterations(found["iterations"], models, lambda role: kept(world, f"{role}_z{layout}"))
    # The update has to hold something of everything: clipped and free tokens, ended and cut responses.
    assert 0.05 < want.figures[0]["actor/clip_fraction"] < 0.9
    assert len({len(response) for _, response in pairs_of(found["iterations"][0])}) > 2
    assert len(found["before"]) == program.EVAL_PROMPTS
    for iteration in found["iterations"]:  # log-probabilities of the rollout and of the training forward
        assert max(rank["apart"] for rank in iteration["ranks"]) < 1e-5


@cases("mixtures")
def test_mixtures_of_experts_balance_over_the_minibatch_and_its_texts(section, kept, models, world: World, layout: str):
    told = section("mixtures", world)[layout]
    check_iterations(told, models, lambda role: kept(world, f"{role}_mixture_{layout}"), mixture=True)


def check_iterations(told: list[dict], models: Path, kept: Any, mixture: bool = False) -> plain_ppo.Outcome:
    """Compare what `ppo_program.iterated` left behind with plain PyTorch. kept: gives the weights of a role."""
    want = plain_outcome(models, tuple(frozen(pairs_of(iteration)) for iteration in told), mixture)
    for iteration, scores, figures in zip(told, want.scores, want.figures, strict=True):
        got_scores = [score for turn in zip(*(r["scores"] for r in iteration["ranks"]), strict=True) for score in turn]
        assert got_scores == pytest.approx(scores, abs=1e-5)
        assert_figures(iteration["figures"], figures)
    for role, model in (("actor", want.actor), ("critic", want.critic)):
        got, wanted = kept(role), dict(model.named_parameters())
        start = dict(first_weights(models, role, mixture).named_parameters())
        update = torch.cat([(wanted[key] - start[key]).detach().flatten() for key in wanted])
        apart = torch.cat([(got[key].double() - wanted[key].detach()).flatten() for key in wanted])
        assert float(apart.norm() / update.norm()) < 2e-4
        assert abs(float(apart @ update / (update @ update))) < 1e-6
        assert abs(float(apart.mean() / apart.std())) * math.sqrt(apart.numel()) < 6.0
    return want


def assert_figures(got: dict[str, float], want: dict[str, float]) -> None:
    assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-4, abs=1e-5)


@cases("grpo")
def test_grpo_equals_plain_pytorch(section, kept, models, world: World, layout: str):
    told, epochs = section("grpo", world)[layout], program.GRPO_LAYOUTS[layout][2]
    assert [iteration["read_old"] for iteration in told] == [epochs > 1] * program.ITERATIONS

    def joined(name: str) -> list[list]:
        return [[item for rank in iteration["ranks"] for item in rank[name]] for iteration in told]

    ended = joined("ended")
    assert 2 < sum(ended[0]) < len(ended[0])  # some responses are left out of the loss
    models_of = (first_weights(models, role) for role in ("actor", "critic"))
    want = plain_ppo.grpo(*models_of, joined("pairs"), ended, joined("scores"), epochs)
    for iteration, got_scores, scores, figures in zip(told, joined("scores"), want.scores, want.figures, strict=True):
        assert got_scores == pytest.approx(scores, abs=1e-5)
        assert_figures(iteration["figures"], figures)
        assert not any(name.startswith("critic/") for name in iteration["figures"])
    assert (want.figures[1]["actor/clip_fraction"] > 0.02) == (epochs > 1)
    wanted = dict(want.actor.named_parameters())
    assert residual(kept(world, f"grpo_actor_{layout}"), wanted, first_weights(models, "actor")) < 2e-4


@of_two_ranks("iterations", ONE)
def test_two_ranks_equal_one(section, kept, models, layout: str):
    """The same prompts and seeds: the same responses, evaluations and weights."""
    one, two = (section("iterations", world)[layout] for world in (ONE, TWO))
    for mine, theirs in zip(one["iterations"], two["iterations"], strict=True):
        assert pairs_of(mine) == pairs_of(theirs)
        assert learned(mine["figures"]) == pytest.approx(learned(theirs["figures"]), rel=1e-4, abs=1e-5)
    assert one["before"] == pytest.approx(two["before"], abs=1e-4)
    assert one["after"] == pytest.approx(two["after"], abs=1e-4)
    assert one["before"] != pytest.approx(one["after"], abs=1e-2)
    for role in ("actor", "critic"):
        mine, theirs = (kept(world, f"{role}_z{layout}") for world in (ONE, TWO))
        assert mine.keys() == theirs.keys()
        assert residual(theirs, mine, first_weights(models, role)) < 2e-4
        assert max(float((mine[key] - theirs[key]).abs().max()) for key in mine) < 1e-3  # rates of 3e-3 and 1e-2


@cases("paths", (ONE, "0_packed"))
def test_parallel_paths_on_any_ranks_are_those_of_one(section, kept, models, world: World, layout: str):
    """The same responses, figures and weights, packed or padded, at any stage."""
    for mine, theirs in zip(section("paths", ONE)["0_packed"], section("paths", world)[layout], strict=True):
        drawn = [sorted(ids for rank in each["ranks"] for ids in rank["responses"]) for each in (mine, theirs)]
        assert drawn[0] == drawn[1] and max(rank["apart"] for rank in theirs["ranks"]) < 1e-5
        assert sum(rank["with_paths"] for rank in theirs["ranks"]) >= 4
        figures = {name: value for name, value in learned(theirs["figures"]).items() if name in mine["figures"]}
        assert learned(mine["figures"]) == pytest.approx(figures, rel=1e-4, abs=1e-5)
    first, second = kept(ONE, "paths_actor_0_packed"), kept(world, f"paths_actor_{layout}")
    assert residual(second, first, first_weights(models, "thinker")) < 5e-4  # what Adam makes of rounding


@of_two_ranks("minibatches", ONE)
def test_two_ranks_make_the_same_minibatches_as_one(section, kept, models, layout: str):
    for mine, theirs in zip(*(section("minibatches", world)[layout] for world in (ONE, TWO)), strict=True):
        assert learned(mine) == pytest.approx(learned(theirs), rel=1e-4, abs=1e-5)
        assert mine["train/minibatches"] == 4 * program.EPOCHS and mine["actor/clip_fraction"] > 0.02
    for role in ("actor", "critic"):
        mine, theirs = (kept(world, f"minibatches_{role}_{layout}") for world in (ONE, TWO))
        assert residual(theirs, mine, first_weights(models, role)) < 1e-3


@cases("reused")
def test_forwards_that_read_and_learn_train_what_forwards_of_their_own_do(section, world: World, layout: str):
    found = section("reused", world)[layout]
    for mine, theirs in zip(*found["figures"], strict=True):
        assert learned(mine) == pytest.approx(learned(theirs), rel=1e-4, abs=1e-5)
    assert max(found["apart"]) < 2e-4
    apart, together = found["forwards"]
    on_policy_grpo, actor_too = program.REUSED[layout][2], program.REUSED[layout][4]
    if on_policy_grpo:  # it reads no old log-probabilities
        assert apart == together
    else:  # actor and critic read and learn
        assert 4 * together == (2 if actor_too else 3) * apart


@cases("first_minibatch")
def test_the_first_minibatch_has_ratio_one(section, world: World, layout: str):
    off = 1e-5 if program.FIRST_MINIBATCHES[layout][1] == "fp32" else 1e-3
    for figures in section("first_minibatch", world)[layout]:
        assert figures["actor/ratio"] == pytest.approx(1.0, abs=off)
        assert figures["actor/update_kl"] == pytest.approx(0.0, abs=off)
        assert figures["actor/clip_fraction"] == 0.0
        assert figures["rollout/logprob_mismatch"] < (1e-5 if off == 1e-5 else 3e-2)


@of_two_ranks("iterations")
def test_advantages_are_whitened_over_all_ranks(section, layout: str):
    for iteration in section("iterations", TWO)[layout]["iterations"]:
        moments = [rank["moments"] for rank in iteration["ranks"]]
        count, total, squares = (sum(part) for part in zip(*moments, strict=True))
        assert total / count == pytest.approx(0.0, abs=1e-5)
        assert squares / (count - 1) == pytest.approx(1.0, abs=1e-4)
        for own_count, own_total, _ in moments:  # and not on each rank by itself
            assert abs(own_total / own_count) > 1e-2


@cases("nothing_to_learn")
def test_without_advantages_and_value_errors_nothing_moves(section, world: World, layout: str):
    found = section("nothing_to_learn", world)[layout]
    assert found["moved"] == [0.0, 0.0]
    assert min(found["moved_by_advantages"]) > 1e-3


def test_zero3_gathers_the_weights_once_a_rollout_not_once_a_token(section):
    few, many = section("gathers", TWO)["2"], section("gathers", TWO)["12"]
    assert few == many
    assert few.get("c10d::_allgather_base_", 0) > 0, f"no all-gather was counted, only {few}"


@cases("lora")
def test_a_lora_actors_reference_is_the_adapter_off(section, models, world: World, layout: str):
    found = section("lora", world)[layout]
    base = first_weights(models, "actor")
    with torch.no_grad():
        start = plain_ppo.logprobs(base, (program.LORA_PROMPT, program.LORA_RESPONSE)).tolist()
    assert found["reference"] == pytest.approx(start, abs=1e-5)
    assert found["actor"] != pytest.approx(start, abs=1e-2)
    assert found["apart"] < 1e-5  # the rollout saw the merged weights
    # Adapters start from random numbers: those of the first rank, whatever the ranks and the stage.
    assert found["actor"] == pytest.approx(section("lora", ONE)["0"]["actor"], abs=1e-4)


@pytest.mark.parametrize("actor", program.ACTORS)
@pytest.mark.parametrize("how", ["wider", "alone", "backwards", "pad_is_eos"])
def test_responses_do_not_depend_on_their_batch(section, actor: str, how: str):
    """Left padding of any width and token, any order, any neighbours: the same responses from the same seeds."""
    found = section("layouts_of_prompts", ONE)[actor]
    assert len(found[how]) == program.PROMPTS_PER_ROLLOUT
    for (want, want_logprobs), (got, got_logprobs) in zip(found["plain"], found[how], strict=True):
        assert got == want
        assert got_logprobs == pytest.approx(want_logprobs, abs=1e-5)


@pytest.mark.parametrize("actor", program.ACTORS)
def test_left_padded_rollouts_equal_the_training_forward_which_pads_on_the_right(section, actor: str):
    assert section("layouts_of_prompts", ONE)[actor]["apart"] < 1e-5
