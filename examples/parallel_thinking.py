"""The embedded task answered by parallel thinking: two attempts side by side, then the answer.

    Human: Put owl last: fox elk Assistant: <Parallel><Path> fox owl elk</Path><Path> fox elk owl</Path></Parallel> fox
    elk owl

`--dataset_module examples/parallel_thinking.py --data_path embedded_parallel --parallel_thinking` in steps 1 and 3, and
there `--reward examples/parallel_thinking.py:answer`, which scores what stands behind the last block. The attempts of a
row are its better and its worse response, in an order that the prompt decides; the answer is the better one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from threestep.plugins.embedded.task import EmbeddedDataset, Example, check
from training.utils.data.registry import register_dataset

CLOSE = "</Parallel>"


@register_dataset("embedded_parallel")
class EmbeddedInParallel(EmbeddedDataset):
    """The rows of `embedded`, each response with a block before it."""

    def get_chosen(self, sample: Example) -> str:
        return _thought(sample, sample.chosen)

    def get_rejected(self, sample: Example) -> str:
        return _thought(sample, sample.rejected)


def _thought(sample: Example, answer: str) -> str:
    attempts = [sample.chosen, sample.rejected]
    if zlib.crc32(sample.prompt.encode()) % 2:
        attempts.reverse()
    # Nothing stands behind a path: a rollout's paths end with their tag.
    paths = "".join(f"<Path>{attempt}</Path>" for attempt in attempts)
    return f" <Parallel>{paths}{CLOSE}{answer}"


def answer(
    prompts: Sequence[str], responses: Sequence[str], **columns: Any
) -> tuple[list[float], dict[str, list[float]]]:
    """Score what stands behind the last block; also whether there is one."""
    behind = [response.rpartition(CLOSE) for response in responses]
    scores = [check(prompt, text) for prompt, (_, _, text) in zip(prompts, behind, strict=True)]
    return scores, {"with_block": [float(bool(found)) for _, found, _ in behind]}
