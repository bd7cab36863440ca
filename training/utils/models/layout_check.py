"""Does this model honour the token layout? A small forward before training answers.

Knows no engine: `read` runs the model, wherever and however it is sharded.

M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from training.utils.layout.documents import Document, TokenSequence, shared_prompt, unshared
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.models.attention import BY_DOCUMENT, IMPLEMENTATIONS, shares_prompts

# Largest difference in a log-probability or a score, packed beside alone, that rounding explains. A model with wrong
# positions differs by more than its own rounding; a leak between documents is found without a tolerance.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


def why_not_packed(
    model: PreTrainedModel,
    read: Callable[[TokenRows], torch.Tensor],
    longest_tokens: int,
    device: torch.device,
    sharing: bool = True,
) -> str | None:
    """Return None where packed rows give what separate sequences give, else the reason. sharing: the documents to
    come share prompts.

    read: TokenRows -> float32 [M] (or [B]), in eval mode. longest_tokens: of the documents to come. Under ZeRO-3 a
    collective: every rank calls it, and every rank gets the same answer.
    """
    text_config = model.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    windowed = getattr(text_config, "use_sliding_window", True)
    if window is not None and windowed and window < longest_tokens:
        return f"its sliding window of {window} tokens is shorter than the sequences ({longest_tokens} tokens)"
    implementation = model.config._attn_implementation
    if implementation not in (*IMPLEMENTATIONS, BY_DOCUMENT):
        return f"its attention implementation '{implementation}' takes no mask of segments here"
    if sharing and not shares_prompts(implementation):
        return f"its attention implementation '{implementation}' cannot share a prompt; sdpa and flex_attention can"
    vocabulary = text_config.vocab_size
    first, second = _documents(vocabulary, 0, sharing)
    other, _ = _documents(vocabulary, 1, sharing)
    try:
        with torch.no_grad():
            packed = read(packed_rows([[first, second]], 0).to(device))
            beside_another = read(packed_rows([[other, second]], 0).to(device))
            alone = torch.cat(
                [read(packed_rows([[part]], 0).to(device)) for part in (*unshared(first), *unshared(second))]
            )
    except Exception as problem:  # noqa: BLE001 - a family that refuses the mask does so in a way of its own
        return f"its forward refuses the mask of segments ({type(problem).__name__}: {_first_line(problem)})"
    tail = packed.numel() - _outputs(packed, first, second)
    if not torch.equal(packed[tail:], beside_another[tail:]):
        return "its attention lets one document of a row look into another"
    difference = float((packed - alone).abs().max())
    if not difference <= _TOLERANCE[model.dtype]:
        return f"a packed row and separate sequences differ by {difference:.2g}"
    return None


def _documents(vocabulary: int, seed: int, sharing: bool) -> tuple[Document, Document]:
    """A prompt with two responses (or one), and another; the same lengths for every seed."""
    generator = torch.Generator().manual_seed(seed)

    def run(length: int, is_target: bool) -> TokenSequence:
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        return TokenSequence(ids, torch.full((length,), is_target))

    def document(prompt: int, *responses: int) -> Document:
        whole = shared_prompt(run(prompt, False), [run(length, True) for length in responses])
        return whole if sharing else unshared(whole)[0]

    first = document(5, 3, 4)
    generator.manual_seed(100)  # the second document is the same for every seed
    return first, document(4, 2, 3)


def _outputs(packed: torch.Tensor, first: Document, second: Document) -> int:
    """How many of the numbers read belong to the second document: one a target, or one a sequence."""
    targets = [sum(int(part.tokens.is_target.sum()) for part in document.segments) for document in (first, second)]
    return targets[1] if packed.numel() == sum(targets) else len(second.ends)


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [""])[0][:200]
