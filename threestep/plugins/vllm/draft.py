"""The head of multi-token prediction that a vLLM engine drafts with: its configuration, its weights, its figures.

Receives vLLM's engine as an argument, and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.speculation.speculation import GuessCounts
from threestep.plugins.vllm.head_folder import draft_tensors, write_draft

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from training.utils.contracts.guests import BorrowHead

_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


class VllmDraft:
    """Drafts `tokens` tokens with the head that `borrow_head` lends. All of it but `figures` is a collective under
    ZeRO-3."""

    def __init__(self, tokens: int, borrow_head: BorrowHead) -> None:
        self._tokens, self._borrow_head = tokens, borrow_head
        self._seen = dict.fromkeys(_COUNTERS, 0)

    def described(self, folder: Path) -> dict[str, Any]:
        """Write what vLLM is to know of the head into `folder`, which has the model's configuration; return its
        `speculative_config`."""
        with self._borrow_head() as head:
            return write_draft(folder, head.state_dict(), self._tokens)

    def tensors(self, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return copies of the head's weights as vLLM loads them. config: of the model beside it."""
        with self._borrow_head() as head:
            found = draft_tensors(config.model_type, config.num_hidden_layers, head.state_dict())
            return {name: tensor.detach().to(dtype, copy=True) for name, tensor in found.items()}

    def figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics since the last call. metrics: vLLM's counters, since it started."""
        now = {name: int(metrics.get(f"vllm:spec_decode_num_{name}", 0)) for name in _COUNTERS}
        drafts, guesses, accepted = (now[name] - self._seen[name] for name in _COUNTERS)
        self._seen = now
        # Each draft is verified by one forward, which draws a token of its own.
        return GuessCounts(drafts, drafts + accepted, guesses, accepted).figures()


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return x [B] repeated for the tokens of each request, [num_tokens]; values of `replace_from` become `replace_to`.

    In the place of vLLM's function of this name, which gives each draft its temperature, top-k and top-p. In its CPU
    build (0.32, utils/cpu_triton_utils.py) that writes into a copy and returns memory that nobody has filled: drafts
    are then verified against another distribution, or indices are out of bounds.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    filled = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return filled.repeat_interleave(counts.long(), output_size=num_tokens)
