"""The drafts that --vllm_speculate asks for, in the place of an engine's own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.speculation.settings import Speculation, check_asked
from threestep.plugins.vllm.draft_arguments import VllmDraftArguments
from training.utils.base.errors import Mistakes
from training.utils.contracts.decode_loops import AskedLoop
from training.utils.generation.table import engine_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from threestep.plugins.vllm.draft import VllmDraft
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.rollout_engine import RolloutEngine


def asked_drafts(flags: Any, mistakes: Mistakes) -> AskedDrafts | None:
    """Return what --vllm_speculate asks for; None where it drafts nothing, and where the engine cannot, which is noted
    elsewhere. flags: step 3's."""
    tokens, given = flags.added.of(VllmDraftArguments).vllm_speculate, flags.ppo.rollout_engine
    engine = Mistakes().note(engine_class, given)
    if not tokens or engine is None or not may_draft(engine):
        return None
    how, other = Speculation(tokens, name="--vllm_speculate"), flags.settings["speculate"]
    loop = AskedDrafts(how, flags)
    if other == "0":
        return loop
    mistakes.add(
        f"{how.flag} works only with --rollout_engine {given}, but --speculate {other} works only with hf; "
        "remove one of them"
    )
    loop.check(mistakes)
    return None


def may_draft(engine: type[RolloutEngine]) -> bool:
    """Return whether an engine drafts."""
    return getattr(engine, "supports_vllm_speculate", False)


class AskedDrafts(AskedLoop):
    """Drafts of vLLM, by a head that it is sent."""

    name = "--vllm_speculate"

    def __init__(self, how: Speculation, flags: Any) -> None:
        self.how, self.value, self._flags = how, how.guesses, flags

    def fits(self, engine: type[RolloutEngine]) -> bool:
        """See `AskedLoop.fits`."""
        return may_draft(engine)

    def check(self, mistakes: Mistakes) -> None:
        """See `AskedLoop.check`."""
        check_asked(self.how, self._flags, mistakes)

    def open(self, model: Any, guests: Guests, seed: int, tell: Callable[[str], None]) -> VllmDraft:
        """See `AskedLoop.open`."""
        from threestep.plugins.vllm.draft import VllmDraft

        borrow_head = guests.lent_guesser(model, seed)
        assert borrow_head is not None, "checked with the flags"
        return VllmDraft(self.how.guesses, borrow_head)
