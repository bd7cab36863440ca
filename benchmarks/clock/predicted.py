"""The clock's estimate of a published row: its model on the meta device, its settings as a plan of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.plan.clock.devices import DEVICES, AttentionShares, Device
from threestep.plugins.plan.clock.traffic import gather_seconds
from threestep.plugins.plan.clock.training_step import Parts, StepPlan, step_parts
from threestep.plugins.plan.clock.work import Matmul, TrainingWork, Work
from threestep.plugins.plan.dry_run.operators import training_work

if TYPE_CHECKING:
    from benchmarks.clock.rows import Row

_MPT = {"70b": (8192, 80, 64), "30b": (7168, 48, 56), "13b": (5120, 40, 40), "7b": (4096, 32, 32), "1b": (2048, 24, 16),
        "125m": (768, 12, 12)}  # fmt: skip
_LLAMA = {"llama3-8b": (4096, 32, 32, 8, 14336, 128256), "llama3-70b": (8192, 80, 64, 8, 28672, 128256),
          "llama3.2-3b": (3072, 28, 24, 8, 8192, 128256)}  # fmt: skip
_QWEN = {"qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064), "qwen2.5-32b": (5120, 64, 40, 8, 27648, 152064),
         "qwen3-32b": (5120, 64, 64, 8, 25600, 151936)}  # fmt: skip
_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size")  # fmt: skip
_OPT = {"350m": (1024, 24, 16), "6.7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
        "66b": (9216, 64, 72), "175b": (12288, 96, 96)}  # fmt: skip
_MIXTURES = {"qwen3-30b-a3b": (2048, 48, 32, 4, 768, 151936, 128, 8, 128),
             "qwen3-235b-a22b": (4096, 94, 64, 4, 1536, 151936, 128, 8, 128)}  # fmt: skip
_MIXTURE_NAMES = (*_NAMES[:4], "moe_intermediate_size", "vocab_size", "num_experts", "num_experts_per_tok", "head_dim")
LORA_RANK = 16
# FlashAttention 1: 30 to 50 and 25 to 35 % of an A100's peak (arXiv 2307.08691, section 1), taken in their middle. On
# an H100 as many times more as FlashAttention-2: 0.35 x 989 / (0.73 x 312).
_FIRST_FLASH = AttentionShares(0.40, 0.30)
_HOPPER_OVER_AMPERE = 0.35 / 0.73


def predicted_parts(row: Row, running_share: float) -> Parts:
    """Seconds of a step of `row` by parts."""
    model = model_of(row.model, "L" in row.settings)
    work = _work(row.model, "L" in row.settings, row.rows, row.tokens)
    weights = sum(part.numel() for part in model.parameters())
    trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
    layers, split = model.config.num_hidden_layers, 2 if "2" in row.settings else 1
    plan = StepPlan(
        weights // split,
        trained // split,
        layers,
        row.gpus // split,
        row.micro_steps,
        dtype="fp8" if "8" in row.settings else "bf16",
        zero_stage=3 if row.gpus > 1 else 0,
        recomputed=1.0 if "R" in row.settings else 0.5 if "S" in row.settings else 0.0,
        compiles="C" in row.settings,
    )
    device = device_of(row)
    parts = step_parts(TrainingWork(*(split_work(part, split) for part in work)), plan, device, running_share)
    if split > 1:  # two sums of a layer's outputs in each forward, backward and recomputation
        passed = 2.0 * row.rows * row.tokens * model.config.hidden_size
        sums = layers * 2 * (2 + plan.recomputed)
        parts["tensor parallel"] = row.micro_steps * sums * 2 * gather_seconds(passed, split, device)
    return parts


@cache
def _work(name: str, adapters: bool, rows: int, tokens: int) -> TrainingWork:
    return training_work(model_of(name, adapters), rows, tokens, rows * tokens)


def predicted_rate(row: Row, running_share: float) -> float:
    """Tokens a second and GPU."""
    split = 2 if "2" in row.settings else 1
    seconds = sum(predicted_parts(row, running_share).values())
    return row.rows * row.tokens * row.micro_steps / seconds / split


def device_of(row: Row) -> Device:
    """The row's device, with what its source says of it."""
    if row.device == "h100-titan":  # 96 GB of HBM2e, limited to 500 W
        return replace(DEVICES["h100"], memory_rate=2400)
    if row.source != "F":
        return DEVICES[row.device]
    slower = _HOPPER_OVER_AMPERE if row.device == "h100" else 1.0
    attention = AttentionShares(*(slower * share for share in _FIRST_FLASH))
    return replace(DEVICES[row.device], attention=attention)


@cache
def model_of(name: str, adapters: bool) -> Any:
    """A model of the shape `name` on the meta device; MPT is a GPT-NeoX of its shape, which has rotary positions."""
    if name.startswith("opt-"):
        width, layers, heads = _OPT[name.removeprefix("opt-")]
        family, shape = "opt", dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                                    ffn_dim=4 * width, vocab_size=50272, word_embed_proj_dim=width)  # fmt: skip
    elif name in _MIXTURES:
        family, shape = "qwen3_moe", dict(zip(_MIXTURE_NAMES, _MIXTURES[name], strict=True))
    elif name.startswith("mpt-"):
        width, layers, heads = _MPT[name.removeprefix("mpt-")]
        family, shape = "gpt_neox", dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                                         intermediate_size=4 * width, vocab_size=50368)  # fmt: skip
    else:
        family, sizes = ("llama", _LLAMA[name]) if name in _LLAMA else (name[:5], _QWEN[name])
        shape = dict(zip(_NAMES, sizes, strict=True))
        shape |= {"head_dim": 128} if family == "qwen3" else {}
    config = AutoConfig.for_model(family, **shape, tie_word_embeddings=name == "llama3.2-3b")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if adapters:
            model = add_lora(model, Lora(lora_dim=LORA_RANK))
            for part in model.parameters():
                part.data = part.data.to(torch.bfloat16)
    return model


def split_work(work: Work, ways: int) -> Work:
    """The work of one of so many GPUs that share each matmul's columns."""
    if ways == 1:
        return work
    matmuls = type(work.matmuls)()
    for matmul, times in work.matmuls.items():
        matmuls[Matmul(matmul.batch, matmul.rows, -(-matmul.columns // ways), matmul.inner)] += times
    return replace(work, matmuls=matmuls, attention_flops=work.attention_flops / ways)
