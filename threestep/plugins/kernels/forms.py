"""Each form of attention as one function of queries, keys and values, for rows that are laid out already.

For comparisons of forms: the check at the start (`why_not_the_mask`), the first rows of a run on CUDA
(`time_on_first_rows`), benchmarks and tests. `attention_of` makes what a model needs once for a micro-batch (mask,
block mask, lengths of runs); its result is the work of a layer.

N rows, T tokens in a row, A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from threestep.plugins.kernels.calls import heads_of
from threestep.plugins.kernels.flex import FLEX, FlexAttention
from threestep.plugins.kernels.varlen import VARLEN, VarlenAttention, torch_kernel
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.layout.rows import packed_rows
from training.utils.models.attention import SDPA, model_inputs, text_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows

FORMS = (VARLEN, FLEX, SDPA)
# Of the largest number, in any output or gradient. On an H200 in bfloat16 varlen's are 0.005 off at most; gradients of
# the wrong keys were off by more than the whole.
LARGEST_SHARE = 0.05
_PROMPT, _RESPONSES, _TEXT = 300, (150, 1, 129, 77), 257  # tokens: several blocks of any kernel, none of them whole
_MOST_MASK_BYTES = 2**28  # of a dense mask that is made to be timed

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention_of(form: str, rows: TokenRows, flex: FlexAttention | None = None) -> Attend:
    """Return the attention of `rows`, on a device, as a function of query_NATD, key_NKTD and value_NKTD that returns
    [N, T, A, D].

    form: of `FORMS`; sdpa with a dense mask. Padded rows are rows of one document: sdpa without a mask.
    flex: a function that is compiled already; None compiles a new one at its first call
    """
    inputs = model_inputs(rows, form)
    mask, runs = inputs["attention_mask"], inputs.get("runs")
    count, width = rows.input_ids_NT.shape
    if form == FLEX:
        return _by_flex(flex or FlexAttention(), mask, count, width)
    function: Any = VarlenAttention(torch_kernel()) if form == VARLEN else sdpa_attention_forward

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        given = {} if runs is None else {"runs": runs}
        output: torch.Tensor = function(module, query, key, value, mask, **given)[0]
        return output

    return attend


def _by_flex(flex: FlexAttention, mask: Any, count: int, width: int) -> Attend:
    """All rows as one, filled to the length of the block mask."""

    def attend(*parts_NATD: torch.Tensor) -> torch.Tensor:
        filling = (0, 0, 0, 0, 0, mask.shape[-1] - count * width)
        parts = [functional.pad(part.transpose(1, 2).flatten(0, 1), filling) for part in parts_NATD]
        query, key, value = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in parts)
        output_1LAD, _ = flex(torch.nn.Identity(), query, key, value, mask)
        return output_1LAD[0, : count * width].unflatten(0, (count, width))

    return attend


def seconds_of_forms(
    rows: TokenRows,
    heads: int,
    key_heads: int,
    size: int,
    *,
    dtype: torch.dtype,
    forms: Sequence[str],
    repeats: int = 5,
    flex: FlexAttention | None = None,
) -> dict[str, float]:
    """Return the seconds of a forward and backward of one layer's attention in each form, the median of `repeats` after
    one that is not counted. rows: on a device, which is waited for. flex: see `attention_of`."""
    count, width = rows.input_ids_NT.shape
    device = rows.input_ids_NT.device
    generator = torch.Generator(device).manual_seed(0)  # the run's random state is left alone
    parts = [
        torch.randn(count, number, width, size, generator=generator, device=device, dtype=dtype, requires_grad=True)
        for number in (heads, key_heads, key_heads)
    ]
    seconds = {}
    for form in forms:
        attend, times = attention_of(form, rows, flex), list[float]()
        for _ in range(1 + repeats):
            _wait(device)
            start = time.perf_counter()
            output = attend(*parts)
            torch.autograd.grad(output, parts, torch.ones_like(output))
            _wait(device)
            times.append(time.perf_counter() - start)
        seconds[form] = statistics.median(times[1:])
    return seconds


def why_not_the_mask(form: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return None if a kernel's outputs and gradients are those of a dense mask, else by how much they are not, on rows
    with shared prompts that are longer than any kernel's block. The forward alone, or short rows, would show less.

    shape: heads, key-value heads, head size
    """
    rows = _rows_of_many_blocks().to(device)
    width = rows.input_ids_NT.shape[1]
    generator = torch.Generator(device).manual_seed(0)
    weights_TAD, *drawn = (
        torch.randn(1, heads, width, shape[2], generator=generator, device=device, dtype=dtype)
        for heads in (shape[0], *shape[:2], shape[1])
    )
    read = {}
    for name in (form, SDPA):
        parts = [part.to(dtype if name == form else torch.float32).requires_grad_() for part in drawn]
        output = attention_of(name, rows)(*parts)
        gradients = torch.autograd.grad((output * weights_TAD.transpose(1, 2)).sum(), parts)
        read[name] = [output.detach().float(), *(gradient.float() for gradient in gradients)]
    names = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    for name, got, wanted in zip(names, read[form], read[SDPA], strict=True):
        share = float((got - wanted).abs().max() / wanted.abs().max())
        if not share <= LARGEST_SHARE:
            return f"its {name} differ here by {share:.2g} of the largest value with a dense mask"
    return None


def _rows_of_many_blocks() -> TokenRows:
    def part(length: int, is_target: bool) -> TokenSequence:
        return TokenSequence(torch.ones(length, dtype=torch.long), torch.full((length,), is_target))

    prompt = shared_prompt(part(_PROMPT, False), [part(length, True) for length in _RESPONSES])
    return packed_rows([[prompt, plain(part(_TEXT, False))]], 0)


def time_on_first_rows(reader: nn.Module, model: PreTrainedModel, log: Callable[[str], None]) -> None:
    """Time the attention of `model` beside sdpa's with a dense mask, on the first packed rows that `reader` trains on,
    and `log` one sentence. It changes no number and chooses nothing: clocks would differ from rank to rank, and from a
    run to its resumption."""

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        if reader.training and given and given[0].segments is not None:
            hook.remove()
            with torch.enable_grad():
                log(_timed(given[0], model))

    hook = reader.register_forward_pre_hook(before)


def _timed(rows: TokenRows, model: PreTrainedModel) -> str:
    form_of_model, (heads, key_heads, size) = text_attention(model), heads_of(model)
    count, width = rows.input_ids_NT.shape
    fits = count * width**2 * (1 + model.dtype.itemsize) <= _MOST_MASK_BYTES
    others = [SDPA] if form_of_model != SDPA and fits else []
    flex = ALL_ATTENTION_FUNCTIONS[FLEX] if form_of_model == FLEX else None
    seconds = seconds_of_forms(
        rows, heads, key_heads, size, dtype=model.dtype, forms=[form_of_model, *others], flex=flex
    )
    times = ", ".join(f"{form} {1000 * each:.2f} ms" for form, each in seconds.items())
    if form_of_model != SDPA and not fits:
        times += f"; sdpa was not timed because its dense mask has {count * width**2 / 1e9:.2g} billion entries"
    faster = form_of_model in seconds and min(seconds.values()) < seconds[form_of_model]
    advice = "; --attn_implementation sdpa is faster here" if faster else ""
    return f"attention over {count} x {width:,} tokens, forward and backward of one layer: {times}{advice}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
