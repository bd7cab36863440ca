"""Rows of tokens as a model sees them: the record that every step feeds its models with. `layout.rows` makes it.
Their runs are for attention without a mask of the whole row, their media for models of more than text.

A run is one or more neighbouring segments with causal attention among themselves, and sees some earlier tokens whole. A
plain document is one run. A prompt with K responses is K runs: the prompt with the first response, and each further
response, which sees the prompt.

N rows, T tokens in a row, B sequences, M tokens to be predicted, U different ones of these, S segments of a row
(padding is one more, the last).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved

if TYPE_CHECKING:
    from training.utils.contracts.documents import MediaSpan

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
                f"{count * width**2 / 1e9:.0f} GB, but the limit is {MOST_MASK_BYTES / 1e9:.0f} GB; use an "
                "--attn_implementation without masks (on CUDA), or a smaller --max_tokens_per_micro_batch"
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


class ReadMedia(Protocol):
    """The input of a model for the media of some rows. name: of the media, in the plural."""

    name: ClassVar[str]

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward."""

    def recorded(self, places: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the media at these places among them, by a record's names."""


class MediaRun(NamedTuple):
    """The media of a segment that begins at `column` of row `row`, at position `first_position`."""

    row: int
    column: int
    tokens: int
    first_position: int
    media: tuple[MediaSpan, ...]


@dataclass(frozen=True)
class RowMedia:
    """The media of rows.

    axes_3NT: int64, positions along time, height and width, which replace `position_ids_NT`; None unless a medium
        counts by its sides.
    blocks_NT: int64, a number above 0 for each medium whose tokens all see each other, 0 elsewhere; None without such
        media.
    spans: in the order of their tokens, row by row. A medium of a shared prompt is there once.
    counts: how many of these each document has.
    places: flat position n*T+t of the first token of each.
    read: what a model reads of them; given to the rows by `RunMedia.loaded`.
    """

    axes_3NT: torch.Tensor | None
    blocks_NT: torch.Tensor | None
    spans: tuple[MediaSpan, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...] = ()
    read: ReadMedia | None = None

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward for the media."""
        assert self.read is not None, "media that are not read would count as a text"
        return self.read.inputs(model, device)

    @property
    def positions(self) -> dict[str, torch.Tensor]:
        """The argument of forward that replaces the positions of a text."""
        return {} if self.axes_3NT is None else {"position_ids": self.axes_3NT}

    def refuse_attention(self, implementation: str, expected: Sequence[str]) -> None:
        """Raise ThreestepError for an attention of all rows as one, which the positions would not fit into."""
        *first, last = expected
        raise ThreestepError(
            f"rows with {self._name} need --attn_implementation {', '.join(first)} or {last}, got {implementation}"
        )

    def refuse_noise(self) -> None:
        """Raise ThreestepError: without ids, transformers finds the places of media by comparing embeddings."""
        raise ThreestepError(f"noise on the embeddings would hide the positions of {self._name}; disable the noise")

    @property
    def _name(self) -> str:
        return "media" if self.read is None else self.read.name


def position_axes(length: int, media: Sequence[MediaSpan]) -> torch.Tensor:
    """Return int64 [3, T]: the positions of a sequence of `length` tokens along time, height and width, from 0.

    Worked example: two tokens of text, a medium of 2 x 3 tokens, two tokens of text:
        time    0 1  2 2 2 2 2 2  5 6
        height  0 1  2 2 2 3 3 3  5 6
        width   0 1  2 3 4 2 3 4  5 6
    A text is alike on all axes. A medium has one time, and the text goes on after its longer side.
    """
    axes_3T = torch.arange(length).repeat(3, 1)
    for medium in media:
        if medium.sides is None:
            continue
        height, width = medium.sides
        first = int(axes_3T[0, medium.begin])
        axes_3T[:, medium.end :] -= medium.tokens - medium.positions
        axes_3T[0, medium.begin : medium.end] = first
        axes_3T[1, medium.begin : medium.end] = first + torch.arange(height).repeat_interleave(width)
        axes_3T[2, medium.begin : medium.end] = first + torch.arange(width).repeat(height)
    return axes_3T


def media_of_rows(documents: Iterable[list[MediaRun]], position_ids_NT: torch.Tensor) -> RowMedia | None:
    """Return the media of the segments of each document; None without any."""
    by_document = list(documents)
    runs = [run for own in by_document for run in own]
    spans = tuple(span for run in runs for span in run.media)
    if not spans:
        return None
    return RowMedia(
        axes_3NT=_axes(runs, position_ids_NT) if any(span.sides for span in spans) else None,
        blocks_NT=_blocks(runs, position_ids_NT) if any(span.sees_itself for span in spans) else None,
        spans=spans,
        counts=tuple(sum(len(run.media) for run in own) for own in by_document),
        places=tuple(
            run.row * position_ids_NT.shape[1] + run.column + span.begin for run in runs for span in run.media
        ),
    )


def _axes(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.axes_3NT`; padding is where `position_ids_NT` has it."""
    axes_3NT = position_ids_NT.repeat(3, 1, 1)
    for run in runs:
        axes_3T = run.first_position + position_axes(run.tokens, run.media)
        axes_3NT[:, run.row, run.column : run.column + run.tokens] = axes_3T
    return axes_3NT


def _blocks(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.blocks_NT`."""
    blocks_NT, number = torch.zeros_like(position_ids_NT), 0
    for run in runs:
        for span in run.media:
            if span.sees_itself:
                number += 1
                blocks_NT[run.row, run.column + span.begin : run.column + span.end] = number
    return blocks_NT


PAD_SEGMENT = -1  # the segment of padding


@dataclass(frozen=True)
class RunSpan:
    """Tokens [start, end) of run number `run`, counted from its first."""

    run: int
    start: int
    end: int


@dataclass(frozen=True)
class AttentionRun:
    """tokens: its length. sees: earlier spans that all of it sees, in order. Padding sees nothing and is not seen."""

    tokens: int
    sees: tuple[RunSpan, ...]
    is_padding: bool


@dataclass(frozen=True)
class RunLengths:
    """Runs as attention of variable lengths takes them: queries are the flattened [N * T] tokens, and the keys of each
    run are the tokens that it sees and then its own, so that its queries stand at the end of its keys.

    begins: int32 [runs + 1], where the queries of each run begin, and the end.
    key_begins: int32 [runs + 1], the same of its keys.
    key_tokens: int64, which token each key is; None where no run sees another: then keys are the tokens as they stand.
    longest, longest_keys: of a run, in tokens.
    """

    begins: torch.Tensor
    key_begins: torch.Tensor
    key_tokens: torch.Tensor | None
    longest: int
    longest_keys: int

    def to(self, device: torch.device | str) -> RunLengths:
        tokens = None if self.key_tokens is None else self.key_tokens.to(device)
        return RunLengths(self.begins.to(device), self.key_begins.to(device), tokens, self.longest, self.longest_keys)


def runs_of(segment_ids_NT: torch.Tensor, visible_NSS: torch.Tensor) -> tuple[AttentionRun, ...]:
    """Return the runs of `TokenRows` with these fields: they cover the flattened [N * T] tokens in order."""
    runs: list[AttentionRun] = []
    seen: list[list[list[int]]] = [[[] for _ in row] for row in visible_NSS]
    for row, segment, other in visible_NSS.tril(-1).nonzero().tolist():
        seen[row][segment].append(other)
    for ids_T, seen_S in zip(segment_ids_NT, seen, strict=True):
        runs += _runs_of_row(ids_T, seen_S, len(runs))
    return tuple(runs)


def lengths_of(runs: Sequence[AttentionRun]) -> RunLengths:
    """Return the lengths of runs that cover all rows. Padding is a run that sees itself."""
    queries, seen = [run.tokens for run in runs], [sum(span.end - span.start for span in run.sees) for run in runs]
    starts = [0, *accumulate(queries)]
    keys = [own + others for own, others in zip(queries, seen, strict=True)]
    key_tokens = None
    if any(seen):
        parts = []
        for start, run in zip(starts, runs, strict=False):
            parts += [torch.arange(starts[span.run] + span.start, starts[span.run] + span.end) for span in run.sees]
            parts.append(torch.arange(start, start + run.tokens))
        key_tokens = torch.cat(parts)
    return RunLengths(
        begins=torch.tensor(starts, dtype=torch.int32),
        key_begins=torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
        key_tokens=key_tokens,
        longest=max(queries),
        longest_keys=max(keys),
    )


def _runs_of_row(ids_T: torch.Tensor, seen_S: list[list[int]], first: int) -> list[AttentionRun]:
    """seen_S: of each segment the earlier ones that it sees. first: the number of the row's first run among all."""
    numbers, lengths = torch.unique_consecutive(ids_T, return_counts=True)
    runs: list[AttentionRun] = []
    place: dict[int, RunSpan] = {}  # of each segment of the row so far
    seen_by_run: set[int] = set()  # the segments that the run being built sees or holds
    for segment, tokens in zip(numbers.tolist(), lengths.tolist(), strict=True):
        is_padding = segment == PAD_SEGMENT
        seen = [] if is_padding else seen_S[segment]
        if seen and set(seen) == seen_by_run:
            start = runs[-1].tokens
            runs[-1] = AttentionRun(start + tokens, runs[-1].sees, False)
        else:
            start = 0
            runs.append(AttentionRun(tokens, _joined([place[other] for other in seen]), is_padding))
            seen_by_run = set(seen)
        if not is_padding:
            place[segment] = RunSpan(first + len(runs) - 1, start, start + tokens)
            seen_by_run.add(segment)
    return runs


def _joined(spans: list[RunSpan]) -> tuple[RunSpan, ...]:
    """Join neighbouring spans of one run."""
    joined: list[RunSpan] = []
    for span in spans:
        if joined and (joined[-1].run, joined[-1].end) == (span.run, span.start):
            span = RunSpan(span.run, joined.pop().start, span.end)
        joined.append(span)
    return tuple(joined)
