"""Blocks of text that the actor learns from beside its rollouts, and their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.pretraining_loss.arguments import PretrainingArguments, TextArguments
from threestep.plugins.pretraining_loss.blocks import build_unsupervised
from training.step3_ppo.contracts.records import LearntBeside
from training.utils.base.console import log
from training.utils.base.transfer import moved
from training.utils.contracts.documents import TokenSequence, join
from training.utils.engine.accumulate import MicroBatch, MicroLoss
from training.utils.layout.order import ShuffledStream
from training.utils.layout.trie import rank_share

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rows import TextBlock
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.trie import SequenceLayout


class LearntTexts(LearntBeside):
    """One block beside each sequence of a minibatch, in shuffled epochs. coefficient: of their loss; at 0 they are only
    read."""

    def __init__(self, blocks: Sequence[TextBlock], coefficient: float, seed: int, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint
        self._blocks, self._coefficient, self._taken = blocks, coefficient, 0
        self._stream = ShuffledStream(len(blocks), seed)

    def beside(self, count: int, actor: TrainingEngine, layout: SequenceLayout) -> list[MicroBatch]:
        """See `LearntBeside.beside`."""
        taken = self._stream.take(self._taken, count)
        self._taken += count
        return text_batches([self._blocks[row] for row in taken], self._coefficient, actor, layout)

    def state_dict(self) -> dict[str, Any]:
        """See `LearntBeside.state_dict`."""
        return {"texts_taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LearntBeside.load_state_dict`."""
        self._taken = state["texts_taken"]


def learnt_texts(flags: PpoFlags, tokenizer: Any, ranks: Ranks) -> LearntTexts:
    """Build the blocks, as long as the longest prompt with its response."""
    named, coefficient = flags.added.of(TextArguments), flags.added.of(PretrainingArguments).unsup_coef
    length, seed, is_main = flags.longest_tokens, flags.run.seed, ranks.is_main
    blocks = build_unsupervised(named, flags.data, tokenizer, length, seed=seed, is_main_rank=is_main, log=log)
    return LearntTexts(blocks, coefficient, seed, blocks.manifest["fingerprint"])


def text_batches(
    blocks: Sequence[TextBlock], coefficient: float, actor: TrainingEngine, layout: SequenceLayout
) -> list[MicroBatch]:
    """Return this rank's micro-batches of blocks that all ranks share."""
    texts, device = [text_sequence(block) for block in blocks], actor.ranks.device
    tokens = float(sum(int(text.is_target.sum()) for text in texts))

    def loss_of(rows: TokenRows) -> MicroLoss:
        loss = pretraining_loss(actor(rows).logprobs_M, tokens)
        return MicroLoss(coefficient * loss, {"actor/pretraining_loss": loss})

    shares = [moved(rows, device) for _, rows in rank_share(texts, layout, device, sharing=False)]
    return [MicroBatch(rows, partial(loss_of, rows), learns=coefficient > 0) for rows in shares]


def text_sequence(block: TextBlock) -> TokenSequence:
    """Return a block of text as a sequence in which all but the first token are to be predicted."""
    ids = torch.as_tensor(block.input_ids.astype("int64"))
    return join(ids[:1], ids[1:])


def pretraining_loss(logprobs_M: torch.Tensor, tokens_in_step: float) -> torch.Tensor:
    """Return this micro-batch's part of the mean negative log-likelihood of unsupervised text.

    The gamma term of InstructGPT's PPO-ptx before its coefficient (Ouyang et al. 2022, equation 2). tokens_in_step
    counts text tokens of the optimizer step on all ranks.
    """
    return -logprobs_M.sum() / tokens_in_step
