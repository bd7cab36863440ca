"""Published seconds of RL: a rollout with its scores and updates, from the tables of two frameworks.

Sources: N NVIDIA-NeMo/RL, docs/about/performance-summary.md, v0.4 (06beed9) and v0.6 (7ea279a), settings of
examples/configs/recipes/llm/performance and grpo_math_1B.yaml: GRPO with a reference, rows packed to 4,096 tokens. D
DeepSpeed edaa722, blogs/deepspeed-chat: step 3 of OPT in hours, 131.9 thousand rows of 256 + 256 tokens in 129 steps,
critic and reward model of 350M. NeMo RL says mean lengths and the longest; DeepSpeed-Chat's rows are all full.
"""

from __future__ import annotations

from typing import NamedTuple

_STEPS_OF_AN_EPOCH = 129  # 131.9 thousand rows of 1,024
_DEEPSPEED_CHAT = (256, 512, 512)


class RolloutRow(NamedTuple):
    """sequences: of all GPUs. prompt, mean, longest: tokens. updates: optimizer steps. drawing: GPUs that share a copy
    of the model to draw. split: tensor parallel and pipeline of training, and GPUs that share experts. seconds: as
    published."""

    source: str
    device: str
    model: str
    gpus: int
    sequences: int
    lengths: tuple[int, int, int]
    updates: int
    drawing: int
    split: tuple[int, int, int]
    seconds: float

    @property
    def is_ppo(self) -> bool:
        """With a critic and a reward model."""
        return self.source == "D"

    @property
    def name(self) -> str:
        prompt, mean, longest = self.lengths
        return f"{self.source} {self.device} x {self.gpus}, {self.model}, {self.sequences} x {mean} of {longest}"


# A line: source, model, GPUs, mean and longest tokens, GPUs that draw together, tensor parallel, pipeline, GPUs that
# share experts, seconds. NeMo RL does not say how long prompts are: 150 tokens were assumed.
_NEMO = """
N llama3-8b 16 1060 4096 1 1 2 1 97.7
N qwen3-32b 32 3206 4096 4 4 4 1 393
N qwen3-30b-a3b 32 3154 4096 4 2 1 8 225
N qwen3-30b-a3b 32 3203 4096 2 1 1 8 192
N qwen3-235b-a22b 128 5671 8192 16 2 8 16 506
N qwen3-235b-a22b 128 5698 8192 16 2 8 16 395
N qwen3-235b-a22b 256 5713 8192 16 2 8 16 312
"""
# A line: device, model, GPUs, hours of an epoch. GPUs that draw together are the fewest that hold the weights in two
# fifths of their memory.
_CHAT = """
a100 opt-6.7b 8 4.1
a100 opt-13b 8 9
a100 opt-30b 8 18
a100 opt-66b 8 50.4
a100-40 opt-6.7b 8 5.7
a100-40 opt-13b 8 10.8
a100-40 opt-30b 8 44.4
a100 opt-13b 64 1.25
a100 opt-30b 64 4
a100 opt-66b 64 7.5
a100 opt-175b 64 20
"""


def published_rollouts() -> list[RolloutRow]:
    """Every row, in the order of its source."""
    rows = []
    for line in _NEMO.strip().splitlines():
        source, model, *numbers, seconds = line.split()
        gpus, mean, longest, drawing, tensor, pipeline, experts = map(int, numbers)
        sequences = 512 if model == "qwen3-235b-a22b" else 2048
        lengths, split = (150, mean, longest), (tensor, pipeline, experts)
        rows.append(
            RolloutRow(
                source, "h100", model, gpus, sequences, lengths, sequences // 512, drawing, split, float(seconds)
            )
        )
    for line in _CHAT.strip().splitlines():
        device, model, number, hours = line.split()
        spent = float(hours) * 3600 / _STEPS_OF_AN_EPOCH
        rows.append(
            RolloutRow("D", device, model, int(number), 1024, _DEEPSPEED_CHAT, 1, 0, (1, 1, 1), round(spent, 1))
        )
    return rows
