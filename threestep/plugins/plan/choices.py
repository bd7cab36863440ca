"""The settings that a plan chooses among, and the flags of each choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from threestep.plugins.plan.drawing_flags import DRAWINGS, EngineLoad, WayOfDrawing, drawing_flags
from training.utils.base.machine import PlannedDevice

Settings = dict[str, Any]
_BATCHES = (1, 4, 16)  # in which a rank draws its responses


@dataclass(frozen=True)
class Wanted:
    """The run to plan.

    sequences: of an optimizer step on all ranks; step 3 draws as many before it. tokens: of the prompt and the
    response. host_bytes: of a rank. drawn: of step 3, with the sequences of all ranks; None for other steps.
    """

    device: str
    ranks: int
    sequences: int
    tokens: tuple[int, int]
    gpu_bytes: int
    host_bytes: int
    common: Settings
    drawn: EngineLoad | None = None

    @property
    def gpu(self) -> PlannedDevice:
        return PlannedDevice(True, self.gpu_bytes)


class Choice(NamedTuple):
    """One point of the search."""

    zero_stage: int
    offload: bool
    recompute: bool
    micro_batch: int
    drawing: WayOfDrawing | None = None

    @property
    def words(self) -> str:
        parts = [f"ZeRO-{self.zero_stage}", f"micro-batches of {self.micro_batch}"]
        parts += ["offload"] if self.offload else []
        parts += ["recomputation"] if self.recompute else []
        parts += [self.drawing.name] if self.drawing is not None else []
        return ", ".join(parts)


def ladders(wanted: Wanted) -> Iterator[list[Choice]]:
    """Choices without a way of drawing that differ in the micro-batch alone, smallest first; their memory grows."""
    own = wanted.sequences // wanted.ranks
    whole_shares = wanted.sequences % wanted.ranks == 0
    sizes = [size for size in (2**power for power in range(7)) if whole_shares and own % size == 0]
    whole = [(stage, False) for stage in ((0, 1, 2, 3) if wanted.ranks > 1 else (0,))]
    for stage, offload in [*whole, (1, True), (2, True), (3, True)]:
        for recompute in (False, True):
            yield [Choice(stage, offload, recompute, size) for size in sizes]


def ways_of_drawing(wanted: Wanted) -> list[WayOfDrawing] | list[None]:
    """Those whose ranks divide the run's and the heads; [None] for steps that draw nothing."""
    if wanted.drawn is None:
        return [None]
    return [drawing for drawing in DRAWINGS if 0 == wanted.ranks % drawing.ranks == wanted.drawn.heads % drawing.ranks]


def settings_of(choice: Choice, wanted: Wanted) -> Iterator[Settings]:
    """The flags of a choice; of step 3 in ever more batches of drawing, the fastest first."""
    own = wanted.sequences // wanted.ranks
    steps = own // choice.micro_batch
    if wanted.drawn is None:
        yield {
            **wanted.common,
            "max_seq_len": sum(wanted.tokens),
            "per_device_train_batch_size": choice.micro_batch,
            "gradient_accumulation_steps": steps,
            "zero_stage": choice.zero_stage,
            "offload": choice.offload,
            "gradient_checkpointing": choice.recompute,
        }
        return
    assert choice.drawing is not None
    prompt, answer = wanted.tokens
    for batches in _BATCHES:
        drawn = drawing_flags(choice.drawing, wanted.drawn._replace(sequences=own), batches)
        if drawn is not None:
            yield {
                **wanted.common,
                "max_prompt_seq_len": prompt,
                "max_answer_seq_len": answer,
                "per_device_training_batch_size": choice.micro_batch,
                "gradient_accumulation_steps": steps,
                "actor_zero_stage": choice.zero_stage,
                "critic_zero_stage": choice.zero_stage,
                "offload": choice.offload,
                "actor_gradient_checkpointing": choice.recompute,
                "critic_gradient_checkpointing": choice.recompute,
                **({"offload_reference_model": True, "offload_reward_model": True} if _offloads(choice) else {}),
                **drawn,
            }


def _offloads(choice: Choice) -> bool:
    return choice.offload and choice.zero_stage == 3
