"""NEFTune and the z-loss: by hand, in any layout, and what the flags of both do not go with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.sft_losses.arguments import RegularizerArguments
from threestep.plugins.sft_losses.neftune import embedding_noise
from threestep.plugins.sft_losses.regularizer import NoiseAndZLoss, regularizer_of_flags
from threestep.plugins.sft_losses.z_loss import z_loss
from training.step1_sft.arguments import check_flags
from training.step1_sft.regularizer import regularizer_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, plain
from training.utils.contracts.token_rows import PAD_SEGMENT
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.added import NO_FLAGS, added_flags
from training.utils.flags.flags import note_mistakes
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel

PAD = 0


def document(length: int) -> Document:
    return plain(TokenSequence(torch.arange(1, length + 1), torch.arange(length) > 0))


def test_noise_of_a_sequence_by_hand():
    # alpha 6, 9 tokens of width 4: 6 / sqrt(36) = 1. The same sequence of 36 tokens: half of that.
    for length, scale in ((9, 1.0), (36, 0.5)):
        noise_NTE = embedding_noise(packed_rows([[document(length)]], PAD), [7], 6.0, 4)
        drawn = torch.empty(length, 4).uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(7))
        torch.testing.assert_close(noise_NTE, scale * drawn.unsqueeze(0), rtol=1e-6, atol=0)
    assert not embedding_noise(packed_rows([], PAD), [], 5.0, 3).any()
    with pytest.raises(ValueError):  # another number of seeds
        embedding_noise(packed_rows([[document(3)]], PAD), [1, 2], 5.0, 3)


def test_noise_is_uniform_around_zero():
    length, width, alpha = 200, 512, 5.0
    most = alpha / math.sqrt(length * width)
    noise = embedding_noise(packed_rows([[document(length)]], PAD), [3], alpha, width).flatten() / most
    # A uniform number of [-1, 1] has mean 0, variance 1/3 and fourth moment 1/5. Of n = 102,400 of them the mean
    # strays by sqrt(1/3 / n) = 0.0018 and the mean square by sqrt((1/5 - 1/9) / n) = 0.0009.
    assert noise.abs().max() <= 1.0 and noise.abs().max() > 0.999
    assert abs(float(noise.mean())) < 5 * 0.0018
    assert abs(float(noise.square().mean()) - 1 / 3) < 5 * 0.0009
    # Its norm is what the paper names: alpha / sqrt(3) on average, whatever the length.
    assert float((noise * most).norm()) == pytest.approx(alpha / math.sqrt(3), rel=0.01)


def test_each_sequence_has_the_noise_of_its_seed_and_length_in_any_layout():
    lengths, seeds = [5, 2, 8], [11, 12, 13]
    alone = [
        embedding_noise(packed_rows([[document(length)]], PAD), [seed], 5.0, 6)[0]
        for length, seed in zip(lengths, seeds, strict=True)
    ]
    one, two, three = (document(length) for length in lengths)
    padded = packed_rows([[one], [two], [three]], PAD, min_width=10)
    packed = packed_rows([[three, one], [two]], PAD)
    in_padded = embedding_noise(padded, seeds, 5.0, 6)
    in_packed = embedding_noise(packed, [13, 11, 12], 5.0, 6)
    for row, noise in enumerate(alone):
        assert torch.equal(in_padded[row, : len(noise)], noise)
    assert torch.equal(in_packed[0], torch.cat([alone[2], alone[0]]))
    assert torch.equal(in_packed[1, :2], alone[1])
    for rows, noise in ((padded, in_padded), (packed, in_packed)):
        assert not noise[rows.segment_ids_NT == PAD_SEGMENT].any()
    assert not torch.equal(alone[0][:2], alone[1])  # seeds differ


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma3_text", "gemma2"])
def test_a_policy_adds_noise_where_the_embeddings_enter(family):
    """As a forward hook on the embedding table, the paper's own way; OPT's table is narrower than its hidden size."""
    model = tiny_causal_lm(family, torch.float64)
    policy = PolicyModel(model)
    rows = packed_rows([[document(9)], [document(6)]], PAD)
    noise = embedding_noise(rows, [1, 2], 5.0, policy.embedding_width)
    assert noise.shape[-1] == model.get_input_embeddings().weight.shape[1]
    with torch.no_grad():
        got = policy(rows, noise_NTE=noise).logprobs_M
        without = policy(rows).logprobs_M
        hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: out + noise.double())
        expected = policy(rows).logprobs_M
        hook.remove()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert float((got - without).abs().max()) > 1e-3


pytestmark = pytest.mark.unit


@pytest.mark.parametrize("flag", ["neftune_alpha", "z_loss_coef"])
def test_what_is_added_is_off_and_never_negative(flag):
    assert getattr(RegularizerArguments(), flag) == 0.0
    mistakes = Mistakes()
    note_mistakes(RegularizerArguments(**{flag: -1.0}), mistakes)
    assert mistakes.sentences == [f"--{flag} expects 0 or more, got -1.0"]


def added(alpha: float = 0.0, z_coef: float = 0.0) -> Any:
    kind = added_flags("step1_sft")
    return kind(**{"sft_losses_RegularizerArguments": RegularizerArguments(alpha, z_coef)})


def test_a_run_has_the_regularizer_of_its_flags():
    off = regularizer_of(NO_FLAGS)
    assert not off.draws_noise and not off.losses and not off.why_not_shared
    found = regularizer_of(added(5.0, 1e-4))
    assert isinstance(found, NoiseAndZLoss) and found.draws_noise and found.losses == ("z_loss",)
    assert found.recorded == {"z_loss_coef": 1e-4, "embedding_noise": 5.0}
    assert regularizer_of_flags(added(0.0, 1.0)).why_not_shared == ""


def test_noise_of_each_row_goes_with_no_shared_tokens():
    def flags(shared: int, alpha: float) -> Any:
        return SimpleNamespace(engine=EngineArguments(share_beginnings=shared), added=added(alpha))

    check_flags(flags(0, 5.0))
    check_flags(flags(64, 0.0))
    with pytest.raises(
        ThreestepError, match="--share_beginnings 64 computes shared tokens once .* --neftune_alpha 5 gives"
    ):
        check_flags(flags(64, 5.0))


def test_z_loss_by_hand():
    # Logits (0, 0) and (ln 3, ln 5) have Z = 2 and Z = 8: log^2 Z = ln^2 2 and (3 ln 2)^2, of a step with 5 targets.
    logits_MV = torch.tensor([[0.0, 0.0], [math.log(3), math.log(5)]])
    log_normalizers_M = logits_MV.logsumexp(-1).requires_grad_()
    loss = z_loss(log_normalizers_M, tokens_in_step=5)
    assert loss.item() == pytest.approx(10 * math.log(2) ** 2 / 5)
    loss.backward()  # 2 log Z / 5
    assert log_normalizers_M.grad.tolist() == pytest.approx([0.4 * math.log(2), 1.2 * math.log(2)])
    values = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)  # parts add up
    assert (z_loss(values[:2], 3) + z_loss(values[2:], 3)).item() == pytest.approx((0.25 + 4 + 9) / 3, rel=1e-12)
    assert z_loss(values[:0], 3).item() == 0
