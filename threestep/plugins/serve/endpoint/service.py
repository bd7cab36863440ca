"""From the body of a request to its answer, whole or in pieces. Knows nothing of HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from threestep.plugins.serve.endpoint.fields import CompletionRequest, read_request
from threestep.plugins.serve.endpoint.lines import Event, Line
from threestep.plugins.serve.endpoint.replies import Piece, ReplyForms
from threestep.plugins.serve.endpoint.text import AnswerText
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed

if TYPE_CHECKING:
    from threestep.plugins.serve.endpoint.batch import Batch
    from threestep.plugins.serve.endpoint.model import ServedModel
    from training.utils.generation.arguments import SamplingArguments

_LOOK_SECONDS = 0.25  # between two looks at whether the client is there


@dataclass(frozen=True)
class Service:
    """Answers requests. sampling: for what a request leaves open. created: Unix's time of the loading."""

    model: ServedModel
    batch: Batch
    sampling: SamplingArguments
    created: int

    def models(self) -> dict[str, Any]:
        """The list of models: this one."""
        return {"object": "list", "data": [self.model_card(self.model.name)]}

    def model_card(self, name: str) -> dict[str, Any]:
        """The description of a model. RefusedRequest for another one."""
        if name != self.model.name:
            raise RefusedRequest(
                f"there is no model '{name:.200}'; this server has '{self.model.name}'", 404, "model", "model_not_found"
            )
        return {"id": name, "object": "model", "created": self.created, "owned_by": "threestep"}

    def begun(self, body: Any, is_chat: bool) -> Answering:
        """Begin to answer a request. RefusedRequest for what cannot be answered."""
        request = read_request(body, is_chat, self.model.name)
        try:
            prompts = self.model.prompts(request)
        except RefusedRequest:
            raise
        except ThreestepError as mistake:
            raise RefusedRequest(str(mistake), param="messages" if is_chat else "prompt") from mistake
        seeds = seeds_of(request, len(prompts) * request.samples)
        orders = self.model.orders(request, prompts, self.sampling, seeds)
        lines, events = self.batch.submit(orders)
        reply = ReplyForms(self.model.name, is_chat, request.alternatives is not None, self.model.word)
        texts = [AnswerText(self.model.decode, self.model.ends, request.stop, self.model.strips and is_chat)
                 for _ in lines]  # fmt: skip
        return Answering(request, reply, lines, texts, events, sum(map(len, prompts)))


def seeds_of(request: CompletionRequest, count: int) -> list[int]:
    """One seed for each answer; the first is the request's own, so that a request for more begins with the same."""
    seed = secrets.randbits(62) if request.seed is None else request.seed
    return [derived_seed(seed, "served", place) for place in range(count)]


@dataclass(frozen=True)
class Answering:
    """A request that is being answered. prompt_tokens: of all its prompts."""

    request: CompletionRequest
    reply: ReplyForms
    lines: list[Line]
    texts: list[AnswerText]
    events: SimpleQueue[Event]
    prompt_tokens: int

    @property
    def drawn_tokens(self) -> int:
        """So far, of all answers; those behind a stop text do not count."""
        return sum(len(text.tokens) for text in self.texts)

    def cancel(self) -> None:
        """Draw no further."""
        for line in self.lines:
            line.is_over = True

    def whole(self, is_gone: Callable[[], bool]) -> dict[str, Any] | None:
        """The answer; None if the client hung up. RefusedRequest if it fails."""
        for changed in self._changes(is_gone):
            if changed is None:
                return None
        pieces = [Piece(place, text.news(), text.tokens, text.finish) for place, text in enumerate(self.texts)]
        if self.reply.with_logprobs:
            pieces = [self._without_end(piece) for piece in pieces]
        return self.reply.whole(pieces, self.prompt_tokens, self.drawn_tokens)

    def chunks(self, is_gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """The answer in pieces, as it is drawn; fewer if the client hung up."""
        told, begins, is_told = [0] * len(self.texts), [0] * len(self.texts), [False] * len(self.texts)
        if self.reply.is_chat:
            for place in range(len(self.texts)):
                yield self.reply.chunk(Piece(place, ""), is_first=True)
        for changed in self._changes(is_gone):
            if changed is None:
                return
            for place in sorted(changed):
                text = self.texts[place]
                new = text.news()
                if not (new or text.finish) or is_told[place]:
                    continue
                piece = self._without_end(Piece(place, new, text.tokens[told[place] :], text.finish, begins[place]))
                told[place], is_told[place] = len(text.tokens), text.finish is not None
                begins[place] += sum(len(self.reply.word(each.token)) for each in piece.tokens)
                yield self.reply.chunk(piece)
        if self.request.include_usage:
            yield self.reply.last(self.prompt_tokens, self.drawn_tokens)

    def _changes(self, is_gone: Callable[[], bool]) -> Iterator[set[int] | None]:
        """Take news until all answers are complete; yield which have some. None: the client hung up."""
        going = set(range(len(self.texts)))
        while going:
            if is_gone():
                self.cancel()
                yield None
                return
            changed = set[int]()
            for event in self._news():
                if event.failed is not None:
                    self.cancel()
                    raise self._refusal(event.failed)
                self.texts[event.place].follow(event, self.lines[event.place])
                changed.add(event.place)
                if self.texts[event.place].finish is not None:
                    going.discard(event.place)
            if changed:
                yield changed

    def _news(self) -> list[Event]:
        """All that is there, or the first that comes soon."""
        found = list[Event]()
        try:
            found.append(self.events.get(timeout=_LOOK_SECONDS))
            while True:
                found.append(self.events.get_nowait())
        except Empty:
            return found

    def _without_end(self, piece: Piece) -> Piece:
        """The piece without its end token, which has no text, among its tokens."""
        ends = self.lines[piece.place].order.ends
        tokens = [each for each in piece.tokens if each.token not in ends]
        return Piece(piece.place, piece.text, tokens, piece.finish, piece.begin)

    @staticmethod
    def _refusal(problem: Exception) -> RefusedRequest:
        return problem if isinstance(problem, RefusedRequest) else RefusedRequest(str(problem), 500)
