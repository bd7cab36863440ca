"""The teacher of a run's flags, as a feature that has a guest. Cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.arguments import SftTeacherArguments, TeacherArguments
from training.utils.contracts.guests import GuestFeature
from training.utils.setup.flags import OneModelFlags

if TYPE_CHECKING:
    from threestep.plugins.distillation.settings import TeacherSettings
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guest


class TeacherFeature(GuestFeature):
    """The teacher of `settings`, where there is one. in_rollouts: the model draws what it learns from.
    likelihood_coef: weight of the trainer's own loss beside the teacher's, in step 1."""

    place = 300

    def __init__(self, settings: TeacherSettings, in_rollouts: bool = False, likelihood_coef: float = 1.0) -> None:
        self.settings, self._in_rollouts, self._likelihood = settings, in_rollouts, likelihood_coef
        self.trains_alone = settings.is_there

    def check_words(self, tokenizer: Any) -> None:
        """See `GuestFeature.check_words`."""
        if self.settings.is_there:
            from threestep.plugins.distillation.opening import check_same_words

            check_same_words(self.settings, tokenizer)

    def check_media(self, mistakes: Mistakes) -> None:
        """See `GuestFeature.check_media`."""
        why = "names a teacher that reads only text, but rows of the data have media"
        if self._in_rollouts:
            why = "does not work with prompts that have images, because the teacher reads only text"
        mistakes.require(not self.settings.is_there, f"{self.settings.flag} {why}; remove it")

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """See `GuestFeature.open`."""
        if not self.settings.is_there:
            return ()
        from threestep.plugins.distillation.opening import open_teacher
        from training.utils.setup.setup import load_under

        student = models[0][0]
        guest = open_teacher(self.settings, student, lambda settings, load: load_under(settings, student.ranks, load))
        return [guest and replace(guest, own_loss_weight=self._likelihood)]

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """See `GuestFeature.planned`."""
        from threestep.plugins.distillation.planned import plan_teacher

        return plan_teacher(model, self.settings, settings, ranks, device=device)


def teacher_of(flags: Any) -> TeacherFeature:
    """Return the teacher of a step's flags."""
    if isinstance(flags, OneModelFlags):
        own, model = flags.added.of(SftTeacherArguments), flags.model
        return TeacherFeature(
            _placed(own.settings(), flags.engine.padded, flags.data.rows.max_seq_len, model.trust_remote_code),
            likelihood_coef=own.likelihood_coef,
        )
    settings = flags.added.of(TeacherArguments).settings()
    placed = _placed(settings, flags.ppo.padded, flags.longest_tokens, flags.roles.trust_remote_code)
    return TeacherFeature(placed, in_rollouts=True)


def _placed(settings: TeacherSettings, padded: bool, longest_tokens: int, trust_remote_code: bool) -> TeacherSettings:
    """The settings with what a step's other flags say."""
    return replace(settings, padded=padded, longest_tokens=longest_tokens, trust_remote_code=trust_remote_code)
