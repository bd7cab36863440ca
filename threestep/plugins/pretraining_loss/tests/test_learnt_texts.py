"""The pretraining loss: by hand, in a step beside the policy's, and from where a stopped run goes on."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.step3_ppo.learning.test_learning import PLANS, made_roles, random_experience, stepped
from threestep.plugins.pretraining_loss.learnt_texts import LearntTexts, pretraining_loss, text_batches
from training.utils.contracts.rows import TextBlock
from training.utils.layout.trie import SequenceLayout

pytestmark = pytest.mark.unit


def test_the_pretraining_loss_by_hand():
    logprobs_M = torch.log(torch.tensor([0.5, 0.125])).requires_grad_()
    loss = pretraining_loss(logprobs_M, tokens_in_step=6)
    assert loss.item() == pytest.approx(4 * math.log(2) / 6)
    loss.backward()
    assert logprobs_M.grad.tolist() == pytest.approx([-1 / 6, -1 / 6])


@pytest.mark.parametrize("coefficient", [0.0, 2.0])
def test_texts_are_reported_before_their_coefficient_which_may_be_0(coefficient):
    """Two texts of 5 and 3 tokens, 6 predicted: the figure is their mean negative log-likelihood; at 0 the gradient is
    that without texts."""
    blocks = [TextBlock(0, np.array(ids, dtype=np.int32)) for ids in ([3, 9, 4, 8, 5], [7, 3, 6])]
    made, roles = random_experience(0), made_roles(with_critic=False)
    beside = text_batches(blocks, coefficient, roles.actor, SequenceLayout(PLANS[1], 0))
    figures = stepped(PLANS[1], made, roles, beside=beside, advantage="grpo")
    plain = tiny_causal_lm("llama", seed=1, dtype=torch.float64)
    texts = [torch.tensor(block.input_ids, dtype=torch.int64) for block in blocks]
    drawn = [(plain(ids[None]).logits[0, :-1], ids[1:, None]) for ids in texts]
    loss = -sum(logits.log_softmax(-1).gather(-1, ids).sum() for logits, ids in drawn) / 6
    assert figures["actor/pretraining_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    (coefficient * loss).backward()
    without = made_roles(with_critic=False)
    stepped(PLANS[1], made, without, advantage="grpo")
    own = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(roles.actor.gradient(), without.actor.gradient() + own, rtol=1e-6, atol=1e-10)


def test_a_run_that_resumes_goes_on_with_the_next_blocks():
    blocks = [TextBlock(row, np.full(4, row, dtype=np.int32)) for row in range(10)]
    actor = SimpleNamespace(ranks=SimpleNamespace(device=torch.device("cpu")))
    layout = SequenceLayout(PLANS[1], 0)

    def rows_of(learnt):
        taken = learnt.beside(4, actor, layout)
        return [number for batch in taken for number in batch.rows.input_ids_NT.flatten().tolist()]

    whole, stopped, resumed = (LearntTexts(blocks, 1.0, 7) for _ in range(3))
    first = [rows_of(whole), rows_of(whole)]
    assert rows_of(stopped) == first[0]
    resumed.load_state_dict(stopped.state_dict())
    assert rows_of(resumed) == first[1] != first[0]
