"""The rows that a rollout decodes: the inputs of their prompts, which rows are active, and how each gets the logits of
its next token.

Most families decode prompts of different lengths in one batch, padded on the left, with our cache. Those that cannot
(their positions or states count the padding, their cache is of another kind, or they have none) do it in another way;
`decode_check` finds out which.

B sequences (prompts, until they are repeated), of which A are still active; P prompt tokens, T tokens, V vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.user_files import named_object
from training.utils.generation.decoding.cache import (
    StepMasks,
    compacted,
    holds_keys_alone,
    leave,
    moves_when_leaving,
    reorder,
    roomy_cache,
    windows_of,
)
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.guests import TokenLog
    from training.utils.contracts.rollout_engine import RolloutRequest


@dataclass(frozen=True)
class PromptInputs:
    """position_ids: int64 [B, P], or [3, B, P] where a medium counts by its sides (M-RoPE).
    last_B1: int64, one less than the position of the token behind each prompt.
    of_media: further arguments of the forward.
    """

    position_ids: torch.Tensor
    last_B1: torch.Tensor
    of_media: dict[str, Any] = field(default_factory=dict)


def prompt_inputs(model: Any, request: RolloutRequest, accepted: Container[str]) -> PromptInputs:
    """accepted: names of the arguments of the model's forward."""
    mask_BP, media = request.prompt_mask_BP, request.media
    position_ids_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    if media is None or not any(media.spans):
        return PromptInputs(position_ids_BP, position_ids_BP[:, -1:])
    taken_B1, by_sides = media.positions(mask_BP)
    of_media = media.forward_kwargs(model, mask_BP, accepted)
    return PromptInputs(position_ids_BP if by_sides is None else by_sides, taken_B1 - 1, of_media)


OURS, OWN, NONE = "ours", "own", "none"


@dataclass(frozen=True)
class DecodeWay:
    """padded: prompts of different lengths are one batch, padded on the left; else each length is a batch.
    cache: OURS (`roomy_cache`), OWN (that which the family makes), or NONE: each token computes its whole sequence.
    words: of the log, after "rolls out".
    masks_are_ours: `StepMasks` makes the mask of each token, else the family does, from which tokens are padding.
    fixed: tensors stay in their places from the first drawn token on (`captured_steps`), with our masks.
    """

    padded: bool
    cache: str
    words: str
    masks_are_ours: bool = False
    fixed: bool = False


# From the fastest to the slowest: those that most families can, then those for any family.
FIXED = DecodeWay(True, OURS, "prompts of different lengths in one batch, with captured graphs", True, True)
MASKED = DecodeWay(True, OURS, "prompts of different lengths in one batch, with masks made once", True)
WAYS = (
    DecodeWay(True, OURS, "prompts of different lengths in one batch"),
    DecodeWay(True, OWN, "prompts of different lengths in one batch with the family's own cache"),
    DecodeWay(False, OURS, "prompts of one length at a time"),
    DecodeWay(False, OWN, "prompts of one length at a time with the family's own cache"),
    DecodeWay(False, NONE, "prompts of one length at a time without a cache"),
)


def captured_steps() -> Any:
    """Return the class of decode steps that a plugin captures (`captured_steps` of `Plugin.tables`); None without."""
    return next(map(named_object, added("captured_steps", ()).values()), None)


class Decoding:
    """The active rows: their indices in B, cache, mask and last position.

    Where `way` is not padded, the prompts of `request` are of one length, without padding (`of_one_length`), and the
    family is given neither mask nor positions. Where it is fixed, rows that are over may stay a while.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        request: RolloutRequest,
        way: DecodeWay = WAYS[0],
        log: TokenLog | None = None,
        *,
        prefill_tokens: int | None = None,
    ) -> None:
        """log: is told of each token that is read. prefill_tokens: of the prompts that one forward reads, where
        the cache can be continued and no prompt has media; None: all."""
        self._most, prompt_mask_BP = request.sampling.max_new_tokens, request.prompt_mask_BP
        count, self.length = prompt_mask_BP.shape
        self.model, self.way = model, way
        self._accepted = inspect.signature(model.forward).parameters
        # Pure state-space models name the cache differently, and silently ignore any other name.
        self.is_state_space = "cache_params" in self._accepted
        self.cache: Any = roomy_cache(model, self.length + self._most) if way.cache == OURS else None
        self.input_ids = request.prompt_ids_BP
        self.mask = torch.nn.functional.pad(prompt_mask_BP.long(), (0, self._most), value=1)
        assert way.padded or request.media is None, "only padded prompts are given positions"
        self._prompts = prompt_inputs(model, request, self._accepted)
        self.position_ids = self._prompts.last_B1
        self.rows_A = torch.arange(count, device=prompt_mask_BP.device)
        self._log, self._prompt_tokens = log, self.length
        self._part_tokens = self.length
        keeps_parts = way.padded and way.cache == OURS and holds_keys_alone(self.cache)
        if prefill_tokens is not None and keeps_parts and not self._prompts.of_media:
            self._part_tokens = prefill_tokens
        self._masks: StepMasks | None = None
        self._steps: Any = None

    def prefill(self, samples_per_prompt: int) -> torch.Tensor:
        """Compute each prompt once, then give each sample a row; return the logits [A, V] of the first tokens."""
        logits_BV = self._read_prompts()
        if samples_per_prompt > 1:
            order = self.rows_A.repeat_interleave(samples_per_prompt)
            if self.way.cache == NONE:
                self.input_ids = self.input_ids[order]
            else:
                reorder(self.cache, order)
            self.mask, self.position_ids = self.mask[order], self.position_ids[order]
            self.rows_A, logits_BV = torch.arange(len(order), device=order.device), logits_BV[order]
        if self.way.masks_are_ours:
            self._prepare_steps()
        return logits_BV

    def _read_prompts(self) -> torch.Tensor:
        """Return the logits [B, V] behind the prompts. A part of them takes a mask of its tokens by all before."""
        ids_BP, prompts = self.input_ids, self._prompts
        for start in range(0, self.length, self._part_tokens):
            end = min(start + self._part_tokens, self.length)
            positions = prompts.position_ids[..., start:end]
            logits_BV = self.forward(ids_BP[:, start:end], self.mask[:, :end], positions, prompts.of_media)
            if self._log is not None:
                self._log.note_prompt_tokens()
        return logits_BV

    def _prepare_steps(self) -> None:
        """Once the rows are known: what is made once for all tokens to come."""
        windows, seen_AT = windows_of(self.model.config, self.cache), self.mask.bool()
        if self.way.fixed:
            limit, held_AT = seen_AT.shape[1], seen_AT[:, : self.length]
            self._steps = captured_steps()(
                self.forward, self.cache, windows, held_AT, position_A1=self.position_ids, limit_tokens=limit
            )
        else:
            self._masks = StepMasks(windows, seen_AT, self.cache.layers[0].keys.dtype)

    def drop(self, token_A: torch.Tensor, over: list[bool]) -> torch.Tensor:
        """Drop the rows that are over; return the tokens of the others in their new order."""
        if not any(over) or (self._steps is not None and not self._steps.leave_now(over)):
            return token_A
        moves = moves_when_leaving(over, token_A.device)
        if self.way.cache == NONE:
            self.input_ids = self.input_ids[moves.order]
        elif self._steps is not None:
            self._steps.leave(moves)
        elif moves.count:
            leave(self.cache, moves)
        if self._masks is not None:
            self._masks.leave(moves)
        self.mask, self.position_ids, self.rows_A = (
            compacted(part, moves) for part in (self.mask, self.position_ids, self.rows_A)
        )
        return compacted(token_A, moves)

    def step(self, token_A: torch.Tensor) -> torch.Tensor:
        """Append one token to each row; return the logits [A, V] of the next, which may be overwritten by the next
        call."""
        self.length += 1
        if self._steps is not None:
            return self._steps.step(token_A, self.length - 1)
        token_A1 = token_A.unsqueeze(1)
        self.input_ids = torch.cat([self.input_ids, token_A1], dim=1) if self.way.cache == NONE else token_A1
        self.position_ids = self.position_ids + 1
        mask = self.mask[:, : self.length] if self._masks is None else self._masks.at(self.length)
        # Their state holds the past; they would multiply the whole mask with the single new token.
        logits_AV = self.forward(self.input_ids, None if self.is_state_space else mask, self.position_ids)
        if self._log is not None:
            self._log.note_tokens(self.rows_A, self.length - 1 - self._prompt_tokens)
        return logits_AV

    def forward(
        self, input_ids: torch.Tensor, mask: Any, position_ids: torch.Tensor, of_media: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Return the logits [A, V] of the last position. mask: as the family's forward takes it. of_media: further
        arguments of prompts with media."""
        name = "cache_params" if self.is_state_space else "past_key_values"
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": self.way.cache != NONE, "logits_to_keep": 1}
        if self.way.padded:
            inputs |= {"attention_mask": mask, "position_ids": position_ids, **(of_media or {})}
        if self.cache is not None:
            inputs[name] = self.cache
        if self.way not in (FIXED, MASKED, WAYS[0]):  # families of any signature
            known = {*self._accepted, *(of_media or {})}
            inputs = {key: value for key, value in inputs.items() if key in known}
        output = self.model(**inputs)
        if self.way.cache == OWN:
            self.cache = getattr(output, name)
        return output.logits[:, -1].float()


def of_one_length(request: RolloutRequest) -> Iterator[tuple[list[int], RolloutRequest]]:
    """Yield requests for the prompts of each length, without padding, with the indices of their sequences in `request`
    (as `request.repeated()` orders them)."""
    samples, lengths = request.samples_per_prompt, request.prompt_mask_BP.sum(dim=1).tolist()
    for length in sorted(set(lengths)):
        prompts = [prompt for prompt, own in enumerate(lengths) if own == length]
        rows = [prompt * samples + sample for prompt in prompts for sample in range(samples)]
        ids_BP = request.prompt_ids_BP[prompts][request.prompt_mask_BP[prompts]].view(len(prompts), length)
        mask_BP = torch.ones_like(ids_BP).bool()
        seeds: Sequence[int] = [request.seeds[row] for row in rows]
        own = None if request.media is None else request.media.picked(prompts)
        yield rows, replace(request, prompt_ids_BP=ids_BP, prompt_mask_BP=mask_BP, seeds=seeds, media=own)
