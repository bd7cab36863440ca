"""The ways to draw responses that a plan of step 3 chooses among, as flags."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from training.utils.generation.table import ENGINES

_SHARES = 20  # a share of a GPU's memory is given in twentieths
_MOST = 0.9  # of a GPU


class WayOfDrawing(NamedTuple):
    """A rollout engine on the training GPUs, shared by `ranks` neighbours."""

    name: str
    engine: str = "hf"
    ranks: int = 1


class EngineLoad(NamedTuple):
    """The load of a rank's engine, in bytes: the model's weights, the cache of one sequence, the GPU. sequences: of
    a rank. heads: of attention, which ranks share. samples: responses to a prompt."""

    weights: int
    cache: int
    sequences: int
    gpu: int
    heads: int
    samples: int = 1


DRAWINGS = (
    *(
        WayOfDrawing(f"vLLM, tensor-parallel over {ranks}", "vllm", ranks)
        for ranks in (1, 2, 4, 8)
        if "vllm" in ENGINES
    ),
    WayOfDrawing("the trained model (hf)"),
)


def drawing_flags(drawing: WayOfDrawing, drawn: EngineLoad, batches: int) -> dict[str, Any] | None:
    """The flags for drawing all sequences in `batches` batches; None if that does not fit."""
    if drawn.sequences % (batches * drawn.samples):
        return None
    common = {
        "rollout_engine": drawing.engine,
        **({"num_samples_per_prompt": drawn.samples} if drawn.samples > 1 else {}),
        "per_device_generation_batch_size": drawn.sequences // (batches * drawn.samples),
        "generation_batches": batches,
    }
    if drawing.engine == "hf":
        return common
    needed = drawn.weights / drawing.ranks + drawn.cache * drawn.sequences / batches
    share = math.ceil(_SHARES * needed / drawn.gpu) / _SHARES
    if share > _MOST:
        return None
    return {**common, "vllm_tensor_parallel_size": drawing.ranks, "vllm_memory_share": share}
