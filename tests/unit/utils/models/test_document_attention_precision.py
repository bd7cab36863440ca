"""Short runs of a bfloat16 model are computed in float32 on a CPU: to the bit that, closer to float64, and whatever
stands beside them."""

import pytest
import torch
from torch.nn import functional

from training.utils.contracts.token_rows import AttentionRun, RunSpan
from training.utils.models.document_attention import attention_by_document, attention_dtype

SIZE = 80  # of a head: bfloat16 from 384 queries
LONG, SHORT = AttentionRun(390, (), False), AttentionRun(9, (), False)
LATER = AttentionRun(6, (RunSpan(1, 0, 5),), False)  # sees 5 tokens of the second run


def parts(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, tokens, SIZE, generator=generator).bfloat16() for _ in range(3)]
    return [part.requires_grad_() for part in drawn]


def attended(given: list[torch.Tensor], runs: tuple[AttentionRun, ...]) -> torch.Tensor:
    """[T, A, D]"""
    return attention_by_document(torch.nn.Module(), *given, None, runs=runs)[0][0]


@pytest.mark.parametrize(
    ("size", "queries", "dtype"),
    [
        (32, 1399, torch.float32),
        (32, 1400, torch.bfloat16),
        (64, 767, torch.float32),
        (64, 768, torch.bfloat16),
        (128, 383, torch.float32),
        (128, 384, torch.bfloat16),
    ],
)
def test_the_table(size, queries, dtype):
    part = torch.zeros(1, 1, 1, size, dtype=torch.bfloat16)
    assert attention_dtype(queries, part) == dtype
    assert attention_dtype(queries, part.to("meta")) == torch.bfloat16  # measured on CPUs alone
    for other in (torch.float16, torch.float32, torch.float64):
        assert attention_dtype(queries, part.to(other)) == other


def test_short_runs_are_rounded_once_at_the_end():
    given = parts(LONG.tokens + SHORT.tokens + LATER.tokens)
    output = attended(given, (LONG, SHORT, LATER))
    assert output.dtype == torch.bfloat16

    def plainly(own: slice, seen: slice, dtype: torch.dtype) -> torch.Tensor:
        query = given[0][:, :, own].to(dtype)
        key, value = (torch.cat([part[:, :, seen], part[:, :, own]], 2).to(dtype) for part in given[1:])
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        causal = key.shape[2] == query.shape[2]
        options = {"is_causal": True} if causal else {"attn_mask": mask}
        return functional.scaled_dot_product_attention(query, key, value, **options)[0].transpose(0, 1)

    nothing = slice(0, 0)
    assert torch.equal(output[:390], plainly(slice(0, 390), nothing, torch.bfloat16))
    assert torch.equal(output[390:399], plainly(slice(390, 399), nothing, torch.float32).bfloat16())
    assert torch.equal(output[399:], plainly(slice(399, 405), slice(390, 395), torch.float32).bfloat16())


def test_neighbours_change_no_bit():
    """Neither of the output nor of the gradients, though the long run is computed in another precision."""
    beside, alone = parts(LONG.tokens + SHORT.tokens), parts(LONG.tokens + SHORT.tokens)
    weights = torch.randn(SHORT.tokens, 2, SIZE, generator=torch.Generator().manual_seed(1))
    with_long = attended(beside, (LONG, SHORT))[390:]
    by_itself = attended([part[:, :, 390:] for part in alone], (SHORT,))
    assert torch.equal(with_long, by_itself)
    for output in (with_long, by_itself):
        (output.float() * weights).sum().backward()
    for one, other in zip(beside, alone, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad[:, :, 390:], other.grad[:, :, 390:])


def test_it_is_closer_to_float64():
    """Gradients of a short run, relative to float64's: bfloat16 throughout is further off in each."""
    runs, errors = (AttentionRun(150, (), False),), {}
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(150, 2, SIZE, generator=generator)
    gradients = {}
    for name, dtype in (("exact", torch.float64), ("ours", torch.bfloat16)):
        given = [part.detach().to(dtype).requires_grad_() for part in parts(150)]
        (attended(given, runs) * weights.to(dtype)).sum().backward()
        gradients[name] = [part.grad.double() for part in given]
    given = parts(150)
    plain = functional.scaled_dot_product_attention(*given, is_causal=True)[0].transpose(0, 1)
    (plain * weights.bfloat16()).sum().backward()
    gradients["bfloat16"] = [part.grad.double() for part in given]
    for name in ("ours", "bfloat16"):
        pairs = zip(gradients[name], gradients["exact"], strict=True)
        errors[name] = [float((got - want).norm() / want.norm()) for got, want in pairs]
    assert all(ours < 0.9 * theirs for ours, theirs in zip(errors["ours"], errors["bfloat16"], strict=True)), errors


def test_rows_of_one_document_each_as_well():
    """They come without runs, by transformers' own function."""
    given = parts(40)
    module = torch.nn.Module()
    module.is_causal = True
    output, _ = attention_by_document(module, *given, None)
    want = functional.scaled_dot_product_attention(*(part.float() for part in given), is_causal=True)
    assert torch.equal(output, want.transpose(1, 2).bfloat16())
