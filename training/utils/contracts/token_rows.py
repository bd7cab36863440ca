"""Rows of tokens as a model sees them: the record that every step feeds its models with. `layout.rows` makes it.

N rows, T tokens in a row, B sequences, M tokens to be predicted, U different ones of these, S segments of a row
(padding is one more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved
from training.utils.contracts.runs import PAD_SEGMENT, RunLengths, lengths_of, runs_of

if TYPE_CHECKING:
    from training.utils.contracts.row_media import RowMedia

MOST_MASK_BYTES = 2**33  # of a dense mask: 92,681 tokens squared; three of its size are held while it is made


@dataclass(frozen=True)
class RepeatedTargets:
    """Targets that several sequences share, of which a model reads each once (`TokenRows.reads`).

    read_M: int64, which of the U different targets each of the M is.
    first_U: int64, the first of the M that each of the U is.
    """

    read_M: torch.Tensor
    first_U: torch.Tensor


@dataclass(frozen=True)
class SegmentMap:
    """Visibility in rows of several documents, or of documents of several segments.

    visible_NSS: bool, may segment s look at segment t.
    copies_NS: int64, how many sequences hold each segment; padding, the last column, is 0.
    run_lengths: the input of varlen attention; made when the rows leave the host.
    repeats: None where no two targets are the same.
    """

    visible_NSS: torch.Tensor
    copies_NS: torch.Tensor
    run_lengths: RunLengths | None = None
    repeats: RepeatedTargets | None = None


@dataclass(frozen=True)
class Slots:
    """More about the slots of rows; None where it is not asked for.

    before_NT: int64, flat position of the token before each in its sequence; a sequence's first token and padding have
        their own.
    experts_NTLK: int16, the K experts by which each of L layers is to compute a token (`TokenSequence.experts`).
    """

    before_NT: torch.Tensor | None = None
    experts_NTLK: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenRows:
    """A micro-batch as a model sees it.

    Worked example: the sequences [5 6 7*] and [8 9*] (* to be predicted) in padded rows, pad id 0:
        input_ids_NT   [[5 6 7], [8 9 0]]      position_ids_NT [[0 1 2], [0 1 2]]
        segment_ids_NT [[0 0 0], [0 0 -1]]     segments None
        target_ids_M [7 9]   predictor_M [1 3]   sequence_M [0 1]   end_B [2 4]
    and packed into one row:
        input_ids_NT   [[5 6 7 8 9]]           position_ids_NT [[0 1 2 0 1]]
        segment_ids_NT [[0 0 0 1 1]]           segments.visible_NSS [[[T F], [F T]]]
        target_ids_M [7 9]   predictor_M [1 3]   sequence_M [0 1]   end_B [2 4]

    input_ids_NT, position_ids_NT, segment_ids_NT: int64; segment -1 is padding.
    target_ids_M: int64, the tokens to predict, sequence by sequence: one that several share is there for each.
    predictor_M: int64, flat position n*T+t whose hidden state predicts each target.
    sequence_M: int64, the sequence each target belongs to.
    end_B: int64, flat position of each sequence's last real token.
    segments: None if every row is one document of one segment, for which causal attention is enough.
    media: None for rows of text alone.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    segment_ids_NT: torch.Tensor
    target_ids_M: torch.Tensor
    predictor_M: torch.Tensor
    sequence_M: torch.Tensor
    end_B: torch.Tensor
    segments: SegmentMap | None = None
    slots: Slots = Slots()
    media: RowMedia | None = None

    @property
    def before_NT(self) -> torch.Tensor | None:
        return self.slots.before_NT

    @property
    def experts_NTLK(self) -> torch.Tensor | None:
        return self.slots.experts_NTLK

    def of_free_experts(self) -> TokenRows:
        """Return the same rows with every choice of experts left to the model."""
        return replace(self, slots=replace(self.slots, experts_NTLK=None))

    def to(self, device: torch.device | str) -> TokenRows:
        leaves_host = self.input_ids_NT.device.type == "cpu" and torch.device(device).type != "cpu"
        return moved(self.leaving_host() if leaves_host else self, device)

    def leaving_host(self) -> TokenRows:
        """Return the same rows with their `run_lengths`, which on a device would cost a wait."""
        if self.segments is None:
            return self
        return replace(self, segments=replace(self.segments, run_lengths=self.lengths()))

    def lengths(self) -> RunLengths | None:
        """Return `run_lengths`, made now where the rows have none (on a device: a wait for it); None if every row is
        one document."""
        if self.segments is None:
            return None
        made = self.segments.run_lengths
        return made or lengths_of(runs_of(self.segment_ids_NT, self.segments.visible_NSS)).to(self.input_ids_NT.device)

    def copies_NT(self) -> torch.Tensor:
        """Return int64 [N, T]: how often each token stands in the separate sequences that the rows hold; 0 is padding.
        A prompt that K responses share counts K times."""
        if self.segments is None:
            return (self.segment_ids_NT != PAD_SEGMENT).long()
        copies_NS = self.segments.copies_NS
        return copies_NS.gather(1, self.segment_ids_NT % copies_NS.shape[1])

    def of_whole_sequences(self, parts: Sequence[int]) -> TokenRows:
        """Return the same rows with the sequences counted whole that they hold in parts, one after the other: `parts`
        says of how many each is. A sequence ends where its last part does."""
        whole_B, last_B = torch.tensor(parts), torch.tensor(parts).cumsum(0) - 1
        number_of_part = torch.arange(len(parts)).repeat_interleave(whole_B)
        return replace(self, sequence_M=number_of_part[self.sequence_M], end_B=self.end_B[last_B])

    def reads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the different targets of the rows and what predicts them, int64 [U] each, and which of them each of
        the M is (None where no two targets are the same)."""
        repeats = None if self.segments is None else self.segments.repeats
        if repeats is None:
            return self.target_ids_M, self.predictor_M, None
        return self.target_ids_M[repeats.first_U], self.predictor_M[repeats.first_U], repeats.read_M

    def without_targets(self) -> TokenRows:
        """Return the same rows with nothing to predict: their forward computes no logits."""
        return self.with_targets(*(part[:0] for part in (self.target_ids_M, self.predictor_M, self.sequence_M)))

    def with_targets(
        self, target_ids_M: torch.Tensor, predictor_M: torch.Tensor, sequence_M: torch.Tensor
    ) -> TokenRows:
        """Return the same rows with other targets, each of which is read, also where several are the same."""
        segments = None if self.segments is None else replace(self.segments, repeats=None)
        bare = replace(self, target_ids_M=target_ids_M, predictor_M=predictor_M, sequence_M=sequence_M)
        return replace(bare, segments=segments)

    @property
    def is_causal(self) -> bool:
        """True if no token looks at a later one."""
        return self.media is None or self.media.blocks_NT is None

    def dense_mask(self) -> torch.Tensor | None:
        """Return bool [N, 1, T, T], True where a token may look, or None if causal attention is enough: to what its
        segment sees and was before it, and to all of its own block (`RowMedia`).

        Padding sees itself: a mask row of only False gives NaN in some attention kernels.

        ThreestepError for a mask beyond MOST_MASK_BYTES.
        """
        blocks_NT = None if self.media is None else self.media.blocks_NT
        if self.segments is None and blocks_NT is None:
            return None
        count, width = self.segment_ids_NT.shape
        if count * width**2 > MOST_MASK_BYTES:
            raise ThreestepError(
                f"a mask of {width:,} x {width:,} tokens for {count} row{'s' if count > 1 else ''} takes "
                f"{count * width**2 / 1e9:.0f} GB, at most {MOST_MASK_BYTES / 1e9:.0f} are made; use an "
                "--attn_implementation that makes none (on CUDA), or a smaller --max_tokens_per_micro_batch"
            )
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.segment_ids_NT.device).tril()
        mask_NTT = causal_TT if self.segments is None else self._seen(self.segments.visible_NSS) & causal_TT
        if blocks_NT is not None:
            looked_at_N1T = blocks_NT.unsqueeze(1)
            mask_NTT = mask_NTT | ((blocks_NT.unsqueeze(2) == looked_at_N1T) & (looked_at_N1T > 0))
        return mask_NTT.unsqueeze(1)

    def _seen(self, visible_NSS: torch.Tensor) -> torch.Tensor:
        """Return bool [N, T, T], True where the segment of a token sees that of another."""
        looking_NT = self.segment_ids_NT % visible_NSS.shape[1]  # -1, padding, is the last segment
        rows_N11 = torch.arange(len(looking_NT), device=looking_NT.device).view(-1, 1, 1)
        return visible_NSS[rows_N11, looking_NT.unsqueeze(2), looking_NT.unsqueeze(1)]
