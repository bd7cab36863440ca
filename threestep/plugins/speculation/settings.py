"""The settings of guesses: how many tokens ahead, and by what; the flags that these do not go with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.speculation.arguments import BY_HEAD
from training.step3_ppo.flags.rollout_choices import source_of
from training.utils.base.errors import ThreestepError
from training.utils.flags.flags import AUTO

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

# Each further guess is right less often.
_MOST_GUESSES = 8


@dataclass(frozen=True)
class Speculation:
    """Tokens are guessed, and several verified at once.

    guesses: tokens guessed ahead, 1 or more. is_auto: only where that is faster. by: one of GUESSERS.
    name: the flag that asks for it.
    """

    guesses: int
    is_auto: bool = False
    by: str = BY_HEAD
    name: str = "--speculate"

    @classmethod
    def of_flag(cls, given: str, by: str = BY_HEAD) -> Speculation | None:
        """Return what --speculate asks for; None for 0. ThreestepError for anything else than a number or auto."""
        if given == AUTO:
            return cls(1, is_auto=True, by=by)
        if not (given.isdecimal() and int(given) <= _MOST_GUESSES):
            raise ThreestepError(
                f"--speculate expects the number of tokens to guess, 0 to {_MOST_GUESSES}, or {AUTO}, got '{given}'"
            )
        return cls(int(given), by=by) if int(given) else None

    @property
    def flag(self) -> str:
        return f"{self.name} {AUTO if self.is_auto else self.guesses}"


def check_asked(how: Speculation, flags: Any, mistakes: Mistakes, otherwise: str = "") -> None:
    """Note what guesses do not go with. flags: step 3's. otherwise: by what else they could go than a head."""
    mistakes.require(
        flags.guests.lends_guesser or how.by != BY_HEAD,
        f"{how.flag} guesses with a multi-token-prediction head, but there is none; add --mtp_num_layers 1{otherwise} "
        f"or remove {how.name}",
    )
    form, source = flags.data.form, source_of(flags)
    for flag, given, why in (
        (form and form.flag, form, form and form.draws),
        (f"--{source.name}", not source.draws, "draws nothing"),
    ):
        mistakes.require(
            not given, f"{how.flag} generates several tokens at once, but {flag} {why}; leave one of them out"
        )
