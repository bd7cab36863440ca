"""Settings of one model: its loading, and which of its weights train. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from training.utils.models.attention.kernels import AUTO
from training.utils.models.preparers import ForwardForm, ModelPreparer, preparers_of


@dataclass(frozen=True)
class ModelSettings:
    """name_or_path: folder or hub name.
    attn_implementation: see training.utils.models.attention.attention.
    dropout: every dropout rate, and with 0 all that is like it (`models.dropout`); None keeps the model's own.
    gradient_checkpointing: recompute activations in backward.
    trust_remote_code: run Python code that comes with the model.
    head_chunk_mb: see training.utils.models.target_head; 0 where it is not known yet.
    trains_adapter_on: if `name_or_path` is an adapter like those that the run adds, train it on; all other adapters are
        merged into their base.
    freeze_vision_tower, freeze_projector: see training.utils.loading.freezing.
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
    def inputs_on_host(self) -> bool:
        """Inputs of the layers that are computed again wait in the host's memory."""
        return self.gradient_checkpointing and any(each.inputs_on_host for each in self.preparers)

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

    def as_counted(self) -> ModelSettings:
        """Return settings of the same model without values, whose memory and work a dry run counts."""
        counted = tuple(each for each in self.preparers if each.of_counted)
        return replace(self, gradient_checkpointing=False, preparers=counted)

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
