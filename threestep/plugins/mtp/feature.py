"""The head of a run's flags, as a feature that has a guest. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.mtp.arguments import MtpArguments, SftMtpArguments
from threestep.plugins.mtp.settings import MtpSettings, check_beside_adapters
from training.utils.contracts.guests import GuestFeature
from training.utils.setup.flags import OneModelFlags

if TYPE_CHECKING:
    from torch import nn

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guest


class HeadFeature(GuestFeature):
    """The head of `settings`, where it has modules. in_rollouts: the model draws what it learns from."""

    place = 200

    def __init__(self, settings: MtpSettings, in_rollouts: bool = False) -> None:
        self.settings, self._in_rollouts = settings, in_rollouts
        self._flag = f"--mtp_num_layers {settings.layers}"
        self.lends_guesser = settings.layers > 0
        self.needs_segments = self._flag if settings.layers else None

    def exact_weights(self) -> dict[str, str]:
        """See `GuestFeature.exact_weights`."""
        return {self._flag: "whose head starts as a copy of an unquantized layer"} if self.settings.layers else {}

    def reuse_obstacle(self) -> tuple[str, str] | None:
        """See `GuestFeature.reuse_obstacle`."""
        if not self.settings.layers:
            return None
        return f"learns from forwards that keep no hidden states, but {self._flag} reads them", "remove one of them"

    def check_media(self, mistakes: Mistakes) -> None:
        """See `GuestFeature.check_media`."""
        rows, reader, instead = "rows", "the head", "use 0"
        if self._in_rollouts:
            rows, reader, instead = "prompts", "it", "remove it"
        mistakes.require(
            not self.settings.layers,
            f"{self._flag} does not work with {rows} that have images: {reader} uses token embeddings, which images "
            f"do not have; {instead}",
        )

    def inside(self, path: str, model: Any, zero_stage: int, seed: int, *, ranks: Any) -> Mapping[str, nn.Module]:
        """See `GuestFeature.inside`."""
        if not self.settings.layers or self.settings.detach:
            return {}
        from threestep.plugins.mtp.opening import joint_head
        from threestep.plugins.mtp.reading import INSIDE

        return {INSIDE: joint_head(self.settings, path, model, zero_stage, seed=seed, ranks=ranks)}

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """See `GuestFeature.open`."""
        if not self.settings.layers:
            return ()
        from threestep.plugins.mtp.opening import open_head

        return [open_head(self.settings, path, *models[0], total_steps=total_steps, seed=seed)]

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """See `GuestFeature.planned`."""
        from threestep.plugins.mtp.planned import plan_head

        return plan_head(model, self.settings, settings, ranks, device=device)


def head_of(flags: Any) -> HeadFeature:
    """Return the head of a step's flags."""
    in_rollouts = not isinstance(flags, OneModelFlags)
    return HeadFeature(flags.added.of(MtpArguments if in_rollouts else SftMtpArguments).settings(), in_rollouts)


def check_head(flags: Any, mistakes: Mistakes) -> None:
    """Note a head that does not go with adapters, in a step that can train it with the model."""
    if isinstance(flags, OneModelFlags):
        check_beside_adapters(mistakes, head_of(flags).settings, flags.settings.get("lora_dim", 0))
