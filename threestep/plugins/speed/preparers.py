"""The changes to loaded models that the flags ask for, and those that every model gets. Cheap to import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.speed.arguments import CompilingArguments, SpeedArguments
from training.utils.models.settings import ForwardForm, ModelPreparer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.flags.added import AddedFlags
    from training.utils.models.own_forward import OwnForward

# Of a dry run's seconds.
_UNTIMED = "recomputation by --mlp_tiles and copies by --activation_offload"


def preparers(added: AddedFlags, role: str) -> Iterator[ModelPreparer]:
    """Yield what these flags change in models (`Hooks.preparers`)."""
    flags = added.of(SpeedArguments)
    if flags.activation_offload:
        yield InputsOnHost()
    if flags.mlp_tiles > 1:
        yield MlpsInTiles(flags.mlp_tiles)
    yield FusedKernels(flags.fuses)
    if added.of(CompilingArguments).torch_compile:
        yield CompiledBlocks()
    yield LeanParts()


@dataclass(frozen=True)
class InputsOnHost(ModelPreparer):
    """The inputs of recomputed layers in the host's memory."""

    inputs_on_host: ClassVar[bool] = True
    untimed: ClassVar[str] = _UNTIMED

    def check_device(self, on_cuda: bool) -> None:
        from threestep.plugins.speed.activation_offload import check_offloads

        check_offloads(on_cuda)

    def before_adapters(self, model: PreTrainedModel, form: ForwardForm) -> None:
        if form.recomputes:
            from threestep.plugins.speed.activation_offload import offload_inputs

            offload_inputs(model)


@dataclass(frozen=True)
class MlpsInTiles(ModelPreparer):
    """MLPs in tiles along the row."""

    tiles: int
    of_frozen: ClassVar[bool] = True
    in_pieces: ClassVar[bool] = True
    untimed: ClassVar[str] = _UNTIMED

    @property
    def planned(self) -> str:
        return f"MLPs in {self.tiles} tiles"

    def loaded(self, model: PreTrainedModel) -> None:
        """Compared on short sequences, so that long ones are never whole in an MLP."""
        from threestep.plugins.speed.mlp_tiles import tile_mlps
        from training.utils.models.own_forward import read_own_forward

        read_own_forward(model)
        tile_mlps(model, self.tiles)

    def before_adapters(self, model: PreTrainedModel, form: ForwardForm) -> None:
        from threestep.plugins.speed.mlp_tiles import refuse_noise, tile_mlps

        tile_mlps(model, self.tiles)
        refuse_noise(model)

    def piece_tokens(self, tokens: int) -> int:
        from threestep.plugins.speed.mlp_tiles import tokens_of_tile

        return tokens_of_tile(tokens, self.tiles)

    def parts_in_pieces(
        self, model: PreTrainedModel, read: Callable[[int], Any]
    ) -> Mapping[nn.Module, Sequence[nn.Module]]:
        from threestep.plugins.speed.mlp_tiles import mlps_of

        return mlps_of(model, self.tiles, lambda: read(self.tiles))


@dataclass(frozen=True)
class FusedKernels(ModelPreparer):
    """Liger Kernel's operations. wanted: see `settle_kernels`. A compiler would fuse the same."""

    wanted: bool | None
    of_frozen: ClassVar[bool] = True

    def measured(self, model: PreTrainedModel, own: OwnForward, form: ForwardForm) -> None:
        if not form.compiles:
            from threestep.plugins.speed.fused.choice import settle_kernels

            settle_kernels(model, own, self.wanted)


@dataclass(frozen=True)
class CompiledBlocks(ModelPreparer):
    """Blocks that torch.compile compiles."""

    compiles: ClassVar[bool] = True

    def check_machine(self) -> None:
        from threestep.plugins.speed.compiled import check_compiler

        check_compiler()

    def after_adapters(self, model: nn.Module, form: ForwardForm) -> None:
        from threestep.plugins.speed.compiled import compile_blocks

        compile_blocks(model)


@dataclass(frozen=True)
class LeanParts(ModelPreparer):
    """Gated MLPs and RMSNorms that keep less, where nothing else decides what is kept."""

    of_frozen: ClassVar[bool] = True
    of_counted: ClassVar[bool] = True

    def after_adapters(self, model: nn.Module, form: ForwardForm) -> None:
        if form.compiles or form.recomputes:
            return
        from threestep.plugins.speed.fused.operations import keep_less_fused
        from threestep.plugins.speed.lean.forwards import keep_less

        keep_less(model)
        keep_less_fused(model)
