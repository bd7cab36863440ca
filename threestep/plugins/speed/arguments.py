"""The flags of what makes models faster or smaller. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag, flag_of

TORCH, ONEDNN = "torch", "onednn"  # libraries of products


@dataclass
class SpeedArguments:
    """Memory and speed of a step's models."""

    topic: ClassVar[str] = "memory"

    activation_offload: bool = flag(
        False, "With recomputation: keep the layers' inputs in the host's memory until the backward. On a GPU alone."
    )
    mlp_tiles: int = flag(
        1,
        "Compute MLPs in so many tiles along the row, each again in the backward: an MLP keeps its input alone. For "
        "rows of some 64,000 tokens a rank and more; for mixtures of experts, without their balancing loss "
        "(docs/reference/long_context.md).",
        "tiles >= 1",
    )
    use_liger_kernel: bool | None = flag(
        None,
        "Fused norms, gates and rotations of Liger Kernel, on CUDA. auto: where it is installed and gives the model's "
        "own numbers (threestep/plugins/speed/README.md).",
        takes_auto=True,
    )

    @property
    def fuses(self) -> bool | None:
        """--use_liger_kernel; None: where it can be had."""
        return self.use_liger_kernel


@dataclass
class ProductsArguments:
    """The library of products on a CPU."""

    topic: ClassVar[str] = "run"

    cpu_products: str | None = flag(
        None,
        f"CPU: the library of float32 matrix products, {TORCH} (PyTorch's choice) or {ONEDNN}; auto: {ONEDNN} on an "
        "AMD processor with AVX-512, where it takes half of the time. Their sums differ by rounding.",
        choices=(TORCH, ONEDNN),
        may_change=True,
        takes_auto=True,
    )


@dataclass
class CompilingArguments:
    """Compiled models, in steps 1 and 2."""

    topic: ClassVar[str] = "memory"

    torch_compile: bool = flag(
        False,
        "Compile the model's blocks with torch.compile (needs a C++ compiler on a CPU). The first steps then take"
        " half a minute to minutes longer: for long runs.",
    )


@dataclass
class PpoSpeedArguments(SpeedArguments):
    """The same for the four models of step 3."""

    activation_offload: bool = flag_of(
        SpeedArguments,
        "With recomputation of actor or critic: keep their layers' inputs in the host's memory until the backward. On "
        "a GPU alone.",
    )
    mlp_tiles: int = flag_of(
        SpeedArguments, "Compute the MLPs of all four models in so many tiles along the row, as step 1's --mlp_tiles."
    )
    use_liger_kernel: bool | None = flag_of(
        SpeedArguments,
        "Fused norms, gates and rotations of Liger Kernel in all four models, on CUDA. auto: none, as a step of step 3 "
        "has not been faster by them (threestep/plugins/speed/README.md).",
    )

    @property
    def fuses(self) -> bool | None:
        return bool(self.use_liger_kernel)
