"""Speculative rollouts as an engine holds them: the head that is lent, whether guesses fit, whether they pay.

`speculation` draws, `pace` measures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.speculation.frequent import FrequentTokens, vocabulary_of
from threestep.plugins.speculation.pace import Pace, RoundPace
from threestep.plugins.speculation.speculation import GuessCounts, Guesses, drawn_by_guesses
from threestep.plugins.speculation.verified import why_not_verified
from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.decode_loops import DecodeLoop
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.speculation.settings import Speculation
    from training.utils.contracts.guests import BorrowHead, LentHead
    from training.utils.contracts.rollout import Rollout
    from training.utils.generation.decoding.decoding import DecodeWay
    from training.utils.generation.decoding.drawn import StopStrings
    from training.utils.models.own_forward import OwnForward

_TRIED_TOKENS = 4


class Guessing(DecodeLoop):
    """Rollouts by guesses. borrow_head: None where they need no head. tell: prints a sentence."""

    def __init__(self, how: Speculation, borrow_head: BorrowHead | None, tell: Callable[[str], None]) -> None:
        self._how, self._borrow_head, self._tell = how, borrow_head, tell
        self._head: LentHead | None = None
        self._is_off = False
        self._pace, self._counts, self._known = Pace(how.is_auto), GuessCounts(), GuessCounts()
        self._frequent, self._rounds = FrequentTokens(), dict[Hashable, RoundPace]()
        self.name = how.name

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the head has its current weights. Every rank must enter together."""
        if self._is_off or self._borrow_head is None:
            yield
            return
        with self._borrow_head() as self._head:
            try:
                yield
            finally:
                self._head = None

    def check(self, model: PreTrainedModel, own: OwnForward, way: DecodeWay) -> list[str]:
        """Return sentences on what guesses cost; inside `lent`. ThreestepError if nothing can be guessed for a model,
        which `auto` switches off instead."""
        reason = self._why_not(model, own, way)
        if reason is None:
            fixed = f"warning: {self._how.flag} generates without CUDA graphs, which makes each forward slower"
            return [fixed] if way.fixed else []
        name = type(model).__name__
        if not self._how.is_auto:
            raise ThreestepError(
                f"{self._how.flag} verifies several tokens at once, but {name} does not support this: {reason}; use "
                "another model, or leave --speculate out"
            )
        self._is_off = True
        return [
            (
                f"warning: {self._how.flag} is switched off, because {name} cannot verify several tokens at once: "
                f"{reason}"
            )
        ]

    def _why_not(self, model: PreTrainedModel, own: OwnForward, way: DecodeWay) -> str | None:
        if not way.masks_are_ours:
            return "the model family builds its own attention masks"
        reason = why_not_verified(model, own, self._how.guesses)
        if reason is not None:
            return reason
        ids_P = own.probes.alone[0].segments[0].tokens.input_ids.to(model.device)
        sampling = Sampling(_TRIED_TOKENS, temperature=0.0, top_k=0, top_p=1.0, end_token_id=-1, pad_token_id=0)
        try:
            self._guessed(model, RolloutRequest.of_prompt(ids_P, sampling, 0), None, RoundPace())
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # noqa: BLE001 - each family fails in its own way
            part = "its head fails" if self._borrow_head is not None else "a rollout with guesses fails"
            return f"{part} ({type(problem).__name__}: {first_line(problem)})"
        self._counts = GuessCounts()
        return None

    def drawn(
        self, model: PreTrainedModel, request: RolloutRequest, stop: StopStrings | None, plain: Callable[[], Rollout]
    ) -> Rollout:
        """Return the rollout that `plain` draws, by guesses where they pay."""
        if self._is_off or (self._head is None and self._borrow_head is not None):
            return plain()
        sampling = request.sampling
        kind = (len(request.seeds).bit_length(), sampling.temperature, sampling.max_new_tokens.bit_length())
        by_guesses, started = self._pace.guesses_now(kind), time.perf_counter()
        rounds = self._rounds.setdefault(kind, RoundPace(self._how.is_auto))
        rollout = self._guessed(model, request, stop, rounds) if by_guesses else plain()
        seconds, tokens = time.perf_counter() - started, int(rollout.response_lengths_B.sum())
        self._frequent.note(rollout, vocabulary_of(model))
        if self._pace.note(kind, by_guesses, seconds, tokens) and self._pace.speedup is not None:
            self._tell(self._verdict(self._pace.speedup))
        return rollout

    def _guessed(
        self, model: PreTrainedModel, request: RolloutRequest, stop: StopStrings | None, rounds: RoundPace
    ) -> Rollout:
        among_S = self._frequent.among(request.prompt_ids_BP[request.prompt_mask_BP])
        how = Guesses(self._how.guesses, self._head, among_S, rounds, self.prefill_tokens)
        rollout = drawn_by_guesses(model, how, request, stop, counts=self._counts)
        if self._counts.guesses:
            self._known = replace(self._counts)
        return rollout

    def _verdict(self, speedup: float) -> str:
        share = self._known.accepted / max(1, self._known.guesses)
        measured = f"{speedup:.2f} times the speed of rollouts without it, with {share:.0%} of its guesses correct"
        if speedup >= 1.0:
            return f"{self._how.flag} pays off: {measured}"
        if self._how.is_auto:
            return f"{self._how.flag} is switched off until it pays off: {measured}"
        return f"warning: {self._how.flag} does not pay off: {measured} (auto would switch it off)"

    def state_dict(self) -> dict[str, Any]:
        """The state that decides which rollouts guess, and among which tokens: others would round otherwise; and the
        counts of the next figures."""
        state = {"pace": self._pace.state_dict(), "frequent": self._frequent.state_dict()}
        return {**state, "counts": asdict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pace.load_state_dict(state["pace"])
        self._frequent.load_state_dict(state["frequent"])
        self._counts = GuessCounts(**state.get("counts", {}))  # checkpoints of before had none

    def figures(self) -> dict[str, float]:
        """Metrics since the last call."""
        figures, self._counts = self._counts.figures(), GuessCounts()
        if self._pace.speedup is not None:
            figures["rollout/speculation_speedup"] = self._pace.speedup
        return figures
