"""Changes to models as they are loaded, which plugins add (`Hooks.preparers`): how they compute, and what they keep.

A preparer is a frozen dataclass of its own settings, so that models of equal settings are equal. Preparers of a moment
act in their order.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from training.utils.flags.added import NO_FLAGS, AddedFlags
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
        """Put on what trains beside the model's own weights (`models.tensors.adapters`)."""

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
