"""The teacher of a run's flags, as a feature that has a guest. Cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.arguments import SftTeacherArguments, TeacherArguments
from training.utils.contracts.guest_features import GuestFeature
from training.utils.setup.flags import OneModelFlags

if TYPE_CHECKING:
    from threestep.plugins.distillation.settings import TeacherSettings
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guest


class TeacherFeature(GuestFeature):
    """The teacher of `settings`, where there is one. in_rollouts: the model draws what it learns from."""

    place = 300

    def __init__(self, settings: TeacherSettings, in_rollouts: bool = False) -> None:
        self.settings, self._in_rollouts = settings, in_rollouts
        self.trains_alone = settings.is_there

    def check_words(self, tokenizer: Any) -> None:
        """See `GuestFeature.check_words`."""
        if self.settings.is_there:
            from threestep.plugins.distillation.opening import check_same_words

            check_same_words(self.settings, tokenizer)

    def check_media(self, mistakes: Mistakes) -> None:
        """See `GuestFeature.check_media`."""
        why = "is of a teacher that reads texts alone, and rows of the data have media"
        if self._in_rollouts:
            why = "does not go with prompts that have images: it is read on texts alone"
        mistakes.require(not self.settings.is_there, f"{self.settings.flag} {why}; leave it out")

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """See `GuestFeature.open`."""
        from threestep.plugins.distillation.opening import open_teacher
        from training.utils.setup.setup import load_under

        student = models[0][0]
        return [open_teacher(self.settings, student, lambda settings, load: load_under(settings, student.ranks, load))]

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """See `GuestFeature.planned`."""
        from threestep.plugins.distillation.planned import plan_teacher

        return plan_teacher(model, self.settings, settings, ranks, device=device)


def teacher_of(flags: Any) -> TeacherFeature:
    """Return the teacher of a step's flags."""
    if isinstance(flags, OneModelFlags):
        given, padded, longest = flags.added.of(SftTeacherArguments), flags.engine.padded, flags.data.rows.max_seq_len
        trusted = flags.model.trust_remote_code
    else:
        given, padded, longest = flags.added.of(TeacherArguments), flags.ppo.padded, flags.longest_tokens
        trusted = flags.roles.trust_remote_code
    rows: Any = {"padded": padded, "longest_tokens": longest, "trust_remote_code": trusted}
    return TeacherFeature(replace(given.settings(), **rows), not isinstance(flags, OneModelFlags))
