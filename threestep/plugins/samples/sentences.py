"""Samples of supervised fine-tuning: held-out rows with their loss, the response of the data and the model's.

The model's is drawn greedily (`GreedyDrawing`), from separate streams: no random state of training is read or moved. B
prompts, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.samples.samples import SampleTexts, sample_uid
from training.utils.base.console import log
from training.utils.contracts.documents import media_between
from training.utils.contracts.rollout_engine import Ends, RolloutEngine, RolloutRequest, Sampling, rolled_out
from training.utils.contracts.rows import PromptRow, SentenceRow
from training.utils.data.rows.documents import collate_prompts
from training.utils.engine.ranks.collectives import gathered
from training.utils.generation.decoding.decode_check import why_not_decoded
from training.utils.generation.decoding.decoding import WAYS
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import stop_tokens

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.run import EvaluatedRun, HeldOutRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.whole_model import WholeModel

MOST_TOKENS = 64  # of a drawn response: enough to see, and as cheap as a few forwards


@dataclass(frozen=True)
class Parts:
    """Token ids of a row up to its first response, and of that response. media: of the prompt."""

    prompt: list[int]
    response: list[int]
    media: tuple[Any, ...] = ()


def parts_of(row: SentenceRow) -> Parts:
    """Split a row where its loss begins, and where it first ends: of a chat, the first turn."""
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    first = mask.index(True)
    end = next((place for place in range(first, len(ids)) if not mask[place]), len(ids))
    return Parts(ids[:first], ids[first:end], media_between(row.media, 0, first))


@dataclass(frozen=True)
class Drawn:
    """A response: its token ids, and whether it ended before `MOST_TOKENS`."""

    ids: list[int]
    ended: bool


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


def open_drawing(run: EvaluatedRun, held_out: HeldOutRows) -> GreedyDrawing | None:
    """Open the sampler of the model in training; None, with the reason logged, if it draws no responses."""
    reason = _why_not_drawn(run)
    if reason is not None:
        log(f"samples show the loss of each row, but no generated responses: {reason}", run.model.engine.ranks.is_main)
        return None
    longest = run.settings["max_seq_len"]
    first, *more = stop_tokens(run.model.model) or [-1]
    sampling = Sampling(
        max_new_tokens=max(1, min(MOST_TOKENS, longest // 2)),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        end_token_id=first,
        pad_token_id=run.tokenizer.pad_token_id,
        ends=Ends(token_ids=tuple(more)),
    )
    return GreedyDrawing(TransformersRollout(), run.model, sampling, longest, run.rows_per_batch, held_out.media)


def _why_not_drawn(run: EvaluatedRun) -> str | None:
    if run.settings["loss_on"] == "conversation":
        return "with --loss_on conversation, a row has no prompt separate from its response"
    if run.model.is_sharded:
        return "under --zero_stage 3 no rank holds the full weights, and gathering them may not fit in memory"
    measured = own_forward_of(run.model.model)
    name = type(run.model.model).__name__
    if measured is None:
        return f"{name} was not checked on loading"
    with run.model.lent() as model:
        reason = why_not_decoded(model, measured, WAYS[0])
    return None if reason is None else f"{name} cannot be decoded {WAYS[0].words}: {reason}"


def sentence_samples(
    rows: Mapping[int, SentenceRow],
    losses: Mapping[int, Sequence[float]],
    drawn: Mapping[int, Drawn],
    samples: SampleTexts,
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl. losses: nats a token, one by row; a row that was not drawn has no response."""
    written = []
    for index, row in rows.items():
        parts = parts_of(row)
        prompt, truth = samples.text(parts.prompt), samples.text(parts.response)
        media = samples.media(row.media)
        sample: dict[str, Any] = {
            "prompt_index": index,
            "uid": sample_uid(prompt, truth, *media.names),
            "prompt": prompt,
            **media.columns,
            "ground_truth": truth,
            "loss": losses[index][0],
        }
        if index in drawn:
            response = drawn[index]
            sample |= {
                "response": samples.text(response.ids),
                "response_tokens": len(response.ids),
                "ended": response.ended,
            }
        written.append(sample)
    return written
