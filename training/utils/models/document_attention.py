"""Attention run by run, for a CPU: masked blocks are not computed. And attention of a few decoded tokens on any device.

torch's SDPA kernel for a CPU computes every block of a masked row; without a mask it skips blocks above the diagonal. A
row of many documents, or of a prompt and its responses, is therefore cut into runs (`contracts.token_rows`), each
computed without a mask, or, for later responses of a shared prompt, with the small mask of their own tokens, a part of
them at a time where that is not small; short ones of a bfloat16 model in float32 (`attention_dtype`), and so a lone
query.

N rows, T tokens in a row, A heads, K key-value heads, D head size (values may have another), L tokens of a run,
g heads that share keys.

torch's SDPA kernel for a CPU cuts queries into blocks of 32, 64 (from 192 queries) or 256 (from 768), and multiplies
block by block. Each of these small products costs more to set up in bfloat16, and more again for a length that it has
not met before, so that forward and backward of a run are faster in float32, casts included, and closer to float64's:
1.1 to 5 times as fast below 768 queries of a head of 64 (docs/lab_book.md: measured on one CPU with AVX512-BF16). A
lone query of a head, of a decoded token, is too; of 2 to 9 queries both take as long, and these stay in bfloat16.
The choice reads a run's length alone: its result does not depend on its neighbours, on the machine's load, or on
whether gradients are wanted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from training.utils.models.attention import BY_DOCUMENT, SDPA, set_text_attention, text_attention

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import AttentionRun

# Head size at most, and the number of queries from which bfloat16 is as fast.
_FLOAT32_BELOW = ((32, 1400), (64, 768))
_OTHERWISE = 384


def attention_dtype(queries: int, part: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute attention of `queries` tokens in. part: queries or keys, [..., head size]."""
    if part.dtype != torch.bfloat16 or part.device.type != "cpu":
        return part.dtype
    most = next((most for size, most in _FLOAT32_BELOW if part.shape[-1] <= size), _OTHERWISE)
    return torch.float32 if queries < most else part.dtype


# A decode loop gives a row so many at once (`contracts.decode_loops`).
_FEW_TOKENS = 9
# Of keys, and of values, that a thread's core converts at a time: of float32, twice 1 MiB.
_CONVERTED_NUMBERS = 2**18
MOST_OF_A_MASK = 2**24  # entries, of a byte, and in the backward of a number; beyond, queries go in parts


def use_document_attention(model: PreTrainedModel) -> None:
    """Switch a model from SDPA to this module, if its family passes keyword arguments on to attention
    (`_supports_attention_backend`, transformers 5.19)."""
    if text_attention(model) != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    AttentionInterface.register(BY_DOCUMENT, attention_by_document)
    AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)  # for rollouts, which pass no runs
    set_text_attention(model, BY_DOCUMENT)


def share_keys_of_few_tokens() -> None:
    """Have transformers' SDPA, under its name, compute decoded tokens as `attention_by_document` does; all else stays
    as it is."""
    AttentionInterface.register(SDPA, _sdpa_that_shares_keys)


def _sdpa_that_shares_keys(
    module: torch.nn.Module,
    query_NATD: torch.Tensor,
    key_NKTD: torch.Tensor,
    value_NKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    given = (query_NATD, key_NKTD, value_NKTD, attention_mask)
    if _are_few_tokens(query_NATD, attention_mask, others):
        return _of_few_tokens(*given, dropout, scaling), None
    return sdpa_attention_forward(module, *given, dropout=dropout, scaling=scaling, **others)


def _are_few_tokens(query_NATD: torch.Tensor, attention_mask: torch.Tensor | None, others: Mapping[str, Any]) -> bool:
    """True for a call of one token of each row, or of a few with a mask that all heads share. others: its further
    arguments, some of which change its meaning.

    Compiled blocks are those of training: there a bound on the tokens would be one compilation more."""
    if any(others.get(name) is not None for name in ("position_bias", "cache")):
        return False
    tokens = query_NATD.shape[2]
    if torch.compiler.is_compiling():
        return tokens == 1
    is_shared = attention_mask is not None and attention_mask.shape[1:3] == (1, tokens)
    return tokens == 1 or (tokens <= _FEW_TOKENS and is_shared)


@contextlib.contextmanager
def comparisons_with_sdpa(model: PreTrainedModel) -> Iterator[list[str]]:
    """Inside, note the files in which a family compares the name of the attention function with "sdpa", which is no
    longer its name. Such a family computes something else under another name, however little its numbers show it."""
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    name, files = text_attention(model), list[str]()
    for config in configs.values():
        if config._attn_implementation == name:
            config._attn_implementation_internal = _NotingName(name, files)
    try:
        yield files
    finally:
        for config in configs.values():
            if isinstance(config._attn_implementation_internal, _NotingName):
                config._attn_implementation_internal = name


def _configs(module: torch.nn.Module) -> list[Any]:
    from transformers import PreTrainedConfig

    config = getattr(module, "config", None)
    return [config, config.get_text_config()] if isinstance(config, PreTrainedConfig) else []


class _NotingName(str):
    """A name that notes which files compare it with SDPA's."""

    def __new__(cls, name: str, files: list[str]) -> _NotingName:
        made = super().__new__(cls, name)
        made.files = files
        return made

    files: list[str]
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and str.__eq__(other, SDPA):
            self.files.append(sys._getframe(1).f_code.co_filename)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self.__eq__(other)


def attention_by_document(
    module: torch.nn.Module,
    query_NATD: torch.Tensor,
    key_NKTD: torch.Tensor,
    value_NKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: return ([N, T, A, D], None).

    others: `runs`, a sequence of AttentionRun, from `model_inputs`. Without it, or if a `position_bias` changes the
    scores or a paged `cache` the keys, this is transformers' function for SDPA (a few tokens: `_of_few_tokens`). The
    output has the queries' dtype, whatever attention was computed in.
    """
    runs: Sequence[AttentionRun] | None = others.pop("runs", None)
    if runs is None and _are_few_tokens(query_NATD, attention_mask, others):
        return _of_few_tokens(query_NATD, key_NKTD, value_NKTD, attention_mask, dropout, scaling), None
    dtype = query_NATD.dtype
    if runs is None or others.get("position_bias") is not None:
        if others.get("position_bias") is None:
            wide = attention_dtype(query_NATD.shape[2], query_NATD)
            query_NATD, key_NKTD, value_NKTD = (part.to(wide) for part in (query_NATD, key_NKTD, value_NKTD))
            if attention_mask is not None and attention_mask.is_floating_point():  # torch takes no other type than that
                attention_mask = attention_mask.to(wide)
        output, _ = sdpa_attention_forward(
            module, query_NATD, key_NKTD, value_NKTD, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return output.to(dtype), None
    count, heads, width, _ = query_NATD.shape
    lengths = [run.tokens for run in runs]
    flat = [_flat(part, heads) for part in (query_NATD, key_NKTD, value_NKTD)]
    dtypes = [attention_dtype(run.tokens, query_NATD) for run in runs]
    # Each [L, A, D], in every precision that a run wants: a run may see keys of a longer one.
    cut = {each: [part.to(each).split(lengths) for part in flat] for each in dict.fromkeys(dtypes)}
    outputs = []
    for index, run in enumerate(runs):
        queries, keys, values = cut[dtypes[index]]
        if run.is_padding:
            outputs.append(torch.zeros_like(values[index]))
            continue
        seen_keys = [keys[span.run][span.start : span.end] for span in run.sees]
        seen_values = [values[span.run][span.start : span.end] for span in run.sees]
        key, value = keys[index], values[index]
        if run.sees:
            key, value = torch.cat([*seen_keys, key]), torch.cat([*seen_values, value])
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (queries[index], key, value))
        output = _of_run(query, key, value, dropout=dropout, scaling=scaling)
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs).to(dtype).view(count, width, heads, -1), None


def _of_run(
    query_1ALD: torch.Tensor, key_1ASD: torch.Tensor, value_1ASD: torch.Tensor, *, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Return [1, A, L, D]: queries of the last L of S keys, causal among these. Of a large mask a part is made at a
    time, in the backward again."""
    tokens, seen = query_1ALD.shape[2], key_1ASD.shape[2] - query_1ALD.shape[2]
    if seen == 0:
        return functional.scaled_dot_product_attention(
            query_1ALD, key_1ASD, value_1ASD, dropout_p=dropout, is_causal=True, scale=scaling
        )

    def part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        before = key.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(before)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )

    at_once = max(1, MOST_OF_A_MASK // key_1ASD.shape[2])
    if tokens <= at_once:
        return part(query_1ALD, key_1ASD, value_1ASD)
    ends = range(at_once, tokens + at_once, at_once)
    parts = [
        checkpoint(
            part,
            query_1ALD[:, :, end - at_once : end],
            key_1ASD[:, :, : seen + end],
            value_1ASD[:, :, : seen + end],
            use_reentrant=False,
        )
        for end in ends
    ]
    return torch.cat(parts, dim=2)


def _of_few_tokens(
    query_NATD: torch.Tensor,
    key_NKLD: torch.Tensor,
    value_NKLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Return [N, T, A, D]; keys and values are of L tokens. Heads that share keys become the queries of one head:
    transformers would copy all keys and values of the cache for each of them, for every token (`repeat_kv`,
    transformers 5.19), and torch's `enable_gqa` does so on CUDA wherever there is a mask."""
    count, heads, tokens, size = query_NATD.shape
    group = heads // key_NKLD.shape[1]
    queries = group * tokens
    query_NKqD = query_NATD.reshape(count, -1, queries, size)
    if group > 1 and attention_mask is not None:
        if attention_mask.shape[1] == heads:  # MiniMax-M3's index picks other keys for each head (transformers 5.19)
            attention_mask = attention_mask.reshape(len(attention_mask), -1, queries, attention_mask.shape[-1])
        elif tokens > 1:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    is_lone = queries == 1 and attention_dtype(queries, query_NKqD) != query_NKqD.dtype
    attention = _of_one_query_each if is_lone else functional.scaled_dot_product_attention
    output_NKqD = attention(
        query_NKqD, key_NKLD, value_NKLD, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    output_NATD = output_NKqD.reshape(count, heads, tokens, -1)
    return output_NATD.transpose(1, 2).contiguous()


def _of_one_query_each(
    query_NK1D: torch.Tensor,
    key_NKLD: torch.Tensor,
    value_NKLD: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    **others: Any,
) -> torch.Tensor:
    """As torch's function, for a bfloat16 model on a CPU, computed in float32 and rounded once. torch's kernel for one
    query takes twice as long in bfloat16 (torch 2.13, docs/lab_book.md). A few heads of the cache are converted at a
    time, into one place, and read there before they leave the core's own memory: as fast as a cache in float32, in half
    of its bytes. The parts change no bit."""
    wide, (count, all_heads) = torch.float32, key_NKLD.shape[:2]
    rows, heads = _heads_at_once(key_NKLD)
    if attn_mask is not None and attn_mask.is_floating_point():  # torch takes no other type than the queries'
        attn_mask = attn_mask.to(wide)
    if (rows, heads) == (count, all_heads):
        parts = (query_NK1D.to(wide), key_NKLD.to(wide), value_NKLD.to(wide))
        output = functional.scaled_dot_product_attention(*parts, attn_mask=attn_mask, **others)
        return output.to(query_NK1D.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(count, all_heads, 1, -1)
    rooms = [part.new_empty(rows, heads, *part.shape[2:], dtype=wide) for part in (key_NKLD, value_NKLD)]
    output_NK1D = query_NK1D.new_empty(*query_NK1D.shape[:3], value_NKLD.shape[-1])
    for row, head in product(range(0, count, rows), range(0, all_heads, heads)):
        place = (slice(row, row + rows), slice(head, head + heads))
        held = [part[place] for part in (key_NKLD, value_NKLD)]
        key, value = (room[: len(part), : part.shape[1]].copy_(part) for room, part in zip(rooms, held, strict=True))
        mask = None if attn_mask is None else attn_mask[place]
        output_NK1D[place] = functional.scaled_dot_product_attention(
            query_NK1D[place].to(wide), key, value, attn_mask=mask, **others
        )
    return output_NK1D


def _heads_at_once(key_NKLD: torch.Tensor) -> tuple[int, int]:
    """Return of how many rows how many heads are converted at a time, at least one for each thread; all of them where a
    backward needs them, or a compiler would have to cut up the loop."""
    count, heads = key_NKLD.shape[:2]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return count, heads
    a_thread = max(1, _CONVERTED_NUMBERS // key_NKLD[0, 0].numel())
    together = torch.get_num_threads() * a_thread
    return min(count, max(1, together // heads)), min(heads, together)


def _flat(part_NATD: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [N * T, heads, D], with key-value heads repeated for the heads that share them."""
    flat = part_NATD.transpose(1, 2).flatten(0, 1)
    return flat if flat.shape[1] == heads else flat.repeat_interleave(heads // flat.shape[1], dim=1)
