"""Step 3 with each row over two or four ranks equals plain PyTorch, and itself on one: reference, reward model, actor
and critic read and learn slices, responses are drawn by each rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants import plain_ppo, ppo_program, sliced_ppo_program
from tests.invariants.test_ppo_exact import check_iterations, first_weights, learned

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def cases(section: str) -> pytest.MarkDecorator:
    found = []
    for (ranks, size), sections in sliced_ppo_program.CASES.items():
        ordinary = sliced_ppo_program.ORDINARY.get(section, ()) if ranks == 2 else ()
        for case in sections.get(section, ()):
            marks = [] if case in ordinary else [pytest.mark.long]
            found.append(pytest.param((ranks, size), case, marks=marks, id=f"{ranks}_by_{size}-{case}"))
    return pytest.mark.parametrize("ranks, layout", found)


@pytest.fixture
def shared(launched) -> Callable[[tuple[int, int], str], tuple[Path, list[Any]]]:
    """shared((ranks, those that share a row), section) -> the folder of the run, and what each rank reports."""

    def found(ranks: tuple[int, int], section: str) -> tuple[Path, list[Any]]:
        out, reports = launched("sliced_ppo_program", ranks[0])
        return out / str(ranks[1]), [each[str(ranks[1])][section] for each in reports]

    return found


@cases("iterations")
def test_iterations_equal_plain_pytorch(shared, models, ranks, layout: str):
    out, (found, *_) = shared(ranks, "iterations")
    check_iterations(found[layout]["iterations"], models, out, f"z{layout}")
    assert len(found[layout]["before"]) == ppo_program.EVAL_PROMPTS
    for iteration in found[layout]["iterations"]:  # log-probabilities of rollouts, which know nothing of slices
        assert max(rank["apart"] for rank in iteration["ranks"]) < 1e-5


@cases("mixtures")
def test_routers_balance_over_the_minibatch_and_its_texts(shared, models, ranks, layout: str):
    out, (found, *_) = shared(ranks, "mixtures")
    check_iterations(found[layout], models, out, f"mixture_{layout}", mixture=True)


@cases("grpo")
def test_grpo_equals_plain_pytorch(shared, models, ranks, layout: str):
    out, (found, *_) = shared(ranks, "grpo")
    told, epochs = found[layout], ppo_program.GRPO_LAYOUTS[layout][2]

    def joined(name: str) -> list[list]:
        return [[item for rank in iteration["ranks"] for item in rank[name]] for iteration in told]

    models_of = (first_weights(models, role) for role in ("actor", "critic"))
    want = plain_ppo.grpo(*models_of, joined("pairs"), joined("ended"), joined("scores"), epochs)
    for iteration, figures in zip(told, want.figures, strict=True):
        assert {name: iteration["figures"][name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-5)
    assert residual(torch.load(out / f"grpo_{layout}.pt"), dict(want.actor.named_parameters()), models) < 2e-4


def residual(got: dict, wanted: dict, models: Path, role: str = "actor") -> float:
    """Distance of weights, as a share of the way that they went."""
    start = dict(first_weights(models, role).named_parameters())
    update = torch.cat([(wanted[key].double() - start[key]).detach().flatten() for key in start])
    apart = torch.cat([(got[key].double() - wanted[key].double()).detach().flatten() for key in start])
    return float(apart.norm() / update.norm())


@cases("paths")
def test_parallel_paths_are_those_of_one_rank(launched, shared, models, ranks, layout: str):
    one_out, reports = launched("ppo_program", 1)
    out, (found, *_) = shared(ranks, "paths")
    for mine, theirs in zip(reports[0]["paths"]["0_packed"], found[layout], strict=True):
        drawn = [sorted(ids for rank in each["ranks"] for ids in rank["responses"]) for each in (mine, theirs)]
        assert drawn[0] == drawn[1]
        figures = {name: value for name, value in learned(theirs["figures"]).items() if name in mine["figures"]}
        assert learned(mine["figures"]) == pytest.approx(figures, rel=1e-4, abs=1e-5)
    one, other = torch.load(one_out / "paths_0_packed.pt"), torch.load(out / f"paths_{layout}.pt")
    assert residual(other, one, models, "thinker") < 5e-4


@cases("tries")
def test_conversations_that_fork_train_as_separate_sequences(launched, shared, models, ranks, layout: str):
    one_out, reports = launched("ppo_program", 1)
    out, (found, *_) = shared(ranks, "tries")
    for one, other in zip(reports[0]["tries"]["0_padded"]["figures"], found[layout]["figures"], strict=True):
        same = {key: value for key, value in other.items() if not key.endswith("grad_norm")}  # none at stage 0
        assert {key: one[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-5)
    for role in ("actor", "critic"):
        one, other = torch.load(one_out / f"tries_{role}_0_padded.pt"), torch.load(out / f"tries_{role}_{layout}.pt")
        assert residual(other, one, models, role) < 1e-3


@cases("lora")
def test_a_lora_actors_reference_is_the_adapter_off(shared, models, ranks, layout: str):
    found, base = shared(ranks, "lora")[1][0][layout], first_weights(models, "actor")
    with torch.no_grad():
        start = plain_ppo.logprobs(base, (ppo_program.LORA_PROMPT, ppo_program.LORA_RESPONSE)).tolist()
    assert found["reference"] == pytest.approx(start, abs=1e-5)
    assert found["actor"] != pytest.approx(start, abs=1e-2) and found["apart"] < 1e-5
