"""The features of a run that have guests (`contracts.guests`), asked together. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.contracts.guests import GuestFeature
from training.utils.plugins.registry import hooks, missing

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.base.errors import Mistakes
    from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
    from training.utils.contracts.guests import ExpertRecord, Guests
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine


class GuestFeatures(tuple[GuestFeature, ...]):
    """Features in the order of their places. Methods without a word on them: see `GuestFeature`."""

    __slots__ = ()

    @property
    def needs_segments(self) -> str | None:
        return next((each.needs_segments for each in self if each.needs_segments is not None), None)

    @property
    def trains_alone(self) -> bool:
        return any(each.trains_alone for each in self)

    @property
    def lends_guesser(self) -> bool:
        return any(each.lends_guesser for each in self)

    @property
    def records_experts(self) -> bool:
        return any(each.records_experts for each in self)

    def exact_weights(self) -> dict[str, str]:
        return {flag: why for each in self for flag, why in each.exact_weights().items()}

    def reuse_obstacles(self) -> list[tuple[str, str]]:
        return [found for each in self if (found := each.reuse_obstacle()) is not None]

    def check_words(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for each in self:
            each.check_words(tokenizer)

    def check_media(self, mistakes: Mistakes) -> None:
        for each in self:
            each.check_media(mistakes)

    def inside(
        self, path: str, model: PreTrainedModel, zero_stage: int, seed: int, *, ranks: Ranks
    ) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for each in self:
            found |= each.inside(path, model, zero_stage, seed, ranks=ranks)
        return found

    def open(
        self, models: Sequence[tuple[TrainingEngine, PreTrainedModel]], path: str, total_steps: int, seed: int
    ) -> list[Guests]:
        """Return the guests of each model, which its engine trains; say which losses of their own models lack. A
        collective. Otherwise as of `GuestFeature`."""
        from training.utils.contracts.guests import Guests

        for engine, model in models:
            for sentence in left_out(model):
                log(sentence, engine.ranks.is_main)
        opened = [each.open(models, path, total_steps, seed) for each in self]
        of_models = [[guests[number] for guests in opened if number < len(guests)] for number in range(len(models))]
        return [Guests(guest for guest in guests if guest is not None) for guests in of_models]

    def keep_forwards_small(self, model: PreTrainedModel, on_cpu: bool, sharing: int) -> bool:
        """True if packed forwards are kept to `SMALL_FORWARD_TOKENS`: on a CPU, but where a step of several forwards
        first reads each once more, and where ranks share rows. model: the first, perhaps on meta. sharing: ranks that
        share a row."""
        return on_cpu and sharing == 1 and not any(each.reads_twice(model) for each in self)

    def recorded_experts(
        self, model: PreTrainedModel, read: Callable[[TokenRows], torch.Tensor], ranks: Ranks
    ) -> ExpertRecord | None:
        records = (each.recorded_experts(model, read, ranks) for each in self if each.records_experts)
        return next(records, None)

    def planned(
        self, model: PreTrainedModel, settings: EngineSettings, ranks: int, device: PlannedDevice
    ) -> tuple[list[str], list[MemoryLine], list[Moment]]:
        planned = [each.planned(model, settings, ranks, device) for each in self]
        return (
            [sentence for sentences, _, _ in planned for sentence in sentences],
            [line for _, held, _ in planned for line in held],
            [moment for _, _, moments in planned for moment in moments],
        )


def guest_features(flags: Any) -> GuestFeatures:
    """Return the features of all plugins, as a step's flags have them. flags: `OneModelFlags` or `PpoFlags`."""
    return GuestFeatures(sorted((feature(flags) for feature in hooks("guests")), key=lambda each: each.place))


def left_out(model: PreTrainedModel) -> list[str]:
    """Return sentences on coefficients of losses in a model's configuration that nothing here computes, as the plugin
    that does is not there."""
    losses = missing("model_losses")
    return [
        f"warning: {type(model).__name__}: its configuration adds a loss with {name} {value:g}, which is left "
        f"out because the plugin '{losses[name]}' is not installed"
        for name, value in (_fields(model.config.to_dict()) if losses else ())
        if name in losses and value
    ]


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every field of a configuration, and of its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value)
        else:
            yield name, value
