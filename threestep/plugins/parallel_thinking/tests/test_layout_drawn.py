"""A rank's share of responses that were drawn side by side."""

from __future__ import annotations

import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.layout.test_trie_rank_share import CPU, PAD
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS
from training.utils.contracts.documents import TokenSequence, join
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, documents_of, rank_share
from training.utils.models.token_model import PolicyModel


def in_parallel() -> list[TokenSequence]:
    """Samples of two prompts, with blocks of two paths, cut ones, and tags out of place; some tags are no target."""
    block, cut, stray = [3, 4, 20, 21, 5, 4, 22, 5, 6], [3, 30, 4, 20, 5, 4, 22], [5, 20, 6, 3, 21]
    responses = [
        [11, *block, 12],
        [*block, 3, 4, 9, 5, 4, 8, 7, 5, 6, 13],
        cut,
        stray,
        [*block[:4], 5, *block[5:]],
        [17, *cut],
    ]
    samples = [join(torch.arange(4 + index % 2) + 40, torch.tensor(ids)) for index, ids in enumerate(responses)]
    for sample in samples:
        sample.is_target[(sample.input_ids == 6) & (torch.arange(len(sample)) > 8)] = False
    return samples


def test_packed_shared_and_padded_drawn_responses_are_one_gradient():
    """Blocks in parallel in each form; a form without the tags computes something else."""
    model = tiny_causal_lm("llama", torch.float64)
    samples = in_parallel()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(int(sample.is_target.sum()), generator=generator, dtype=torch.float64) for sample in samples]
    plans = {
        "packed": PlanSettings(1, 400, 8, True, 400, form=TAGS),
        "in_micro_batches": PlanSettings(2, 40, 8, True, 40, form=TAGS),
        "padded": PlanSettings(2, max_rows_per_micro_batch=2, form=TAGS),
        "in_one_piece": PlanSettings(1, max_rows_per_micro_batch=6),
    }
    found = {}
    for name, plan in plans.items():
        model.zero_grad()
        logprobs: dict[int, torch.Tensor] = {}
        for indices, rows in (
            part for rank in range(plan.ranks) for part in rank_share(samples, SequenceLayout(plan, PAD, rank), CPU)
        ):
            read_M = PolicyModel(model)(rows).logprobs_M
            split = read_M.split([len(weights[index]) for index in indices]) if indices else ()
            logprobs |= {index: part.detach() for index, part in zip(indices, split, strict=True)}
            if indices:
                sum((part * weights[index]).sum() for index, part in zip(indices, split, strict=True)).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found[name] = torch.cat([logprobs[index] for index in range(len(samples))]), gradient
    for name in ("in_micro_batches", "padded"):
        for one, other in zip(found["packed"], found[name], strict=True):
            # Norms compute in float32: the gradient of a prompt is rounded in each of its copies.
            assert float((one - other).abs().max()) < 1e-6 * float(one.abs().max()), name
    assert not torch.allclose(found["packed"][0], found["in_one_piece"][0], atol=1e-3)


def test_texts_that_quote_tags_stay_in_one_piece():
    """What shares no prompt was not drawn: unsupervised texts."""
    plan = PlanSettings(1, 400, 8, True, 400, form=TAGS)
    ((_, rows),) = rank_share(in_parallel()[:1], SequenceLayout(plan, PAD, 0), CPU, sharing=False)
    assert rows.segments is None
    ((_, rows),) = rank_share(in_parallel()[:1], SequenceLayout(plan, PAD, 0), CPU)
    assert rows.segments is not None and documents_of(in_parallel()[:1], plan)[0].tokens == rows.input_ids_NT.shape[1]
