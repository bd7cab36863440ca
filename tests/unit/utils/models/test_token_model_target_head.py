"""Log-probabilities straight from hidden states: values and gradients equal plain autograd on whole logits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from training.utils.models.token_model import Readout, TargetHead, chunk_mb_for

TOKENS, HIDDEN, VOCABULARY = 23, 8, 40
ALL_ROWS, SEVEN_ROWS, ONE_ROW = 10**9, 7 * 4 * VOCABULARY, 1


def made(dtype: torch.dtype, bias: bool = True, seed: int = 0) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """(head, hidden states, targets)"""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden_MH = torch.randn(TOKENS, HIDDEN, generator=generator)
    targets_M = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return head.to(dtype), hidden_MH.to(dtype).requires_grad_(), targets_M


def plain(head: nn.Linear, hidden_MH: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities, log-normalizers and entropies by the textbook."""
    logits_MV = head(hidden_MH) / temperature
    log_p_MV = torch.log_softmax(logits_MV, -1)
    return [
        log_p_MV.gather(-1, targets_M[:, None])[:, 0],
        torch.logsumexp(logits_MV, -1),
        -(log_p_MV.exp() * log_p_MV).sum(-1),
    ]


def weighed(numbers: list[torch.Tensor], used: tuple[bool, ...]) -> torch.Tensor:
    """A loss in which every number of a token counts differently, and nonlinearly."""
    weights_M = torch.linspace(-1.0, 2.0, TOKENS, dtype=numbers[0].dtype)
    return sum(
        ((index + 1) * weights_M * number * number.sigmoid()).sum()
        for index, number in enumerate(numbers)
        if used[index]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_bytes", [ALL_ROWS, SEVEN_ROWS, ONE_ROW], ids=["whole", "sevens", "ones"])
@pytest.mark.parametrize("used", [use for use in product([False, True], repeat=3) if any(use)])
def test_values_and_gradients_equal_autograd(used, chunk_bytes, temperature):
    head, hidden_MH, targets_M = made(torch.float64)
    expected = plain(head, hidden_MH, targets_M, temperature)
    weighed(expected, used).backward()
    wanted = [hidden_MH.grad, head.weight.grad, head.bias.grad]
    hidden_MH.grad = head.weight.grad = head.bias.grad = None

    read = TargetHead(head, chunk_bytes)(hidden_MH, targets_M, Readout(temperature, entropies=used[2]))
    got = [read.logprobs_M, read.log_normalizers_M, read.entropies_M]
    for name, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one is not None:
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    greedy_M = head(hidden_MH).argmax(-1) == targets_M
    assert torch.equal(read.is_greedy_M, greedy_M) and read.logits_MV is None
    whole = TargetHead(head, chunk_bytes)(hidden_MH, targets_M, Readout(temperature, entropies=used[2], logits=True))
    torch.testing.assert_close(whole.logits_MV, head(hidden_MH) / temperature)
    for one, other in zip(whole[:4], read[:4], strict=True):
        torch.testing.assert_close(one, other)
    weighed([number if number is not None else expected[0] for number in got], used).backward()
    for gradient, right in zip([hidden_MH.grad, head.weight.grad, head.bias.grad], wanted, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_what_needs_no_gradient_gets_none(frozen):
    head, hidden_MH, targets_M = made(torch.float64)
    parts = {"weight": head.weight, "bias": head.bias, "hidden": hidden_MH}
    weighed(plain(head, hidden_MH, targets_M, 1.0), (True, False, False)).backward()
    wanted = {name: part.grad for name, part in parts.items()}
    for part in parts.values():
        part.grad = None
    parts[frozen].requires_grad_(False)
    weighed([TargetHead(head, SEVEN_ROWS)(hidden_MH, targets_M).logprobs_M], (True,)).backward()
    assert parts[frozen].grad is None
    for name in parts.keys() - {frozen}:
        torch.testing.assert_close(parts[name].grad, wanted[name])


@pytest.mark.parametrize("chunk_bytes", [ALL_ROWS, SEVEN_ROWS])
def test_no_targets_give_zero_gradients(chunk_bytes):
    head, hidden_MH, targets_M = made(torch.float32)
    read = TargetHead(head, chunk_bytes)(hidden_MH[:0], targets_M[:0], Readout(entropies=True))
    assert [part.shape for part in read[:4]] == [(0,)] * 4
    (read.logprobs_M.sum() + read.entropies_M.sum()).backward()
    assert not head.weight.grad.any() and not head.bias.grad.any() and not hidden_MH.grad.any()


def test_half_precision_weights_add_up_in_float32():
    """One row a chunk: 23 gradients of the weight added in bfloat16 would be off by several units of its last place;
    added in float32 they are rounded once."""
    head, hidden_MH, targets_M = made(torch.bfloat16, bias=False)
    weighed([TargetHead(head, ONE_ROW)(hidden_MH, targets_M).logprobs_M], (True,)).backward()
    wide = made(torch.bfloat16, bias=False)[0].float()
    hidden = hidden_MH.detach().float()
    logits_MV = head(hidden_MH.detach()).float().requires_grad_()
    logprobs_M = torch.log_softmax(logits_MV, -1).gather(-1, targets_M[:, None])[:, 0]
    (grad_MV,) = torch.autograd.grad(weighed([logprobs_M], (True,)), logits_MV)
    exact = grad_MV.bfloat16().float().t() @ hidden
    assert wide.weight.shape == exact.shape
    torch.testing.assert_close(head.weight.grad.float(), exact, rtol=2**-8, atol=2e-3)


def test_a_gpus_chunk_by_hand():
    # 80e9 / 64 bytes, 4 of each 6 for float32: 794 MiB. In float32 nothing else is made: 1,192 MiB.
    assert chunk_mb_for(80 * 10**9, 128_256, torch.bfloat16) == 512
    assert chunk_mb_for(80 * 10**9, 128_256, torch.float32) == 1024
    # 4,096 rows of 32,000 logits are 500 MiB; of 300 they are 5, and less than 32 is never worth a launch.
    assert chunk_mb_for(80 * 10**9, 32_000, torch.float32) == 256
    assert chunk_mb_for(80 * 10**9, 300, torch.float32) == 32
    # A GPU that is nearly full, and one of which a little is taken.
    assert chunk_mb_for(10**9, 128_256, torch.bfloat16) == 32
    assert chunk_mb_for(78 * 10**9, 128_256, torch.bfloat16) == 512
    assert chunk_mb_for(10**13, 256_000, torch.bfloat16) == 1024


@pytest.mark.parametrize("chunk_bytes", [ALL_ROWS, SEVEN_ROWS])
@pytest.mark.parametrize("with_logits", [False, True])
def test_a_target_that_shares_the_largest_logit_is_no_first_choice(chunk_bytes, with_logits):
    """Of equal logits, as a diverged model has them, none is the model's choice."""
    head, hidden_MH, targets_M = made(torch.float32)
    read = TargetHead(head, chunk_bytes)
    with torch.no_grad():
        one_hot_MV = nn.functional.one_hot(head(hidden_MH).argmax(-1), VOCABULARY).bool()
        chosen_M = one_hot_MV.gather(-1, targets_M[:, None])[:, 0]
        assert read(hidden_MH, targets_M, Readout(logits=with_logits)).is_greedy_M.equal(chosen_M)
        best_M = head(hidden_MH).argmax(-1)
        assert bool(read(hidden_MH, best_M, Readout(logits=with_logits)).is_greedy_M.all())
        head.weight[1:] = head.weight[0]
        head.bias.zero_()
        assert not bool(read(hidden_MH, targets_M, Readout(logits=with_logits)).is_greedy_M.any())
        head.weight[3] = head.weight[4] = 2 * head.weight[0]  # two share it
        up_M = hidden_MH @ head.weight[0] > 0
        assert not bool(read(hidden_MH[up_M], torch.full_like(targets_M, 3)[up_M]).is_greedy_M.any())
        head.weight[4] = head.weight[0]
        assert bool(read(hidden_MH[up_M], torch.full_like(targets_M, 3)[up_M]).is_greedy_M.all())
