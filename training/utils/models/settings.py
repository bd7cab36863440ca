"""Settings of one model: its loading, which of its weights train, and what plugins change in it.

Plugins add changes as `ModelPreparer`s (`Hooks.preparers`). Each is a frozen dataclass of its own settings, so that
models of equal settings are equal. Preparers of a moment act in their order. Cheap to import.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.models.attention import AUTO
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.models.own_forward import OwnForward


class ForwardForm(NamedTuple):
    """The form of a model's forward. recomputes: layers are computed again in the backward. compiles: blocks will be
    compiled."""

    recomputes: bool = False
    compiles: bool = False


class ModelPreparer:
    """A change to models; this one changes nothing.

    compiles: blocks will be compiled, for rows of any lengths.
    of_frozen: it also changes models that do not train.
    of_counted: it also changes models on the meta device, whose memory a dry run counts.
    inputs_on_host: inputs of recomputed layers wait in the host's memory for the backward.
    in_pieces: `parts_in_pieces` are computed piece by piece along the row, and once more in the backward.
    places_parts: `before_device` puts a model on the device part by part, as it may not fit there as a whole.
    planned: what a dry run says behind the memory of activations.
    untimed: what a dry run's seconds leave out.
    """

    compiles: ClassVar[bool] = False
    of_frozen: ClassVar[bool] = False
    of_counted: ClassVar[bool] = False
    inputs_on_host: ClassVar[bool] = False
    in_pieces: ClassVar[bool] = False
    places_parts: ClassVar[bool] = False
    untimed: ClassVar[str] = ""

    @property
    def planned(self) -> str:
        return ""

    @property
    def weights_form(self) -> str:
        """The form in which weights are kept from then on, in words; "": as they are."""
        return ""

    @property
    def adapters(self) -> str:
        """The adapters that it adds, in words such as `LoRA of rank 4`; "": none."""
        return ""

    @property
    def keeps_weights(self) -> bool:
        """The model's own weights stay as they are: without its adapters it is the start model."""
        return False

    def check_device(self, on_cuda: bool) -> None:
        """ThreestepError where a model on such a device cannot be changed, in a dry run too."""

    def check_machine(self) -> None:
        """ThreestepError where this machine lacks what it takes; before a model is loaded."""

    def before_device(self, model: PreTrainedModel, device: torch.device | None) -> None:
        """Change a model that has its weights and tokens, before it is on its device as a whole. device: None: where it
        is."""

    def loaded(self, model: PreTrainedModel) -> None:
        """Change a model that has its weights, before its own forward is measured (`own_forward`)."""

    def measured(self, model: PreTrainedModel, own: OwnForward, form: ForwardForm) -> None:
        """Change a model whose forward has been measured, and whose attention is chosen."""

    def before_adapters(self, model: PreTrainedModel, form: ForwardForm) -> None:
        """Change a model that is to get its adapters next."""

    def add_adapters(self, model: PreTrainedModel) -> None:
        """Put on what trains beside the model's own weights (`models.weights`)."""

    def after_adapters(self, model: nn.Module, form: ForwardForm) -> None:
        """Change a model that has its adapters, last of all."""

    def piece_tokens(self, tokens: int) -> int:
        """Return the tokens of the largest piece of a row."""
        return tokens

    def parts_in_pieces(
        self, model: PreTrainedModel, read: Callable[[int], Any]
    ) -> Mapping[nn.Module, Sequence[nn.Module]]:
        """Return the parts of each layer that are computed in pieces. model: on meta. read: runs a forward of so many
        tokens."""
        return {}


def preparers_of(added: AddedFlags = NO_FLAGS, role: str = "") -> tuple[ModelPreparer, ...]:
    """Return what plugins change in models that are loaded with these flags of theirs. role: in step 3, the model's"""
    return tuple(preparer for of_plugin in hooks("preparers") for preparer in of_plugin(added, role))


class KeepsLess:
    """A forward that a preparer puts in the place of a part's own: the same numbers, and less kept for the backward."""


def keep_all(parts: Iterable[nn.Module]) -> dict[nn.Module, KeepsLess]:
    """Have those of `parts` that keep less keep all, in place; return what their forwards were."""
    return {part: vars(part).pop("forward") for part in parts if isinstance(vars(part).get("forward"), KeepsLess)}


@contextlib.contextmanager
def keeping_all(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, those of `parts` that keep less keep all, as recomputed ones do."""
    less = keep_all(parts)
    try:
        yield
    finally:
        for part, forward in less.items():
            part.forward = forward  # type: ignore[assignment]


@dataclass(frozen=True)
class ModelSettings:
    """name_or_path: folder or hub name.
    attn_implementation: see training.utils.models.attention.
    dropout: every dropout rate, and with 0 all that is like it (`models.dropout`); None keeps the model's own.
    gradient_checkpointing: recompute activations in backward.
    trust_remote_code: run Python code that comes with the model.
    head_chunk_mb: see training.utils.models.token_model; 0 where it is not known yet.
    trains_adapter_on: if `name_or_path` is an adapter like those that the run adds, train it on; all other adapters are
        merged into their base.
    freeze_vision_tower, freeze_projector: see training.utils.loading.models.
    new_head: a reward model gets a new head in the place of one that its folder has under another name than `score`.
    takes_media: what trains the model also trains models that read more than text.
    rope_scaling: see training.utils.models.rope_scaling; None leaves the model's positions as they are.
    preparers: what plugins change in the model; by default what they do without flags.
    """

    name_or_path: str
    attn_implementation: str = AUTO
    dropout: float | None = None
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    head_chunk_mb: int = 0
    trains_adapter_on: bool = False
    freeze_vision_tower: bool = True
    freeze_projector: bool = False
    new_head: bool = False
    takes_media: bool = False
    rope_scaling: str | None = None
    preparers: tuple[ModelPreparer, ...] = field(default_factory=preparers_of)

    @property
    def compiles(self) -> bool:
        """The model's blocks will be compiled."""
        return any(each.compiles for each in self.preparers)

    @property
    def forward_form(self) -> ForwardForm:
        return ForwardForm(self.gradient_checkpointing, self.compiles)

    @property
    def waits_for_device(self) -> bool:
        """The model stays in the host's memory until a preparer has put it on the device part by part."""
        return any(each.places_parts for each in self.preparers)

    @property
    def weights_form(self) -> str:
        """The form in which preparers keep weights, in words; "": as they are loaded."""
        return ", ".join(each.weights_form for each in self.preparers if each.weights_form)

    @property
    def has_adapters(self) -> bool:
        """The model gets adapters."""
        return any(each.adapters for each in self.preparers)

    @property
    def is_own_reference(self) -> bool:
        """Without its adapters the trained model is the start model."""
        return any(each.keeps_weights for each in self.preparers)

    def as_it_is(self) -> ModelSettings:
        """Return settings of the same model without training."""
        return ModelSettings(
            self.name_or_path,
            trust_remote_code=self.trust_remote_code,
            head_chunk_mb=self.head_chunk_mb,
            takes_media=self.takes_media,
            rope_scaling=self.rope_scaling,
            preparers=tuple(each for each in self.preparers if each.of_frozen),
        )
