"""Step 3 with each row over two ranks equals plain PyTorch, and itself on one: reference, reward model, actor and
critic read and learn slices, responses are drawn by each rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.invariants import plain_ppo, ppo_program, sliced_ppo_program
from tests.invariants.test_ppo_exact import check_iterations, first_weights, learned

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def cases(section: str) -> pytest.MarkDecorator:
    ordinary = sliced_ppo_program.ORDINARY.get(section, ())
    marked = [
        pytest.param(case, marks=[] if case in ordinary else [pytest.mark.long])
        for case in sliced_ppo_program.EVERY[section]
    ]
    return pytest.mark.parametrize("layout", marked)


@pytest.fixture
def shared(launched) -> Callable[[str], tuple[Path, dict]]:
    """shared(section) -> the folder of the run whose rows two ranks share, and what it reports of the section."""

    def found(section: str) -> tuple[Path, dict]:
        out, reports = launched("sliced_ppo_program", sliced_ppo_program.SIZE)
        return out, reports[0][section]

    return found


@cases("iterations")
def test_iterations_equal_plain_pytorch(shared, models, layout: str):
    out, found = shared("iterations")
    check_iterations(found[layout]["iterations"], models, out, f"z{layout}")
    assert len(found[layout]["before"]) == ppo_program.EVAL_PROMPTS
    for iteration in found[layout]["iterations"]:  # log-probabilities of rollouts, which know nothing of slices
        assert max(rank["apart"] for rank in iteration["ranks"]) < 1e-5


@cases("grpo")
def test_grpo_equals_plain_pytorch(shared, models, layout: str):
    out, found = shared("grpo")
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
def test_parallel_paths_are_those_of_one_rank(launched, shared, models, layout: str):
    one_out, reports = launched("ppo_program", 1)
    out, found = shared("paths")
    for mine, theirs in zip(reports[0]["paths"]["0_packed"], found[layout], strict=True):
        drawn = [sorted(ids for rank in each["ranks"] for ids in rank["responses"]) for each in (mine, theirs)]
        assert drawn[0] == drawn[1]
        figures = {name: value for name, value in learned(theirs["figures"]).items() if name in mine["figures"]}
        assert learned(mine["figures"]) == pytest.approx(figures, rel=1e-4, abs=1e-5)
    one, other = torch.load(one_out / "paths_0_packed.pt"), torch.load(out / f"paths_{layout}.pt")
    assert residual(other, one, models, "thinker") < 5e-4


@cases("tries")
def test_conversations_that_fork_train_as_separate_sequences(launched, shared, models, layout: str):
    one_out, reports = launched("ppo_program", 1)
    out, found = shared("tries")
    for one, other in zip(reports[0]["tries"]["0_padded"]["figures"], found[layout]["figures"], strict=True):
        same = {key: value for key, value in other.items() if not key.endswith("grad_norm")}  # none at stage 0
        assert {key: one[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-5)
    for role in ("actor", "critic"):
        one, other = torch.load(one_out / f"tries_{role}_0_padded.pt"), torch.load(out / f"tries_{role}_{layout}.pt")
        assert residual(other, one, models, role) < 1e-3


@cases("lora")
def test_a_lora_actors_reference_is_the_adapter_off(shared, models, layout: str):
    found, base = shared("lora")[1][layout], first_weights(models, "actor")
    with torch.no_grad():
        start = plain_ppo.logprobs(base, (ppo_program.LORA_PROMPT, ppo_program.LORA_RESPONSE)).tolist()
    assert found["reference"] == pytest.approx(start, abs=1e-5)
    assert found["actor"] != pytest.approx(start, abs=1e-2) and found["apart"] < 1e-5
