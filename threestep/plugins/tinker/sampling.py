"""Sequences drawn from adapters of many clients and from the base, in the decode loop of the endpoint room.

Rows of one adapter shape are one batch, whosever they are; each has its own seed, settings and stops.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch

from threestep.plugins.serve.endpoint.lines import STOP, Event, Line, TogetherRows
from threestep.plugins.serve.endpoint.lines import Order as DrawOrder
from threestep.plugins.serve.endpoint.text import AnswerText
from threestep.plugins.tinker.records import SampledPrompt, SampledSequence, SampleOrder, SamplePrompt
from threestep.plugins.tinker.request_queue import SERVER, USER
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import is_out_of_memory
from training.utils.contracts.rollout_engine import Sampling

if TYPE_CHECKING:
    from threestep.plugins.tinker.adapters import AdaptedModel, WeightLayout
    from threestep.plugins.tinker.forward import Forwards

_MOST_JOINING_TOKENS = 8192  # of prompts that are computed together, as in the endpoint room
_STEPS = 16  # tokens of each row between two looks at the desk


@dataclass(frozen=True, eq=False)
class SamplerWeights:
    """Adapters to draw from; the same ones are the same object. Both None: the base alone."""

    weights_P: torch.Tensor | None = None
    layout: WeightLayout | None = None

    @property
    def shape(self) -> object:
        """Rows of equal shapes are drawn in one batch."""
        if self.layout is None:
            return None
        return self.layout if self.layout.shares_rows else id(self)


@dataclass(eq=False)
class SampleJob:
    """A request for sequences. seed: sequences draw from it and their own numbers. result: once it is done; error:
    instead of it, and whose fault it is."""

    order: SampleOrder
    weights: SamplerWeights
    seed: str
    result: SampledPrompt | None = None
    error: tuple[str, str] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    is_cancelled: bool = False
    lines: list[Line] = field(default_factory=list)
    texts: list[AnswerText] = field(default_factory=list)
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)

    def fail(self, sentence: str, category: str) -> None:
        """End without sequences."""
        for line in self.lines:
            line.is_over = True
        self.error = self.error or (sentence, category)
        self.end()

    def end(self) -> None:
        """Tell whoever waits. The answer is kept, and the prompt with its media is not."""
        self.order = replace(self.order, prompt=SamplePrompt(()))
        for line in self.lines:
            line.order = replace(line.order, media=None)
        self.done.set()


class DrawnMedia(NamedTuple):
    """never: tokens that stand for media, and are not drawn: in training one would be without content. why_not: nothing
    is drawn behind prompts with media; None where it is."""

    never: tuple[int, ...]
    why_not: str | None


class _AdaptedRows:
    """Rows of one adapter shape."""

    def __init__(self, adapted: AdaptedModel, layout: WeightLayout | None) -> None:
        self.rows = TogetherRows(adapted.model)
        self._adapted, self._layout = adapted, layout
        self._stacked: tuple[tuple[int, ...], torch.Tensor] | None = None

    def join(self, lines: Sequence[Line], weights: SamplerWeights) -> None:
        """Draw these too, whose adapters are the same."""
        with self._of([weights]):
            self.rows.join(lines)

    def step(self, weights_of: Callable[[Line], SamplerWeights]) -> None:
        """Draw the next token of each row."""
        with self._of([weights_of(line) for line in self.rows.lines]):
            self.rows.step()

    def _of(self, weights: Sequence[SamplerWeights]) -> contextlib.AbstractContextManager[None]:
        if self._layout is None:
            return contextlib.nullcontext()
        distinct = {id(each.weights_P): each.weights_P for each in weights if each.weights_P is not None}
        key = tuple(distinct)
        if self._stacked is None or self._stacked[0] != key:
            self._stacked = key, torch.stack(list(distinct.values()))
        places = [key.index(id(each.weights_P)) for each in weights]
        return self._adapted.adapters(self._layout, self._stacked[1], places)


class Sampler:
    """Draws what was asked for, a little at each turn. Its methods but `submit` are of the thread that computes."""

    def __init__(
        self,
        adapted: AdaptedModel,
        forwards: Forwards,
        decode: Callable[[Sequence[int]], str],
        ends: frozenset[int],
        *,
        most_rows: int,
        no_batches: str | None,
        with_media: DrawnMedia | None = None,
    ) -> None:
        """ends: tokens that end a sequence by default. no_batches: why the family cannot be drawn in one batch.
        with_media: None for a model of text."""
        self._media = with_media or DrawnMedia((), None)
        self._adapted, self._forwards, self._decode, self._ends = adapted, forwards, decode, ends
        self._most_rows, self._no_batches = most_rows, no_batches
        self._lock = threading.Lock()
        self._waiting: deque[tuple[SampleJob, Line]] = deque()
        self._new: deque[SampleJob] = deque()
        self._jobs: dict[Line, SampleJob] = {}
        self._batches: dict[object, _AdaptedRows] = {}

    def submit(self, job: SampleJob) -> None:
        """Take a request, from any thread."""
        with self._lock:
            self._new.append(job)

    @property
    def waiting(self) -> int:
        """Sequences that are drawn or wait."""
        with self._lock:
            return len(self._waiting) + sum(job.order.samples for job in self._new) + len(self._jobs)

    @torch.no_grad()
    def turn(self, seconds: float) -> bool:
        """Draw for so long at most, at least a token; True if there was something to draw."""
        end, did_some = time.monotonic() + seconds, False
        while self._begin() or self._jobs:
            did_some = True
            self._join()
            for batch in list(self._batches.values()):
                self._draw(batch)
            self._collect()
            if time.monotonic() > end:
                break
        return did_some

    def _begin(self) -> bool:
        """Read the prompts of new requests, and put their sequences in line."""
        with self._lock:
            new = list(self._new)
            self._new.clear()
        for job in new:
            try:
                self._read_prompt(job)
            except Exception as problem:  # noqa: BLE001 - the server outlives whatever a forward raises
                _fail(job, problem)
                continue
            self._put_in_line(job)
        with self._lock:
            return bool(self._waiting)

    def _put_in_line(self, job: SampleJob) -> None:
        if self._no_batches is not None:
            return job.fail(f"this server cannot generate from this model: {self._no_batches}", USER)
        order, media = job.order, self._forwards.of_prompt(job.order.prompt)
        if media is not None and self._media.why_not is not None:
            return job.fail(f"this server cannot generate from prompts with media: {self._media.why_not}", USER)
        ends = self._ends if order.stop.ids is None else frozenset(order.stop.ids)
        most = order.most_tokens
        assert most is not None, "the service has checked"
        never = tuple((token,) for token in self._media.never)
        sampling = Sampling(most, order.temperature, order.top_k, order.top_p, -1, 0, bad_words=never)
        for place in range(order.samples):
            seed = _seed_of(job.seed, place)
            drawing = DrawOrder(order.prompt.ids, sampling, ends, seed, order.top_sample, media)
            line = Line(drawing, place, job.events)
            job.lines.append(line)
            job.texts.append(AnswerText(self._decode, ends, order.stop.texts, strips=False))
            with self._lock:
                self._waiting.append((job, line))

    def _read_prompt(self, job: SampleJob) -> None:
        read, prompt = job.order.read, job.order.prompt
        if not read.has_logprobs and not read.top:
            job.result = SampledPrompt((), None, None)
            return
        logprobs_TV = self._forwards.read(job.weights.weights_P, job.weights.layout, prompt)[:-1]
        first = 0 if read.last is None else max(0, len(prompt.ids) - 1 - read.last)
        next_T1 = torch.tensor(prompt.ids[1:], dtype=torch.int64, device=logprobs_TV.device).unsqueeze(1)
        own = logprobs_TV.gather(-1, next_T1).squeeze(1).tolist()
        logprobs = [math.nan] * (first + 1) + own[first:]
        top: list[list[tuple[int, float]]] | None = None
        if read.top:
            values_TK, ids_TK = logprobs_TV[first:].topk(min(read.top, logprobs_TV.shape[-1]), dim=-1)
            pairs = zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
            top = [[]] * (first + 1) + [list(zip(tokens, values, strict=True)) for tokens, values in pairs]
        for place in (place for span in prompt.media.spans for place in range(span.begin, span.end)):
            logprobs[place] = math.nan  # nobody writes a medium
            if top is not None:
                top[place] = []
        job.result = SampledPrompt((), logprobs if read.has_logprobs else None, top)

    def _join(self) -> None:
        """Let those in that wait, first come first, as there is room; those of one adapter together."""
        while True:
            free = self._most_rows - len(self._jobs)
            with self._lock:
                if not self._waiting or free < 1:
                    return
                weights, joining, longest = self._waiting[0][0].weights, list[tuple[SampleJob, Line]](), 0
                while self._waiting and len(joining) < free and self._waiting[0][0].weights is weights:
                    longest = max(longest, len(self._waiting[0][1].order.ids))
                    if joining and longest * (len(joining) + 1) > _MOST_JOINING_TOKENS:
                        break
                    joining.append(self._waiting.popleft())
            lines = [line for _, line in joining if not line.is_over]
            self._jobs |= {line: job for job, line in joining if not line.is_over}
            if not lines:
                continue
            batch = self._batches.get(weights.shape)
            if batch is None:
                batch = self._batches[weights.shape] = _AdaptedRows(self._adapted, weights.layout)
            self._guarded(batch, lines, partial(batch.join, lines, weights))

    def _draw(self, batch: _AdaptedRows) -> None:
        for _ in range(_STEPS):
            batch.rows.leave()
            if not batch.rows.lines:
                return
            if not self._guarded(batch, batch.rows.lines, lambda: batch.step(lambda line: self._jobs[line].weights)):
                return

    def _guarded(self, batch: _AdaptedRows, lines: Sequence[Line], work: Callable[[], None]) -> bool:
        """Do some work; if it fails, so do the requests of all rows of the batch."""
        try:
            work()
        except Exception as problem:  # noqa: BLE001 - the server outlives whatever a forward raises
            for line in {*lines, *batch.rows.lines}:
                if line in self._jobs:
                    _fail(self._jobs[line], problem)
            self._batches = {shape: each for shape, each in self._batches.items() if each is not batch}
            return False
        return True

    def _collect(self) -> None:
        """Hand news to their requests; finish those whose sequences are all complete."""
        for job in set(self._jobs.values()):
            while True:
                try:
                    event = job.events.get_nowait()
                except Empty:
                    break
                self._take(job, event)
            if job.is_cancelled:
                job.fail("cancelled", USER)
            elif job.error is None and all(text.finish is not None for text in job.texts):
                _finish(job)
        self._jobs = {line: job for line, job in self._jobs.items() if not job.done.is_set()}
        self._batches = {shape: batch for shape, batch in self._batches.items() if batch.rows.lines}
        with self._lock:
            self._waiting = deque(each for each in self._waiting if not each[0].done.is_set())

    @staticmethod
    def _take(job: SampleJob, event: Event) -> None:
        if event.failed is not None:
            _fail(job, event.failed)
        else:
            job.texts[event.place].follow(event, job.lines[event.place])


def _seed_of(seed: str, place: int) -> int:
    """Return the seed of one sequence, in which no two seeds and places agree."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{place}".encode()).digest()[:7], "big")


def _finish(job: SampleJob) -> None:
    assert job.result is not None
    sequences = tuple(
        SampledSequence(
            [each.token for each in text.tokens],
            [each.logprob or 0.0 for each in text.tokens],
            text.finish == STOP,
            [each.alternatives for each in text.tokens],
        )
        for text in job.texts
    )
    job.result = job.result._replace(sequences=sequences)
    job.end()


def _fail(job: SampleJob, problem: Exception) -> None:
    if is_out_of_memory(problem):
        job.fail("out of memory; send fewer or shorter prompts, or start the server with a lower --max_rows", SERVER)
    elif isinstance(problem, ThreestepError):
        job.fail(str(problem), SERVER)
    else:
        traceback.print_exception(problem)
        job.fail("the server failed; see its log", SERVER)
