"""The check that the numbers that steps read from a model equal those of its own forward, and in which rows, by a few
small forwards before training.

Knows no engine: `read` runs the model, sharded or not.

M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.documents import Document, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.flags.added import advice
from training.utils.layout.rows import packed_rows
from training.utils.models.attention import BY_DOCUMENT, SDPA, kernel_of, text_attention
from training.utils.models.attention_choice import take_next
from training.utils.models.own_forward import OwnForward, own_forward_of, rms
from training.utils.models.token_model import PolicyModel, ScalarModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[TokenRows], torch.Tensor]


def check_padded(model: PreTrainedModel, read: Read, device: torch.device) -> None:
    """ThreestepError unless padded rows give the numbers of the model's own forward.

    read: TokenRows -> float32 [M] (or [B]), in eval mode. A collective under ZeRO-3: every rank gets the same result.
    """
    own = _measured(model)
    keys = getattr(model.config.get_text_config(), "keep_window_size", None)
    longest = max(own.probes.longest_tokens, own.probes.alone[-1].tokens)
    if keys is not None and keys < longest:
        raise ThreestepError(
            f"{type(model).__name__} keeps only {keys} keys per row (keep_window_size in its config.json), chosen from "
            f"the whole row, but the sequences have {longest} tokens; use sequences of at most {keys} tokens"
        )
    try:
        with torch.no_grad():
            parts = [read(packed_rows([[document] for document in batch], 0).to(device)) for batch in _padded(own)]
    except (ThreestepError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise ThreestepError(
            f"{type(model).__name__} cannot be trained: its forward pass on padded rows fails "
            f"({type(problem).__name__}: {first_line(problem)}); use another --dtype or another family"
        ) from problem
    difference = _largest_difference(own, parts[0], parts[1] if own.probes.long else None, at=0)
    if not difference <= own.tolerance:
        raise ThreestepError(
            f"{type(model).__name__} cannot be trained: its outputs for padded rows and for single sequences differ "
            f"by {difference:.2g} (rounding explains at most {own.tolerance:.2g}); try "
            f"{', '.join([*advice('other_forward'), '--zero_stage 2'])}, shorter sequences, or another family"
        )
    if own.with_media is not None:
        reason = own.with_media.why_not(read, device, text=None)
        if reason is not None:
            raise ThreestepError(
                f"{type(model).__name__} cannot be trained on {own.with_media.media.name}: {reason}; use another "
                "--dtype, or another family"
            )


def why_not_packed(
    model: PreTrainedModel, read: Read, longest_tokens: int, device: torch.device, *, sharing: bool = True
) -> str | None:
    """Return None if packed rows give the numbers of the model's own forward, else the reason why not. If another
    attention is left to try (`attention_choice`), the model gets it, and a note records it.

    read, and who must call: see `check_padded`.
    longest_tokens: of the documents of the training.
    sharing: these documents share prompts.
    """
    text_config = model.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    windowed = getattr(text_config, "use_sliding_window", True)
    if window is not None and windowed and window < longest_tokens:
        return f"its sliding window of {window} tokens is shorter than the sequences ({longest_tokens} tokens)"
    reason = _why_not_by_this(model, read, device, sharing)
    while reason is not None and take_next(model, _measured(model), reason):
        reason = _why_not_by_this(model, read, device, sharing)
    return reason


def check_segments(reason: str | None, needed_by: str | None, name: str) -> None:
    """ThreestepError if the flag `needed_by` gives documents segments that do not see each other, padded or not, and
    the model `name` cannot do that, for `reason` (of `why_not_packed`, sharing)."""
    if reason is not None and needed_by is not None:
        raise ThreestepError(
            f"{needed_by} needs a model that accepts a segment mask, padded or not, but {name} "
            f"does not: {reason}; use another model or --attn_implementation, or remove {needed_by}"
        )


def _why_not_by_this(model: PreTrainedModel, read: Read, device: torch.device, sharing: bool) -> str | None:
    """`why_not_packed` by the attention that the model has now."""
    implementation = text_attention(model)
    kernel = kernel_of(implementation)
    if kernel is None and implementation not in (SDPA, BY_DOCUMENT):
        return f"its attention implementation '{implementation}' accepts no mask of segments here"
    if sharing and kernel is not None and not kernel.shares_prompts:
        return f"its attention implementation '{implementation}' cannot share a prompt; sdpa can"
    own = _measured(model)
    first, second, other = (_shared(part, sharing) for part in (own.probes.first, own.probes.second, own.probes.other))
    rows = [[*first, *second], [*second, *([own.probes.long] if own.probes.long else [])]]
    try:
        with torch.no_grad():
            packed_M, beside_long_M = (read(packed_rows([row], 0).to(device)) for row in rows)
            beside_other_M = read(packed_rows([[*other, *second]], 0).to(device))
        tail = slice(len(packed_M) - _numbers_of(second, own), None)
        gradient = _gradient(model, packed_rows([rows[0]], 0).to(device), tail)
    except Exception as problem:  # noqa: BLE001 - each family refuses a mask by another exception
        return f"its forward rejects the mask of segments ({type(problem).__name__}: {first_line(problem)})"
    before = sum(document.tokens for document in first)
    moved = rms((packed_M - beside_other_M)[tail].double())
    if not moved <= own.tolerance or (gradient is not None and bool((gradient[:before] != 0).any())):
        return "its attention lets one document of a row see another"
    difference = _largest_difference(own, packed_M, beside_long_M if own.probes.long else None, at=tail.start)
    if not difference <= own.tolerance:
        return f"a packed row and separate sequences differ by {difference:.2g}"
    if kernel is not None and device.type == "cuda":
        wrong = kernel.why_wrong(model, device)
        if wrong is not None and not own.others:
            raise ThreestepError(f"--attn_implementation {implementation}: {wrong}; use sdpa")
        if wrong is not None:
            return wrong
    return None if own.with_media is None else own.with_media.why_not(read, device, text=second[0])


def notes_on(model: PreTrainedModel) -> list[str]:
    """Sentences on each deviation from most families' computation, and its reason."""
    own = _measured(model)
    if own.head_is_linear:
        return own.notes
    what = "scores" if own.of_scores else "logits"
    return [*own.notes, f"all {what} are computed: its own forward has more than one linear layer after its trunk"]


def _measured(model: PreTrainedModel) -> OwnForward:
    own = own_forward_of(model)
    assert own is not None, "a sharded model was measured when it was loaded"
    return own


def _largest_difference(own: OwnForward, short_M: torch.Tensor, beside_long_M: torch.Tensor | None, at: int) -> float:
    """Return the larger of `own.difference` of the short sequences, and of those of them beside the long one.

    beside_long_M: numbers of some short sequences, which begin at `at` in `short_M`, then of the long one
    """
    if beside_long_M is None:
        return own.difference(short_M)
    beside_M, long_M = beside_long_M.split([len(beside_long_M) - _long_numbers(own), _long_numbers(own)])
    others_M = torch.cat([short_M[:at], beside_M, short_M[at + len(beside_M) :]])
    differences = [own.difference(torch.cat([part_M, long_M])) for part_M in (short_M, others_M)]
    return next((each for each in differences if each != each), max(differences))  # NaN if one is


def _padded(own: OwnForward) -> list[list[Document]]:
    """Batches of padded rows: all short sequences, then one of them with the long one."""
    short = own.probes.alone[: len(own.probes.alone) - (own.probes.long is not None)]
    return [short, *([[short[0], own.probes.long]] if own.probes.long else [])]


def _shared(document: Document, sharing: bool) -> list[Document]:
    return [document] if sharing else unshared(document)


def _long_numbers(own: OwnForward) -> int:
    return _numbers_of([own.probes.long], own) if own.probes.long else 0


def _numbers_of(documents: Sequence[Document], own: OwnForward) -> int:
    """Number of outputs that a model has for `documents`: their targets, or their sequences."""
    if own.of_scores:
        return sum(len(document.ends) for document in documents)
    return sum(int(part.tokens.is_target.sum()) for document in documents for part in document.segments)


def _gradient(model: PreTrainedModel, rows: TokenRows, numbers: slice) -> torch.Tensor | None:
    """Return the gradient of some of the numbers of `rows`, one row, for each of its tokens' embeddings [T, H]; None if
    the weights are sharded. A token that must not be seen has a gradient of exactly 0, whatever rounds.

    The model is called directly: DeepSpeed allows no other gradient of an engine's output than its own.
    """
    if hasattr(next(model.parameters()), "ds_id"):
        return None
    embedded: list[torch.Tensor] = []

    def as_leaf(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # a family may change it in place (ctrl)

    hook = model.get_input_embeddings().register_forward_hook(as_leaf)
    try:
        with torch.enable_grad():
            read_M = ScalarModel(model)(rows) if _measured(model).of_scores else PolicyModel(model)(rows).logprobs_M
            return torch.autograd.grad(read_M[numbers].sum(), embedded[0])[0].flatten(0, 1)
    finally:
        hook.remove()
