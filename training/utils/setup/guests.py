"""The table of guests (`contracts.guests`): features that a run's flags let train beside its models. Cheap to import.

Their order is part of a run's results: the routers' balancing loss, the head for multi-token prediction, the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from training.utils.base.errors import ThreestepError
from training.utils.distillation.settings import TeacherSettings, check_teacher
from training.utils.mtp.settings import MtpSettings, check_beside_adapters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.rollout_engine import ExpertRecord
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.dry_run.plan import PlannedDevice
    from training.utils.dry_run.table import MemoryLine, Moment
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine

Media = TypeVar("Media")


@dataclass(frozen=True)
class GuestSettings:
    """router_aux_loss_coef: weight of the balancing loss; None takes each model's own. mtp: the head of the first
    model. teacher: of the first model. replay: of the first model's routers in rollouts, a value of --replay_routers.
    """

    router_aux_loss_coef: float | None = None
    mtp: MtpSettings = MtpSettings()
    teacher: TeacherSettings = TeacherSettings()
    replay: str = "none"

    @property
    def needs_segments(self) -> str | None:
        """The flag for which the first model must take a mask of segments; None without one."""
        return self.mtp.needs_segments

    @property
    def records_experts(self) -> bool:
        """The first model's rollouts have `experts`."""
        return self.replay != "none"

    def check(self, mistakes: Mistakes, lora_dim: int) -> None:
        """Note what does not go with adapters."""
        check_beside_adapters(mistakes, self.mtp, lora_dim)
        check_teacher(mistakes, self.teacher)

    @property
    def reading_whole_rows(self) -> dict[str, bool]:
        """Flags of guests that read whole rows on one rank, and whether they ask for one."""
        return {self.teacher.flag: True} if self.teacher.is_there else {}

    def check_words(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """ThreestepError if another model would read other words than this tokenizer writes; before models load."""
        if self.teacher.is_there:
            from training.utils.distillation.opening import check_same_words

            check_same_words(self.teacher, tokenizer)

    def checked_media(self, media: Media) -> Media:
        """Return the media of rows, None where no row has some; ThreestepError for what reads texts alone."""
        if media is not None and self.teacher.is_there:
            raise ThreestepError(
                f"{self.teacher.flag} is of a teacher that reads texts alone, and rows of the data have media; "
                "leave it out"
            )
        return media

    def beside_quantization(self) -> dict[str, str | None]:
        """Flags that do not go with quantized weights, and why where they are set."""
        return self.mtp.beside_quantization()

    def inside(
        self, path: str, model: PreTrainedModel, zero_stage: int, seed: int, *, ranks: Ranks
    ) -> dict[str, nn.Module]:
        """Return the modules that train with `model` by one loss, for its PolicyModel. A collective, before the model
        is under DeepSpeed. path: of the model."""
        from training.utils.mtp.opening import joint_head
        from training.utils.mtp.reading import INSIDE

        head = joint_head(self.mtp, path, model, zero_stage, seed=seed, ranks=ranks)
        return {} if head is None else {INSIDE: head}

    def open(
        self, models: Sequence[tuple[TrainingEngine, PreTrainedModel]], path: str, total_steps: int, seed: int
    ) -> list[Guests]:
        """Return the guests of each model, which its engine trains. A collective.

        path: of the first model. total_steps: of its optimizer.

        Raises ThreestepError for a guest that a model cannot have.
        """
        from training.utils.contracts.guests import Guests
        from training.utils.distillation.opening import open_teacher
        from training.utils.models.own_forward import in_pieces_by
        from training.utils.mtp.opening import open_head
        from training.utils.routers.step_loss import router_losses
        from training.utils.setup.setup import load_under

        losses = router_losses(models, self.router_aux_loss_coef)
        for (_, model), loss in zip(models, losses, strict=True):
            if loss is not None and (flag := in_pieces_by(model)) is not None:
                raise ThreestepError(
                    f"{flag} computes a mixture's routers tile by tile, and their balancing loss reads a forward's "
                    f"logits as one; give --router_aux_loss_coef 0, or leave {flag} out"
                )
        head = open_head(self.mtp, path, *models[0], total_steps=total_steps, seed=seed)
        student = models[0][0]
        teacher = open_teacher(self.teacher, student, lambda settings, load: load_under(settings, student.ranks, load))
        found = [[loss, *([head, teacher] if number == 0 else [])] for number, loss in enumerate(losses)]
        return [Guests(guest for guest in guests if guest is not None) for guests in found]

    def keep_forwards_small(self, model: PreTrainedModel, on_cpu: bool, sharing: int) -> bool:
        """True if packed forwards are kept to `SMALL_FORWARD_TOKENS`: on a CPU, but where a step of several forwards
        first reads each once more, for the load of the whole step that a balancing loss needs, and where ranks share
        rows. model: the first, perhaps on meta. sharing: ranks that share a row."""
        from training.utils.routers.routers import has_routers

        reads_twice = self.router_aux_loss_coef != 0 and has_routers(model)
        return on_cpu and sharing == 1 and not reads_twice

    def recorded_experts(
        self, model: PreTrainedModel, read: Callable[[TokenRows], torch.Tensor], ranks: Ranks
    ) -> ExpertRecord | None:
        """Return the record of the experts of the first model, which follows them where that is asked for; None without
        one. read: the numbers of rows, in eval mode. A collective."""
        if not self.records_experts:
            return None
        from training.utils.routers.opening import checked_replay

        return checked_replay(model, self.replay, read, ranks.device)

    def planned(
        self, model: PreTrainedModel, settings: EngineSettings, ranks: int, device: PlannedDevice
    ) -> tuple[list[str], list[MemoryLine], list[Moment]]:
        """Return sentences on what trains beside `model` (on the meta device), what that holds of one rank besides its
        activations, and its moments."""
        from training.utils.distillation.planned import plan_teacher
        from training.utils.mtp.planned import plan_head

        head = plan_head(model, self.mtp, settings, ranks, device=device)
        teacher = plan_teacher(model, self.teacher, settings, ranks, device=device)
        return head[0] + teacher[0], head[1] + teacher[1], head[2] + teacher[2]
