"""Whether a model honours the token layout, by a small forward before training.

Knows no engine: `read` runs the model, sharded or not.

M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from training.utils.layout.documents import Document, TokenSequence, shared_prompt, unshared
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.models.attention import BY_DOCUMENT, FLASH, IMPLEMENTATIONS
from training.utils.run.errors import first_line

# Largest difference in a log-probability or a score, packed against alone, that rounding explains. Wrong positions
# differ by more than rounding; a leak between documents is found without a tolerance.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


def why_not_packed(
    model: PreTrainedModel,
    read: Callable[[TokenRows], torch.Tensor],
    longest_tokens: int,
    device: torch.device,
    sharing: bool = True,
) -> str | None:
    """Return None if packed rows and separate sequences give the same numbers, else the reason why not.

    read: TokenRows -> float32 [M] (or [B]), in eval mode.
    longest_tokens: of the documents of the training.
    sharing: these documents share prompts.
    A collective under ZeRO-3: every rank gets the same result.
    """
    text_config = model.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    windowed = getattr(text_config, "use_sliding_window", True)
    if window is not None and windowed and window < longest_tokens:
        return f"its sliding window of {window} tokens is shorter than the sequences ({longest_tokens} tokens)"
    implementation = model.config._attn_implementation
    if implementation not in (*IMPLEMENTATIONS, BY_DOCUMENT):
        return f"its attention implementation '{implementation}' takes no mask of segments here"
    if sharing and implementation in FLASH:
        return f"its attention implementation '{implementation}' cannot share a prompt; sdpa and flex_attention can"
    vocabulary = text_config.vocab_size
    first, second = _documents(vocabulary, 0, sharing)
    other, _ = _documents(vocabulary, 1, sharing)
    try:
        with torch.no_grad():
            packed = read(packed_rows([[first, second]], 0).to(device))
            beside_another = read(packed_rows([[other, second]], 0).to(device))
            alone = [
                torch.cat([read(packed_rows([[part]], 0).to(device)) for part in unshared(document)])
                for document in (first, second)
            ]
    except Exception as problem:  # noqa: BLE001 - each family refuses a mask by another exception
        return f"its forward refuses the mask of segments ({type(problem).__name__}: {first_line(problem)})"
    tail = alone[0].numel()
    if not torch.equal(packed[tail:], beside_another[tail:]):
        return "its attention lets one document of a row look into another"
    difference = float((packed - torch.cat(alone)).abs().max())
    if not difference <= _TOLERANCE[model.dtype]:
        return f"a packed row and separate sequences differ by {difference:.2g}"
    return None


def _documents(vocabulary: int, seed: int, sharing: bool) -> tuple[Document, Document]:
    """Return two prompts with two responses each (or one), of the same lengths for every seed."""
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
