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
        False, "With gradient checkpointing: keep the layers' inputs in host memory until the backward pass. GPUs only."
    )
    mlp_tiles: int = flag(
        1,
        "Compute MLPs in this many tiles along the row and recompute each tile in the backward pass, so that only an "
        "MLP's input is stored. Intended for rows of about 64,000 tokens per rank or more; mixtures of experts must "
        "train without their balancing loss (docs/reference/long_context.md).",
        "tiles >= 1",
    )
    use_liger_kernel: bool | None = flag(
        None,
        "Use Liger Kernel's fused norms, gates and rotations on CUDA. auto uses them where it is installed and "
        "reproduces the model's own numbers (threestep/plugins/speed/README.md).",
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
        f"CPU: library for float32 matrix products, {TORCH} (PyTorch's choice) or {ONEDNN}; auto uses {ONEDNN} on "
        "AMD processors with AVX-512, where it takes half the time. Their results differ by rounding.",
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
        "Compile the model's blocks with torch.compile (needs a C++ compiler on a CPU). The first steps then take "
        "between half a minute and several minutes longer, so use it for long runs.",
    )


@dataclass
class PpoSpeedArguments(SpeedArguments):
    """The same for the four models of step 3."""

    activation_offload: bool = flag_of(
        SpeedArguments,
        "With gradient checkpointing of the actor or critic: keep their layers' inputs in host memory until the "
        "backward pass. GPUs only.",
    )
    mlp_tiles: int = flag_of(
        SpeedArguments,
        "Compute the MLPs of all four models in this many tiles along the row, like --mlp_tiles in step 1.",
    )
    use_liger_kernel: bool | None = flag_of(
        SpeedArguments,
        "Use Liger Kernel's fused norms, gates and rotations in all four models on CUDA. auto turns them off, "
        "because they have not made step 3 faster (threestep/plugins/speed/README.md).",
    )

    @property
    def fuses(self) -> bool | None:
        return bool(self.use_liger_kernel)
