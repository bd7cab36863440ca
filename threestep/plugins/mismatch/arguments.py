"""The flags of the correction between rollout and training. Cheap to import for `--help`. Which to use: README.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.mismatch.recipes import CORRECTIONS, LEVELS, RECIPES, REJECTED, REJECTIONS
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from training.utils.base.user_files import either
from training.utils.flags.added import advice
from training.utils.flags.flags import flag
from training.utils.generation.table import ENGINES

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_PREFIX = "mismatch_"
_OTHER_LOGPROBS = [name for name, entry in ENGINES.items() if entry.other_logprobs]
_BY_ENGINE = (f"--rollout_engine {either(_OTHER_LOGPROBS)}",) if _OTHER_LOGPROBS else ()
_CORRECTED = (*_BY_ENGINE, *advice("old_weights"))  # what truncates by default; nothing where no plugin has such
_DEFAULT = f"none; with {either(_CORRECTED)} truncate" if _CORRECTED else "none"


@dataclass
class MismatchArguments:
    """Correction of the rollout's mismatch; r is p_train / p_rollout of a token."""

    topic: ClassVar[str] = "mismatch"

    mismatch_recipe: str | None = flag(
        None,
        "Recipe from the plugin's page that sets this topic's flags; flags set explicitly take precedence.",
        "name",
        choices=tuple(RECIPES),
    )
    mismatch_correction: str | None = flag(
        None,
        "How r weights tokens: not at all (none), truncated at the threshold (truncate), or zeroed outside it (mask); "
        f"default: {_DEFAULT}.",
        choices=CORRECTIONS,
    )
    mismatch_level: str | None = flag(
        None,
        "How r is computed: per token, as the product over the sequence, or as the geometric mean over the sequence; "
        "default: token.",
        choices=LEVELS,
    )
    mismatch_threshold: float | None = flag(None, "Largest weight; default: 2.", "ratio > 1")
    mismatch_threshold_lower: float | None = flag(
        None, "Smallest weight; default: 1 / threshold for mask, no lower bound for truncate.", "0 < ratio <= 1"
    )
    mismatch_normalize: bool | None = flag(
        None, "Divide weights by their mean over the rollout on all ranks; default: false."
    )
    mismatch_veto: float | None = flag(
        None, "Reject a response if any token's r is below this, such as 1e-4; default: none.", "0 < ratio < 1"
    )
    mismatch_rejection: list[str] = flag(
        [],
        "Reject tokens or responses outside KIND:UPPER or KIND:LOWER:UPPER, e.g. seq_mean_k1:0.999:1.001; KIND is one "
        f"of {', '.join(REJECTIONS)}. For k1, the bounds apply to the ratio.",
        "kind:bounds",
    )
    mismatch_rejected: str | None = flag(
        None,
        "Whether the denominators of the actor's loss still count rejected tokens ('stay') or not ('leave'); "
        "default: stay.",
        choices=REJECTED,
    )
    mismatch_bypass: bool | None = flag(
        None,
        "Use the rollout's log-probabilities as the old ones, which saves a forward pass; a correction then needs "
        "--policy_loss gpg. Default: false.",
    )

    def chosen(self, is_exact: bool) -> MismatchSettings:
        """Return the settings: flags that are given, then the recipe's, then the defaults. is_exact: the newest weights
        of the trained model draw; other rollouts are corrected by default."""
        recipe = RECIPES[self.mismatch_recipe].flags if self.mismatch_recipe else {}
        values = {"correction": "none" if is_exact else "truncate", **recipe, **self._given()}
        values["rejection"] = tuple(rejection_of(str(each)) for each in values.get("rejection") or ())  # type: ignore[attr-defined]
        return MismatchSettings(**values)  # type: ignore[arg-type]

    def _given(self) -> dict[str, object]:
        names = [field.name for field in dataclasses.fields(MismatchSettings)]
        given = {name: getattr(self, f"{_PREFIX}{name}") for name in names}
        return {name: value for name, value in given.items() if value is not None and value != []}

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        if any(mistakes.note(rejection_of, each) is None for each in self.mismatch_rejection):
            return
        if self.mismatch_recipe is not None and self.mismatch_recipe not in RECIPES:
            return  # noted with the other names
        found = self.chosen(is_exact=True)
        mistakes.require(
            found.threshold_lower is None or found.threshold_lower < found.threshold,
            f"--mismatch_threshold_lower must be below --mismatch_threshold {found.threshold:g}, got "
            f"{found.threshold_lower}; lower it",
        )
        mistakes.require(
            self.mismatch_rejected is None or found.rejects,
            f"--mismatch_rejected {self.mismatch_rejected} needs --mismatch_rejection or --mismatch_veto, but neither "
            "is set; add one, or remove --mismatch_rejected",
        )
        for flags, contradicts in (
            ("--mismatch_normalize", found.normalize),
            ("--mismatch_rejected leave", found.rejected == "leave"),
        ):
            mistakes.require(
                not (found.bypass and contradicts),
                f"{flags} needs statistics of the whole optimizer step, but --mismatch_bypass weights and rejects "
                "tokens within each micro-batch; remove one of them",
            )
