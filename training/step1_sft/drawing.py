"""The model's responses in samples of supervised fine-tuning.

They are drawn greedily (`GreedyDrawing`), from separate streams: no random state of training is read or moved. B
prompts, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from training.step1_sft.samples import MOST_TOKENS, Drawn, Parts, parts_of
from training.utils.base.console import log
from training.utils.contracts.rollout_engine import Ends, RolloutEngine, RolloutRequest, Sampling, rolled_out
from training.utils.contracts.rows import PromptRow, SentenceRow
from training.utils.data.rows.collate import collate_prompts
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.whole_model import WholeModel
from training.utils.generation.decoding.decode_check import why_not_decoded
from training.utils.generation.decoding.decoding import WAYS
from training.utils.generation.engines.hf import TransformersRollout
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import stop_tokens

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.setup.opened_model import OpenedModel


@dataclass(frozen=True)
class GreedyDrawing:
    """Draws responses from `whole`, whose weights are whole on each rank without a gather.

    longest_tokens: a prompt that leaves less than `sampling.max_new_tokens` of them is not drawn from.
    rows_at_a_time: of one rank, as in an evaluation's forward.
    media: of the rows; None where no row has some.
    """

    engine: RolloutEngine
    whole: WholeModel
    sampling: Sampling
    longest_tokens: int
    rows_at_a_time: int
    media: RunMedia | None = None

    def __call__(self, rows: Mapping[int, SentenceRow], ranks: Ranks) -> dict[int, Drawn]:
        """The responses by row, of rows whose prompts leave room. A collective: ranks share the rows out."""
        parts = {index: parts_of(row) for index, row in rows.items()}
        most = self.longest_tokens - self.sampling.max_new_tokens
        fitting = [index for index, part in parts.items() if len(part.prompt) <= most]
        mine, responses = fitting[ranks.rank :: ranks.world_size], dict[int, Drawn]()
        for start in range(0, len(mine), self.rows_at_a_time):
            part = mine[start : start + self.rows_at_a_time]
            responses |= dict(zip(part, self._drawn([parts[index] for index in part], ranks.device), strict=True))
        return {index: drawn for part in gathered(responses) for index, drawn in part.items()}

    def _drawn(self, parts: Sequence[Parts], device: torch.device) -> list[Drawn]:
        flipped = [PromptRow(0, torch.tensor(part.prompt).flip(0).numpy(), "", None) for part in parts]
        batch = collate_prompts(flipped, self.sampling.pad_token_id)
        ids_BP, mask_BP = batch.prompt_ids_BP.to(device), batch.prompt_mask_BP.to(device)
        media = None if self.media is None else self.media.of_prompts([part.media for part in parts])
        seeds = [0] * len(parts)  # greedy: they are not used
        request = RolloutRequest(ids_BP, mask_BP, self.sampling, seeds, media=media)
        with torch.no_grad(), self.engine.lent(self.whole) as model:
            rollout = rolled_out(self.engine, model, request)
        ended = rollout.ended_B.tolist()
        return [Drawn(rollout.response_of(row).tolist(), ended[row]) for row in range(len(parts))]


def open_drawing(opened: OpenedModel) -> GreedyDrawing | None:
    """Open the sampler of the model in training; None, with the reason logged, if it draws no responses."""
    flags, run = opened.flags, opened.training
    if not run.samples.count or not len(run.eval_rows):
        return None
    whole = WholeModel(run.engine, opened.model)
    reason = _why_not_drawn(opened, whole)
    if reason is not None:
        log(f"samples show the loss of each row and draw no responses: {reason}", run.ranks.is_main)
        return None
    longest = flags.data.rows.max_seq_len
    first, *more = stop_tokens(opened.model) or [-1]
    sampling = Sampling(
        max_new_tokens=max(1, min(MOST_TOKENS, longest // 2)),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        end_token_id=first,
        pad_token_id=run.settings.pad_token_id,
        ends=Ends(token_ids=tuple(more)),
    )
    at_a_time = flags.engine.per_device_eval_batch_size
    return GreedyDrawing(TransformersRollout(), whole, sampling, longest, at_a_time, run.media)


def _why_not_drawn(opened: OpenedModel, whole: WholeModel) -> str | None:
    flags = opened.flags
    if flags.data.rows.loss_on == "conversation":
        return "with --loss_on conversation a row has no prompt apart from its response"
    if whole.is_sharded:
        return "under --zero_stage 3 no rank has whole weights, and to gather them may not fit into memory"
    measured = own_forward_of(opened.model)
    name = type(opened.model).__name__
    if measured is None:
        return f"{name} was not read when it was loaded"
    with whole.lent() as model:
        reason = why_not_decoded(model, measured, WAYS[0])
    return None if reason is None else f"{name} cannot be decoded {WAYS[0].words}: {reason}"
