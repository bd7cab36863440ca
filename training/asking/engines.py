"""What draws a finished model's answers: transformers, or vLLM (--rollout_engine). Both are step 3's.

B sequences, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.base import Sampling
from training.step3_ppo.rollout.hf import TransformersRollout
from training.step3_ppo.rollout.streaming import stream
from training.step3_ppo.rollout.vllm import VllmRollout, check_installed
from training.step3_ppo.vllm_arguments import VllmArguments


@dataclass(frozen=True)
class Drawing:
    """How one model's answers are drawn.

    roll_out: (prompt_ids_BP, prompt_mask_BP, sampling, B seeds) -> Rollout. stream: (prompt_ids_P, sampling, seed, more
    end tokens) -> the tokens of one answer as they are drawn. longest_tokens: of a prompt with its answer; None: no
    bound but the model's.
    """

    roll_out: Callable[[torch.Tensor, torch.Tensor, Sampling, Sequence[int]], Rollout]
    stream: Callable[[torch.Tensor, Sampling, int, Collection[int]], Iterator[int]]
    longest_tokens: int | None


def by_transformers(model: PreTrainedModel) -> Drawing:
    """The engine `hf`."""
    return Drawing(partial(TransformersRollout().roll_out, model), partial(stream, model), None)


def by_vllm(model: PreTrainedModel, flags: VllmArguments, longest_tokens: int) -> Drawing:
    """The engine `vllm`, started here with `model`'s weights and kept awake: nothing is trained beside it."""
    longest_tokens = min(longest_tokens, positions_of(model) or longest_tokens)
    engine = VllmRollout(None, replace(flags, vllm_sleep=False), longest_tokens)
    engine.keep(model)
    return Drawing(partial(engine.roll_out, model), engine.stream, longest_tokens)


def chosen(name: str, flags: VllmArguments, longest_tokens: int) -> Callable[[PreTrainedModel], Drawing]:
    """What makes the Drawing of --rollout_engine `name`; ThreestepError, before a model loads, without vLLM."""
    if name == "hf":
        return by_transformers
    check_installed()
    return partial(by_vllm, flags=flags, longest_tokens=longest_tokens)


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model has positions for; None where it has no bound."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
