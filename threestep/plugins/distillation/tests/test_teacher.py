"""A teacher on packed rows with shared prompts and equal beginnings is the teacher of each sequence alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.distillation.divergence import divergence, with_rest
from threestep.plugins.distillation.settings import DivergenceSettings
from threestep.plugins.distillation.teacher import Teacher
from training.utils.contracts.documents import TokenSequence
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.training_engine import FrozenModel
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.token_model import PolicyModel, Readout

TEMPERATURE = 0.8
SEQUENCES = [([5, 6, 7], [9, 10, 11, 2]), ([5, 6, 7], [9, 10, 4]), ([5, 6, 7], [9, 10, 11, 2]), ([8], [3, 12])]


def sequences() -> list[TokenSequence]:
    found = []
    for prompt, response in SEQUENCES:
        is_target = torch.tensor([False] * len(prompt) + [True] * len(response))
        found.append(TokenSequence(torch.tensor([*prompt, *response]), is_target))
    return found


def teacher_of(model: Any, settings: DivergenceSettings) -> Teacher:
    """A teacher of `model`, by 64 tokens."""
    policy = PolicyModel(model)
    ranks: Any = SimpleNamespace(rank=0)
    return Teacher(FrozenModel(policy, EngineSettings(), ranks), policy.target_head, settings, 64)


def plainly(
    student: torch.nn.Module, teacher: torch.nn.Module, settings: DivergenceSettings, temperature: float = TEMPERATURE
) -> torch.Tensor:
    """The sum over response tokens, one sequence at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response in SEQUENCES:
        ids = torch.tensor([[*prompt, *response]])
        here = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            theirs = torch.log_softmax(teacher(input_ids=ids).logits[0, here] / temperature, dim=-1)
        own = torch.log_softmax(student(input_ids=ids).logits[0, here] / temperature, dim=-1)
        if settings.top_k:
            top = theirs.topk(settings.top_k, dim=-1).indices
            own, theirs = with_rest(own, top), with_rest(theirs, top)
        total = total + divergence(own, theirs, settings).sum()
    return total


@pytest.mark.parametrize(
    "settings",
    [DivergenceSettings("reverse"), DivergenceSettings("forward", top_k=3), DivergenceSettings("js", 0.3, 5)],
    ids=str,
)
@pytest.mark.parametrize("shared", [None, 0, 1])  # padded; a prompt is shared; beginnings of responses too
def test_any_layout_equals_single_sequences(settings: DivergenceSettings, shared: int | None):
    student, teacher = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    policy, reader = PolicyModel(student), teacher_of(teacher, settings)
    packed = shared is not None
    plan = PlanSettings(1, None, 2 if packed else 4, packed, 20 if packed else 0)
    plan = plan if not shared else PlanSettings(1, None, 2, True, 20, least_shared_tokens=shared)
    total = torch.zeros((), dtype=torch.float64)
    for _, rows in rank_share(sequences(), SequenceLayout(plan, 0), torch.device("cpu")):
        total = total + policy(rows, Readout(TEMPERATURE), compare=reader.compare).compared.total
    expected = plainly(student, teacher, settings)
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    weights = list(student.parameters())
    for got, wanted in zip(torch.autograd.grad(total, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # norms round to float32


def test_vocabularies_of_other_widths_compare_what_both_have():
    """The teacher's is wider, and the student's pad token is one that it lacks, as if filled up."""
    student, teacher = tiny_causal_lm("llama", torch.float64, 0), tiny_causal_lm("llama", torch.float64, 1)
    wider = tiny_causal_lm("llama", torch.float64, 1, vocab_size=72)
    with torch.no_grad():
        wide, plain_weights = dict(wider.named_parameters()), dict(teacher.named_parameters())
        for name, weight in plain_weights.items():
            wide[name][: len(weight)] = weight
    settings = DivergenceSettings()
    policy, reader = PolicyModel(student), teacher_of(wider, settings)
    [(_, rows)] = rank_share(sequences(), SequenceLayout(PlanSettings(1, None, 4, False, 0), 63), torch.device("cpu"))
    rows.input_ids_NT[rows.segment_ids_NT < 0] = 63
    got = policy(rows, Readout(TEMPERATURE), compare=reader.compare).compared.total
    assert got.item() == pytest.approx(plainly(student, teacher, settings).item(), rel=1e-9)
