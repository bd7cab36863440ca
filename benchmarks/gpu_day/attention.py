"""Part 2: forms of attention at the same documents: seconds of a forward and backward, memory, compilations, numbers.

Q queries, K keys of them, A heads, D head size.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.models import SHAPES, random_model, sequence
from benchmarks.gpu_day.record import NotHere, Report
from training.utils.contracts.documents import Document, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.models.attention import KERNELS, SDPA
from training.utils.models.token_model import PolicyModel

PADDED, VARLEN, FLEX, FLASH = "padded sdpa", "varlen", "flex_attention", ("flash_attention_2", "flash_attention_3")
FORMS = (PADDED, SDPA, VARLEN, FLEX, FLASH[0])  # sdpa: packed, with a dense mask
KINDS = ("plain", "shared prompts")


def measure(report: Report) -> None:
    """The kernel by itself, then a model at each width."""
    for name, lengths in _LENGTHS.items():
        for shared in (4, 1):
            heads = "grouped heads" if shared == 1 else "every head its keys"
            report.case(
                "varlen's kernel beside a dense mask", f"{name}, {heads}", lambda c=(lengths, shared): _kernel(*c)
            )
    widths, total = ((2048, 8192, 32768), 32768) if report.full else ((48, 96), 96)
    shape = "1300m" if report.full else "tiny"
    dtype = torch.bfloat16 if report.full else torch.float32
    model: list[Any] = []  # made by the first case that needs it
    for kind in KINDS:
        padded: dict[int, torch.Tensor] = {}  # log-probabilities of one set of documents, by its seed
        for width in widths:
            for form in FORMS:
                if form == PADDED and width != widths[0]:
                    continue  # the same rows at every width
                name = f"{form}, {kind}" + ("" if form == PADDED else f", rows of {width:,}")

                def case(form: str = form, kind: str = kind, width: int = width, padded: Any = padded) -> dict:
                    if not model:
                        model.append(random_model(shape, dtype, machine.device()))
                    return form_case(model[0], form, documents_of(kind, total, SHAPES[shape][-1]), width, padded)

                report.case(f"{shape}, {total:,} tokens, forward and backward", name, case)


def documents_of(kind: str, tokens: int, vocabulary: int) -> list[Document]:
    """Return documents of `tokens` tokens and less, of lengths that differ sevenfold: texts, or prompts with four
    responses."""
    dice, made, left = torch.Generator().manual_seed(1), list[Document](), tokens
    mean = tokens // 64 if tokens > 10_000 else 12
    mean = mean if kind == "plain" else max(4, mean // 5)
    while True:
        length = int(torch.randint(mean // 4, 7 * mean // 4, (1,), generator=dice))
        document = plain(sequence(length, vocabulary, len(made)))
        if kind != "plain":
            responses = [_response(length - each, vocabulary, 10 * len(made) + each) for each in range(4)]
            document = shared_prompt(sequence(length, vocabulary, len(made), targets=False), responses)
        if document.tokens > left and made:
            return made
        left -= document.tokens
        made.append(document)


def _response(length: int, vocabulary: int, seed: int) -> Any:
    whole = sequence(max(1, length), vocabulary, seed)
    whole.is_target[0] = True
    return whole


def in_rows(documents: Sequence[Document], width: int) -> list[list[Document]]:
    """Return the documents in their order, each row as full as it gets."""
    rows: list[list[Document]] = [[]]
    for document in documents:
        if rows[-1] and sum(each.tokens for each in rows[-1]) + document.tokens > width:
            rows.append([])
        rows[-1].append(document)
    return rows


def form_case(
    model: Any, form: str, documents: Sequence[Document], width: int, padded: dict[int, torch.Tensor]
) -> dict:
    """Return seconds, memory, compilations, and how far the log-probabilities are from those of padded rows."""
    give(model, form)
    if form == PADDED:
        rows = [[each] for document in documents for each in unshared(document)]
    else:
        rows = in_rows(documents, width)
    if form in FLASH and any(len(document.segments) > 1 for document in documents):
        raise NotHere(f"{form} cannot share a prompt")
    laid_out = packed_rows(rows, 0).to(machine.device())
    before, policy = machine.compilations(), PolicyModel(model)
    read, peak = machine.with_peak(lambda: _once(policy, laid_out))
    first = machine.compilations()
    seconds = machine.median_seconds(lambda: _once(policy, laid_out), repeats=3, warm_up=0)
    fewer = packed_rows([*rows[:-1], rows[-1][: max(1, len(rows[-1]) // 2)]], 0).to(machine.device())
    _once(policy, fewer)  # another layout: is it compiled anew?
    padded.setdefault(0, read) if form == PADDED else None
    difference = float((read - padded[0]).abs().max()) if 0 in padded else None
    return {
        "rows": len(rows),
        "tokens held": laid_out.input_ids_NT.numel(),
        "seconds": seconds,
        "tokens/s": sum(document.tokens for document in documents) / seconds,
        "peak, GiB": machine.gib(peak),
        "compilations": first - before,
        "of another layout": machine.compilations() - first,
        "largest difference from padded, nats": difference,
    }


def give(model: Any, form: str) -> None:
    """Let the model compute its rows by this form. NotHere where it cannot."""
    if form not in (PADDED, SDPA, *KERNELS):
        raise NotHere(f"this version trains with no '{form}' attention; its kernel's own table is above")
    if form != PADDED and form != SDPA and not torch.cuda.is_available():
        raise NotHere(f"'{form}' trains on CUDA alone")
    if form in FLASH and importlib.util.find_spec("flash_attn") is None:
        raise NotHere("flash_attn is not installed")
    if form == VARLEN:
        importlib.import_module("threestep.plugins.kernels.varlen").use_varlen_attention(model)
        return
    model.set_attn_implementation(SDPA if form == PADDED else form)
    if form == FLEX:
        from threestep.plugins.kernels.flex import use_flex_attention

        use_flex_attention(model)


def _once(policy: PolicyModel, rows: TokenRows) -> torch.Tensor:
    """Forward and backward; return float32 log-probabilities [M]."""
    policy.zero_grad(set_to_none=True)
    logprobs_M = policy(rows).logprobs_M
    logprobs_M.mean().backward()
    policy.zero_grad(set_to_none=True)
    return logprobs_M.detach()


# Queries and keys of each run. The keys of a response are its prompt's and its own: its queries are the last of them.
_LENGTHS = {
    "as many queries as keys": ((37, 128, 300), (37, 128, 300)),
    "fewer queries than keys": ((37, 128, 1), (90, 300, 129)),
}


def _kernel(lengths: tuple[Sequence[int], Sequence[int]], shared: int) -> dict[str, Any]:
    """Return the largest differences of outputs and gradients from dense attention in float64, with the causal mask
    aligned at either end, over the largest number."""
    if not torch.cuda.is_available():
        raise NotHere("torch's varlen kernel runs on CUDA alone")
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = lengths
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(queries), 4, 64), (sum(keys), shared, 64), (sum(keys), shared, 64)]
    parts = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes]
    has_shared = "enable_gqa" in inspect.signature(varlen_attn).parameters
    begins = [torch.tensor([0, *many]).cumsum(0).to("cuda", torch.int32) for many in lengths]

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"window_size": (-1, 0)}
        if shared != 4 and has_shared:
            given["enable_gqa"] = True
        elif shared != 4:
            key, value = (part.repeat_interleave(4 // shared, 1) for part in (key, value))
        return varlen_attn(query, key, value, *begins, max(queries), max(keys), **given)

    got = _read(kernel, parts)
    figures: dict[str, Any] = {"enable_gqa": "there" if has_shared else "missing: keys repeated"}
    for end in ("bottom right", "top left"):
        if end == "top left" and queries == keys:
            continue
        wide = [part.detach().double().requires_grad_() for part in parts]
        wanted = _read(lambda *heads, end=end: dense_runs(*heads, queries, keys, end), wide)
        for name, one, other in zip(("output", "gradients"), (got[0], got[1:]), (wanted[0], wanted[1:]), strict=True):
            pairs = [(one, other)] if name == "output" else list(zip(one, other, strict=True))
            figures[f"{name}, {end}"] = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    return figures


def _read(attend: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    output = attend(*parts)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output.detach(), *torch.autograd.grad((output * weights).sum(), parts)


def dense_runs(
    query_QAD: torch.Tensor,
    key_KAD: torch.Tensor,
    value_KAD: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    end: str,
) -> torch.Tensor:
    """Return [Q, A, D]: softmax attention of each run by itself, causal, with the mask's corner at `end`."""
    copies, outputs = query_QAD.shape[1] // key_KAD.shape[1], []
    of_runs = (part.split(list(own)) for part, own in ((query_QAD, queries), (key_KAD, keys), (value_KAD, keys)))
    runs = zip(*of_runs, strict=True)
    for query, key, value in runs:
        key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
        scores_AQK = torch.einsum("qad,kad->aqk", query, key) / query.shape[-1] ** 0.5
        offset = len(key) - len(query) if end == "bottom right" else 0
        seen_QK = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(offset)
        weights_AQK = scores_AQK.masked_fill(~seen_QK, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("aqk,kad->qad", weights_AQK, value))
    return torch.cat(outputs)
