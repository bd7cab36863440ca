"""The settings of every run: its folder, its seed, profiling, dry runs, and how it handles failures. Cheap to import:
`--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import nearest_names
from training.utils.clock.devices import DEVICES as TIMED_DEVICES
from training.utils.clock.devices import FILE_SUFFIX
from training.utils.flags.flags import flag
from training.utils.run.traces import Traces

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

DEFAULT_OUTPUT_DIR = "runs/last"
TORCH, ONEDNN = "torch", "onednn"  # libraries of products
DEVICES = ("cpu", "cuda", *TIMED_DEVICES)
RANK_TIMEOUT_SECONDS = 1800.0  # torch.distributed's own for gloo; DeepSpeed's 10 minutes are short for a slow disk


@dataclass
class RunArguments:
    """The run's folder and seed."""

    topic: ClassVar[str] = "run"

    output_dir: str = flag(
        DEFAULT_OUTPUT_DIR, "Folder of the run, its checkpoints and its trained model.", "folder", may_change=True
    )
    run_name: str | None = flag(
        None,
        "The run's name in its trackers and reports; without --output_dir its folder is runs/NAME.",
        "name",
        may_change=True,
    )
    seed: int = flag(
        1234, "Seed of the split, the order of rows, dropout and sampling; use the same in all steps.", "seed >= 0"
    )
    shuffle: bool = flag(
        True,
        "Train on the rows in an order drawn anew for each epoch; false: in the data's order, a dataset after the "
        "other.",
        topic="split",
    )
    deterministic: bool = flag(
        False, "CUDA: use slower operations that always give the same bits (docs/resume.md); a CPU needs no such flag."
    )
    cpu_products: str | None = flag(
        None,
        f"CPU: the library of float32 matrix products, {TORCH} (PyTorch's choice) or {ONEDNN}; auto: {ONEDNN} on an "
        "AMD processor with AVX-512, where it takes half of the time. Their sums differ by rounding.",
        choices=(TORCH, ONEDNN),
        may_change=True,
        takes_auto=True,
    )
    profile_steps: list[int] = flag(
        [],
        "Trace these steps (step 3: rollouts) with torch's profiler, to OUTPUT_DIR/profile.",
        "steps >= 1",
        may_change=True,
    )
    dry_run: bool = flag(
        False,
        "Check every setting, build the models without weights, print the plan and the memory of a rank, and end."
        " Nothing is loaded, trained or written.",
    )
    num_ranks: int | None = flag(
        None,
        "Ranks to train on; default: one for each visible GPU, or one. `threestep` and scripts/*.sh start them. "
        "With --dry_run, ranks to plan for; default: the launcher's, or one.",
        "ranks >= 1",
        aliases=["--ranks"],
    )
    device: str | None = flag(
        None,
        "With --dry_run: the device to plan for; default: this machine's. With a GPU's name, or cpu for this "
        f"machine's, also seconds and hours. One of {', '.join(DEVICES)}, or a FILE{FILE_SUFFIX} that "
        "`python -m benchmarks.clock --measure` wrote.",
        "name",
    )
    device_memory_gb: float | None = flag(
        None,
        "With --dry_run: memory of a GPU (1e9 bytes each); default: this machine's, if it has one.",
        "gigabytes > 0",
    )
    price_per_hour: float | None = flag(
        None, "With --dry_run and a GPU's name as --device: the price of one for an hour, in money.", "money > 0"
    )

    def __post_init__(self) -> None:
        if self.run_name and self.output_dir == DEFAULT_OUTPUT_DIR and _is_plain(self.run_name):
            self.output_dir = str(Path(DEFAULT_OUTPUT_DIR).parent / self.run_name)

    def traces(self) -> Traces:
        return Traces(frozenset(self.profile_steps), Path(self.output_dir) / "profile")

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        mistakes.require(
            self.run_name is None or self.output_dir != DEFAULT_OUTPUT_DIR or _is_plain(self.run_name),
            f"--run_name expects a name that a folder can have, got '{self.run_name}'; give another, or --output_dir",
        )
        mistakes.require(
            self.num_ranks is None or self.dry_run,
            f"--num_ranks {self.num_ranks} starts ranks behind `threestep` and scripts/*.sh, and here plans for "
            "--dry_run, which is not set; start it by one of these, or by a launcher, which sets the ranks",
        )
        for name in ("device", "device_memory_gb", "price_per_hour"):
            given = getattr(self, name)
            mistakes.require(
                given is None or self.dry_run,
                f"--{name} expects --dry_run, got {given} without it; a run takes the device that it finds "
                "(CUDA_VISIBLE_DEVICES= for the CPU)",
            )
        mistakes.require(
            self.device is None or self.device in DEVICES or self.device.endswith(FILE_SUFFIX),
            f"--device expects one of {', '.join(DEVICES)}, or a FILE{FILE_SUFFIX} of a device, got '{self.device}'"
            f"{nearest_names(str(self.device), DEVICES)}",
        )
        mistakes.require(
            self.price_per_hour is None or self.device not in (None, "cuda"),
            f"--price_per_hour {self.price_per_hour} expects --device with a name whose speed is known, one of "
            f"{', '.join(('cpu', *TIMED_DEVICES))}, got {self.device or 'none'}; give one",
        )
        mistakes.require(
            self.device_memory_gb is None or self.device != "cpu",
            f"--device_memory_gb {self.device_memory_gb} is a GPU's, and --device is cpu; leave one out",
        )


def _is_plain(name: str) -> bool:
    """True if a folder can have this name."""
    return name.strip() not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


@dataclass
class FaultArguments:
    """Steps with NaN or infinity, and ranks that hang."""

    topic: ClassVar[str] = "run"
    may_change: ClassVar[bool] = True

    max_bad_steps: int = flag(
        10,
        "Skipped optimizer steps that end the run. A step is skipped if its loss or gradient is not finite (its "
        "row ids: OUTPUT_DIR/bad_steps.jsonl). A healthy run in fp32 or bf16 has none; overflows by which fp16 "
        "finds its loss scale do not count.",
        "steps >= 1",
    )
    rank_timeout: float = flag(
        RANK_TIMEOUT_SECONDS,
        "Time that a rank waits for the others before the run ends with an error. This catches ranks that hang; a"
        " rank that dies is noticed at once.",
        "0 < seconds < 1e+08",
    )
