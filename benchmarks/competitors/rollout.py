"""Generation alone: prompts of GSM8K, several responses each, none of them ended by the model (its weights are random).

    python -m benchmarks.competitors.rollout --workload DIR --how threestep|vllm|bare|generate --dtype fp32 --steps 8

vllm: in the environment of scripts/install_vllm_cpu.sh; each rollout is after an update, so the weights are sent anew.
bare: what nobody can do without. Each prompt once, then one forward a token with a cache that has its room from the
start, and the likeliest token; no end, no seeds, no log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from benchmarks.workload import Workload

PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 128
LONGEST_PROMPT = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Generate `--steps` times, with new prompts each time, and print sequences and seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--how", required=True, choices=("threestep", "vllm", "bare", "generate"))
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--stop")
    arguments = parser.parse_args()
    workload = Workload(Path(arguments.workload))
    tokenizer = AutoTokenizer.from_pretrained(workload.model, padding_side="left")
    texts = [json.loads(line)["prompt"] for line in workload.sft.read_text().splitlines()]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=DTYPES[arguments.dtype]).eval().to(device)
    how = {"threestep": _threestep, "vllm": _vllm, "bare": _bare, "generate": _generate}[arguments.how]
    generate = how(model, tokenizer, arguments)
    for step in range(arguments.steps):
        batch = tokenizer(texts[step * arguments.prompts :][: arguments.prompts], padding=True, return_tensors="pt").to(
            device
        )
        started = time.perf_counter()
        result = generate(batch["input_ids"], batch["attention_mask"])
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        parts = {"parts": result} if isinstance(result, dict) else {}
        print(json.dumps({"units": arguments.prompts * SAMPLES, "seconds": seconds, **parts}), flush=True)


# Returns tokens, or the seconds of its parts by name.
Generate = Callable[[torch.Tensor, torch.Tensor], Any]


def _threestep(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.generation.decoding.hf import TransformersRollout
    from training.utils.models.attention import AUTO
    from training.utils.models.attention_choice import settle_attention
    from training.utils.models.own_forward import own_forward_of

    engine, sampling = TransformersRollout(tokenizer.decode), _sampling(tokenizer, arguments)
    own = own_forward_of(model)
    assert own is not None, "its weights are whole"
    settle_attention(model, own, AUTO, None, compiled=False)  # as a run's start does, and the check of its engine
    engine.check(nullcontext(model), own)
    seeds = range(arguments.prompts * SAMPLES)
    return lambda ids, mask: engine.roll_out(model, RolloutRequest(ids, mask.bool(), sampling, seeds, SAMPLES))


def _vllm(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    from threestep.plugins.vllm.arguments import VllmArguments
    from threestep.plugins.vllm.engine import VllmRollout
    from training.utils.contracts.rollout_engine import RolloutRequest

    sampling, seeds = _sampling(tokenizer, arguments), range(arguments.prompts * SAMPLES)
    engine = VllmRollout(tokenizer.decode, VllmArguments(), LONGEST_PROMPT + arguments.new_tokens)

    def generate(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        rollout = engine.roll_out(model, RolloutRequest(ids, mask.bool(), sampling, seeds, SAMPLES))
        sent = engine.figures()["time/weights_to_vllm"]
        return {"rollout": sent + rollout.seconds, "weights_to_vllm": sent}

    return generate


def _sampling(tokenizer: Any, arguments: argparse.Namespace) -> Any:
    from training.utils.contracts.rollout_engine import Ends, Sampling

    return Sampling(
        max_new_tokens=arguments.new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=arguments.top_p,
        end_token_id=-1,
        pad_token_id=tokenizer.pad_token_id,
        ends=Ends(texts=(arguments.stop,) if arguments.stop else ()),
    )


def _generate(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": arguments.top_p, "eos_token_id": None}
    how |= {"num_return_sequences": SAMPLES, "max_new_tokens": arguments.new_tokens}
    model.generation_config.eos_token_id = None
    return lambda ids, mask: model.generate(ids, attention_mask=mask, pad_token_id=tokenizer.pad_token_id, **how)


def _bare(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> Generate:
    @torch.no_grad()
    def generate(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        width = ids.shape[1]
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.layers = [_Whole(layer, width + arguments.new_tokens) for layer in cache.layers]
        positions = positions[:, -1:].repeat_interleave(SAMPLES, 0)
        mask = torch.cat([mask, mask.new_ones(len(mask), arguments.new_tokens)], 1).repeat_interleave(SAMPLES, 0)
        tokens = [output.logits[:, -1].argmax(-1, keepdim=True).repeat_interleave(SAMPLES, 0)]
        for length in range(width + 1, width + arguments.new_tokens):
            positions = positions + 1
            output = model(tokens[-1], attention_mask=mask[:, :length], position_ids=positions, past_key_values=cache)
            tokens.append(output.logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens, 1)

    return generate


class _Whole(DynamicLayer):
    """The keys and values of a prefilled layer, a row a sample, with room for all that will come."""

    def __init__(self, prefilled: DynamicLayer, tokens: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._rooms = [self._room(part, tokens) for part in (prefilled.keys, prefilled.values)]
        self._length = prefilled.get_seq_length()

    @staticmethod
    def _room(part: torch.Tensor, tokens: int) -> torch.Tensor:
        rows, heads, length, size = part.shape
        room = part.new_empty(rows * SAMPLES, heads, tokens, size)
        room[:, :, :length] = part.repeat_interleave(SAMPLES, 0)
        return room

    def get_seq_length(self) -> int:
        return self._length

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        for room, part in zip(self._rooms, (keys, values), strict=True):
            room[:, :, self._length : self._length + 1] = part
        self._length += 1
        return tuple(room[:, :, : self._length] for room in self._rooms)


if __name__ == "__main__":
    main()
