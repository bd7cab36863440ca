"""The flags of lengths, truncation and loss; cheap to import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.run.flags import flag

TRUNCATIONS = ("right", "left", "middle", "error", "drop")
LOSS_PLACES = ("response", "conversation")


@dataclass
class RowArguments:
    """How long rows may be, what happens to longer ones, where the loss falls, and what prompts carry."""

    max_seq_len: int = flag(512, "Phases 1 and 2: maximum tokens of prompt and response together.", least=2)
    max_prompt_seq_len: int = flag(256, "Phase 3: maximum tokens of a prompt.", least=1)
    truncation: str = flag(
        "right",
        "Phases 1 and 2, a sentence longer than max_seq_len: 'right' cuts the end of the response, 'left' "
        "the beginning of the prompt, 'middle' the middle of the prompt, 'drop' drops the row, 'error' stops.",
        choices=TRUNCATIONS,
    )
    prompt_truncation: str = flag(
        "drop",
        "Phase 3, a prompt longer than max_prompt_seq_len: 'drop' drops it, 'left', 'right' and 'middle' "
        "cut it there, 'error' stops.",
        choices=TRUNCATIONS,
    )
    loss_on: str = flag(
        "response",
        "Phase 1: which tokens carry loss: 'response', or 'conversation' (the prompt too).",
        choices=LOSS_PLACES,
    )
    return_raw_ids: bool = flag(
        False, "Phase 3: pass the prompt's ids (cut, not padded) to rewards and samples as raw_prompt_ids."
    )
    return_raw_chat: bool = flag(False, "Phase 3: pass the prompt's messages to rewards and samples as raw_prompt.")
    return_full_prompt: bool = flag(
        False, "Phase 3: pass the text that was tokenized, uncut, to rewards and samples as full_prompts."
    )
