"""In which way a model is decoded: the first whose log-probabilities are the model's own.

The probes' sequences (`make_probes`) are decoded token by token, as a rollout would draw them: prompts of different
lengths and of the same length, two responses each, rows that end at different tokens. Where rows have media, so are
the examples of these (`contracts.media`), beside a prompt of text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.documents import media_between
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.decoding.cache import roomy_cache, windows_of
from training.utils.generation.decoding.decoding import (
    FIXED,
    MASKED,
    OURS,
    WAYS,
    DecodeWay,
    Decoding,
    captured_steps,
    of_one_length,
)
from training.utils.models.own_forward import OwnForward, current_difference, rms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import MediaForward, RunMedia

SAMPLES = 2
_PART = 3  # tokens of a prompt that one forward reads: fewer than the probes' prompts have
_MOST_GIVEN = 8  # of the response of an example with media
_MOST_TOKENS = 8192  # of a row: attention of four such prompts, padded, takes 4 x 8192^2 numbers of a mask


def fitting_way(model: PreTrainedModel, own: OwnForward) -> tuple[DecodeWay, list[str]]:
    """Return the first way that gives the numbers of `own`, and sentences on why not the faster ones of WAYS, nor, on a
    GPU with a plugin for it, FIXED. ThreestepError if none does.

    model: with whole weights, in eval mode; the model that `own` was read from, or a copy of it.
    """
    name = type(model).__name__
    first, notes = list[str](), list[str]()
    for way in (FIXED, MASKED) if model.device.type == "cuda" and captured_steps() else (MASKED,):
        reason = why_not_decoded(model, own, way)
        if reason is None:
            return way, first
        if way == FIXED:
            first = [f"warning: {name} rolls out without captured graphs, which is slower: {reason}"]
    for way in WAYS:
        reason = why_not_decoded(model, own, way)
        if reason is None:
            notes += [f"warning: {name} rolls out {way.words}, which is slower"] if notes else []
            return way, [*first, *notes]
        notes.append(f"{name} cannot roll out {way.words}: {reason}")
    plain = current_difference(model, own)
    if not plain <= own.tolerance:
        raise ThreestepError(
            f"{name} cannot generate responses: log-probabilities of the weights used in rollouts differ from those of "
            f"the loaded weights by {plain:.2g} (rounding explains at most {own.tolerance:.2g}); try another --dtype "
            "or --zero_stage 2"
        )
    raise ThreestepError(f"{notes[-1]}; faster ways fail too; use another model family, --dtype or --rollout_engine")


def why_not_decoded(model: PreTrainedModel, own: OwnForward, way: DecodeWay) -> str | None:
    """Return None if log-probabilities decoded in `way` are those of `own`, else the reason why not."""
    reason = why_not_read(own, lambda cases: _decoded(model, cases, way))
    if reason is not None or own.with_media is None:
        return reason
    media = own.with_media.media
    if not way.padded:
        return f"it gets no positions, which prompts with {media.name} need"
    reason = why_not_read(own, lambda cases: _decoded(model, cases, way, media), of_media=True)
    return None if reason is None else f"for prompts with {media.name}, {reason}"


def why_not_in_parts(model: PreTrainedModel, own: OwnForward, way: DecodeWay) -> str | None:
    """Return None if log-probabilities behind prompts that several forwards read (`Decoding`) are those of `own`, else
    the reason why not."""
    cache = roomy_cache(model, 0) if way.cache == OURS else None
    if not way.padded or cache is None:
        return f"it rolls out {way.words}"
    try:
        windows_of(model.config, cache)
    except ValueError as problem:
        return str(problem)
    return _why_other(*_short(own), own.tolerance, lambda cases: _decoded(model, cases, way, prefill_tokens=_PART))


def why_not_read(
    own: OwnForward, read: Callable[[Sequence[ProbeCase]], list[list[torch.Tensor]]], of_media: bool = False
) -> str | None:
    """Return None if log-probabilities are those of `own`, else the reason why not. read: for each case, the numbers of
    its response's tokens; it may fail as the family does. of_media: behind prompts with media"""
    if not of_media:
        return _why_other(*_known(own), own.tolerance, read)
    assert own.with_media is not None, "it was loaded for media"
    return _why_other(*_media_cases(own, own.with_media), own.with_media.tolerance, read)


def _why_other(
    cases: list[ProbeCase],
    known_M: torch.Tensor,
    tolerance: float,
    read_of: Callable[[list[ProbeCase]], list[list[torch.Tensor]]],
) -> str | None:
    """known_M: of the cases that are known, in their order."""
    try:
        with torch.no_grad():
            read = read_of(cases)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # noqa: BLE001 - each family fails in its own way
        return f"its forward fails ({type(problem).__name__}: {first_line(problem)})"
    read_M = torch.cat([torch.stack(numbers) for case, numbers in zip(cases, read, strict=True) if case.is_known])
    difference = rms(read_M.double().cpu() - known_M)
    # Rollouts read logits in float32 at most.
    tolerance = tolerance + torch.finfo(torch.float32).eps * float(known_M.abs().max())
    if difference <= tolerance:
        return None
    if difference != difference:
        return "its log-probabilities are not numbers"
    return f"its log-probabilities differ by {difference:.2g} (rounding explains {tolerance:.2g})"


@dataclass(frozen=True)
class ProbeCase:
    """A prompt with one response, which is given. is_known: `own` has its numbers. media: of the prompt."""

    prompt_ids_P: torch.Tensor
    response_ids: list[int]
    is_known: bool
    media: tuple[Any, ...] = ()


def _cases(own: OwnForward) -> list[ProbeCase]:
    """Two for each prompt: one much longer than the others, one as long as the first, then the known ones, in the order
    of `own`."""
    alone = own.probes.alone
    short = [_case(document) for document in (alone if own.probes.long is None else alone[:-1])]
    # Its own cases are unknown and end after one token: they only stand beside the others.
    beside = [*_unknown(own.probes.other.segments[0].tokens.input_ids, short)]
    if own.probes.long is None:
        return [*_unknown(alone[1].segments[0].tokens.input_ids, short), *beside, *short]
    long = _case(own.probes.long)
    twice = ProbeCase(long.prompt_ids_P, long.response_ids, False)
    return [*beside, *short, long, twice]


def _known(own: OwnForward) -> tuple[list[ProbeCase], torch.Tensor]:
    """Return the cases, and the numbers of those that are known; without a sequence so long that the mask of a batch
    padded to it would not fit."""
    long = own.probes.long
    if long is None or long.tokens <= _MOST_TOKENS:
        return _cases(own), own.numbers_M
    return _short(own)


def _short(own: OwnForward) -> tuple[list[ProbeCase], torch.Tensor]:
    """As `_known`, without the long sequence."""
    cases = _cases(replace(own, probes=replace(own.probes, long=None)))
    return cases, own.numbers_M[: sum(len(case.response_ids) for case in cases if case.is_known)]


def _case(document: Document) -> ProbeCase:
    tokens = document.segments[0].tokens
    return ProbeCase(tokens.input_ids[~tokens.is_target], tokens.input_ids[tokens.is_target].tolist(), True)


def _unknown(prompt_ids_P: torch.Tensor, short: Sequence[ProbeCase]) -> list[ProbeCase]:
    return [ProbeCase(prompt_ids_P, case.response_ids[:1], False) for case in short[:SAMPLES]]


def _media_cases(own: OwnForward, measured: MediaForward) -> tuple[list[ProbeCase], torch.Tensor]:
    """Return two cases for each example, the first response of its row and what ends before it, between two of a text;
    and the numbers of the known ones."""
    cases, numbers = list[ProbeCase](), list[torch.Tensor]()
    at = 0
    for document in measured.media.examples:
        tokens = document.segments[0].tokens
        target_M = tokens.is_target.nonzero().flatten().tolist()
        begin = target_M[0]
        count = next((place for place, target in enumerate(target_M) if target != begin + place), len(target_M))
        count = min(count, _MOST_GIVEN)
        ids, media = tokens.input_ids.tolist(), media_between(tokens.media, 0, begin)
        case = ProbeCase(tokens.input_ids[:begin], ids[begin : begin + count], True, media)
        cases += [replace(case, response_ids=ids[begin : begin + 1], is_known=False), case]
        numbers.append(measured.numbers_M[at : at + count])
        at += len(target_M)
    text = _unknown(own.probes.other.segments[0].tokens.input_ids, cases)
    return [*cases[:SAMPLES], *text, *cases[SAMPLES:]], torch.cat(numbers)


def _decoded(
    model: PreTrainedModel,
    cases: Sequence[ProbeCase],
    way: DecodeWay,
    media: RunMedia | None = None,
    *,
    prefill_tokens: int | None = None,
) -> list[list[torch.Tensor]]:
    """Return, for each case, the log-probabilities (float64) of its response's tokens, given one by one."""
    request = request_of(cases, model.device)
    if media is not None:
        request = replace(request, media=media.of_prompts([case.media for case in cases[::SAMPLES]]))
    parts = [(list(range(len(cases))), request)] if way.padded else list(of_one_length(request))
    read: list[list[torch.Tensor]] = [[] for _ in cases]
    for rows, part in parts:
        decoding = Decoding(model, part, way, prefill_tokens=prefill_tokens)
        logits_AV, place = decoding.prefill(SAMPLES), 0
        while True:
            active = [rows[row] for row in decoding.rows_A.tolist()]
            responses = [cases[row].response_ids for row in active]
            # A row that is over may stay for a while, with any token.
            token_A = torch.tensor([ids[min(place, len(ids) - 1)] for ids in responses], device=logits_AV.device)
            logprobs_AV = torch.log_softmax(logits_AV.double(), dim=-1)
            logprobs_A = logprobs_AV.gather(-1, token_A.unsqueeze(1)).squeeze(1)
            for row, logprob in zip(active, logprobs_A, strict=True):
                if place < len(cases[row].response_ids):
                    read[row].append(logprob)
            place += 1
            over = [len(ids) <= place for ids in responses]
            if all(over):
                break
            logits_AV = decoding.step(decoding.drop(token_A, over))
    return read


def request_of(cases: Sequence[ProbeCase], device: torch.device) -> RolloutRequest:
    """Return the prompts of cases, of which SAMPLES each have the same."""
    prompts = [case.prompt_ids_P for case in cases[::SAMPLES]]
    width = max(len(prompt) for prompt in prompts)
    ids_BP = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    mask_BP = torch.arange(width) >= width - lengths_B1
    most = max(len(case.response_ids) for case in cases)
    sampling = Sampling(most, temperature=1.0, top_k=0, top_p=1.0, end_token_id=-1, pad_token_id=0)
    return RolloutRequest(ids_BP.to(device), mask_BP.to(device), sampling, list(range(len(cases))), SAMPLES)
