"""One response token by token, for a person who waits for it: what a rollout draws with the same seed.

P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from transformers import PreTrainedModel

from training.step3_ppo.rollout.base import Sampling
from training.step3_ppo.rollout.hf import Decoding, uniform_streams
from training.step3_ppo.rollout.sampling import draw


@torch.no_grad()
def stream(
    model: PreTrainedModel,
    prompt_ids_P: torch.Tensor,
    sampling: Sampling,
    seed: int,
    more_end_tokens: Collection[int] = (),
) -> Iterator[int]:
    """Yield the response's tokens as they are drawn, up to `max_new_tokens` or a token that ends it, which is yielded
    too: `sampling.end_token_id`, or one of `more_end_tokens`. Bad words and stop strings are for rollouts alone."""
    ends = {sampling.end_token_id, *more_end_tokens}
    uniform_1R = uniform_streams([seed], sampling.max_new_tokens, 1).to(prompt_ids_P.device)
    prompt_ids_1P = prompt_ids_P.unsqueeze(0)
    decoding = Decoding(model, prompt_ids_1P, torch.ones_like(prompt_ids_1P).bool(), sampling.max_new_tokens)
    logits_1V = decoding.prefill(1)
    for t in range(sampling.max_new_tokens):
        token_1, _ = draw(logits_1V, uniform_1R[:, t], sampling)
        token = int(token_1)
        yield token
        if token in ends or t + 1 == sampling.max_new_tokens:
            return
        logits_1V = decoding.step(token_1)
