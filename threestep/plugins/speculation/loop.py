"""The decode loop that --speculate asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.speculation.arguments import BY_HEAD, BY_NGRAMS, SpeculationArguments
from threestep.plugins.speculation.settings import Speculation, check_asked
from training.utils.contracts.decode_loops import AskedLoop
from training.utils.flags.flags import AutoChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from threestep.plugins.speculation.guessing import Guessing
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guests


def asked_speculation(flags: Any, mistakes: Mistakes) -> AskedSpeculation | None:
    """Return what --speculate asks for; None where it guesses nothing. flags: step 3's."""
    own = flags.added.of(SpeculationArguments)
    mistakes.require(
        own.speculate_by in (None, BY_HEAD) or own.speculate != "0",
        f"--speculate_by {own.speculate_by} chooses how --speculate guesses, but --speculate is 0; set --speculate 1, "
        "or remove --speculate_by",
    )
    by = own.speculate_by or (BY_HEAD if flags.guests.lends_guesser else BY_NGRAMS)
    how = mistakes.note(Speculation.of_flag, own.speculate, by)
    return None if how is None else AskedSpeculation(how, flags, is_chosen=own.speculate_by is None)


class AskedSpeculation(AskedLoop):
    """Guesses in engines of this process. is_chosen: what they go by was left to `auto`."""

    name = "--speculate"
    why_texts_alone = "can guess only the next tokens of text"

    def __init__(self, how: Speculation, flags: Any, *, is_chosen: bool) -> None:
        self.how, self.value = how, flags.added.of(SpeculationArguments).speculate
        self._flags, self._is_chosen = flags, is_chosen

    def check(self, mistakes: Mistakes) -> None:
        """See `AskedLoop.check`."""
        check_asked(self.how, self._flags, mistakes, f" or --speculate_by {BY_NGRAMS},")

    def choices(self) -> Sequence[AutoChoice]:
        """See `AskedLoop.choices`."""
        why = f"there is {'a' if self.how.by == BY_HEAD else 'no'} head"
        return [AutoChoice("speculate_by", self.how.by, why)] if self._is_chosen else []

    def open(self, model: Any, guests: Guests, seed: int, tell: Callable[[str], None]) -> Guessing:
        """See `AskedLoop.open`."""
        from threestep.plugins.speculation.guessing import Guessing

        borrow_head = None
        if self.how.by == BY_HEAD:
            borrow_head = guests.lent_guesser(model, seed)
            assert borrow_head is not None, "checked with the flags"
        return Guessing(self.how, borrow_head, tell)
