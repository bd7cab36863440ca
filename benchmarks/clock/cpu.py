"""This CPU's clock beside runs of every step that it has not seen: measured and run in turns, in processor time.

    OMP_NUM_THREADS=1 python -m benchmarks.clock.cpu --runs 20 [--first 0] [--out runs/clock]

Each setting is drawn from its seed: width, layers, vocabulary, length, rows, accumulation, recomputation. Its runs are
of SFT, reward model, DPO, GRPO and PPO, whose rows are all full, in three turns. The CPU is measured before the first
and after each, drawing and what a rollout does beside its models included; before the first also what else programs do
beside their models. A step's seconds are those of the process, from one call of a callback to the next, the median
without the first two: others on the machine take none of them, but slow caches and clocks down, for seconds or half a
minute at a time. So a turn's prediction is the mean of those before and after it, and what counts is the median of the
turns' ratios of predicted to run. Prints them, and how many settings are within 15 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import threestep
from benchmarks.clock.drawing import with_drawing
from benchmarks.clock.dry import predicted_seconds
from threestep.plugins.plan.clock.devices import AttentionShares, Device
from threestep.plugins.plan.dry_run.cpu_rates import measured_cpu
from threestep.plugins.plan.dry_run.in_a_model import KernelSeconds, now
from threestep.plugins.plan.dry_run.operators import ATTENTION, PRODUCT

WITHIN = 0.15
KINDS = ("sft", "reward", "dpo", "grpo", "ppo")
_STEPS, _WARM = 6, 2
_MOST_STEPS, _SECONDS = 24, 1.5  # of short steps as many as make so many seconds, but no more
_TURNS = 3
_BESIDE = ("step", "micro_step", "rollout", "layer", "layer_micro_step")
_FURTHER_LAYERS = 8
_PRECISION = {"dtype": "fp32"}  # of the measured rates
_OF_LENGTH: dict[str, Any] = {"reward": "length", "reward_length_characters": 40}


class Drawn(NamedTuple):
    """A setting. tokens: of a row; of step 3 half of them are the prompt's."""

    width: int
    layers: int
    vocabulary: int
    tokens: int
    rows: int
    accumulation: int
    recomputes: bool

    @property
    def name(self) -> str:
        recomputed = ", R" if self.recomputes else ""
        return (
            f"{self.width} wide, {self.layers} layers, {self.vocabulary} ids, {self.rows} x {self.tokens} x "
            f"{self.accumulation}{recomputed}"
        )


def drawn_setting(seed: int) -> Drawn:
    """The setting of a seed."""
    dice = random.Random(seed)
    return Drawn(
        dice.choice((128, 192, 256, 320, 384)),
        dice.randint(2, 6),
        dice.choice((300, 600, 1200)),
        dice.choice((64, 96, 128, 192, 256)),
        dice.choice((2, 4, 6, 8)),
        dice.choice((1, 2)),
        dice.random() < 0.3,
    )


class SmallRuns:
    """Runs from which the seconds that programs take beside their model are known: SFT of one layer and of nine, in one
    and in four micro-steps, and GRPO of next to no work."""

    def __init__(self, folder: Path) -> None:
        small = Drawn(192, 1, 300, 64, 2, 1, False)
        self._sft = {
            (layers, steps): Runs(small._replace(layers=layers, accumulation=steps), folder / f"{layers}_{steps}")
            for layers, steps in itertools.product((1, 1 + _FURTHER_LAYERS), (1, 4))
        }
        self._drawing = Runs(Drawn(64, 1, 300, 16, 2, 1, False), folder / "drawing")

    def with_costs(self, device: Device) -> Device:
        """The device, drawing included, with these seconds."""
        beside = costs_beside({name: run.seconds_beside(device) for name, run in self._sft.items()})
        return self.with_rollout(_with(device, **beside))

    def with_rollout(self, device: Device) -> Device:
        """The device whose other seconds are known with those of a rollout."""
        known = self._drawing.predicted("grpo", _with(device, rollout=0.0))
        return _with(device, rollout=max(0.0, self._drawing.seconds_of("grpo", _MOST_STEPS) - known))


def without_products(device: Device) -> Device:
    """The device on which products and attention take no time."""
    assert device.measured is not None
    free = device.measured._replace(matmuls=((1.0, ((1.0, math.inf),)),))
    return replace(device, attention=AttentionShares(math.inf, math.inf), measured=free)


def costs_beside(seconds: Mapping[tuple[int, int], float]) -> dict[str, float]:
    """What a step, a micro-step, and each of them for a layer cost besides the counted work, from the seconds beside it
    of 1 layer and `1 + _FURTHER_LAYERS` in 1 micro-step and in 4."""
    few, many = ((seconds[layers, 4] - seconds[layers, 1]) / 3 for layers in (1, 1 + _FURTHER_LAYERS))
    layer_micro_step = max(0.0, (many - few) / _FURTHER_LAYERS)
    layer = max(0.0, (seconds[1 + _FURTHER_LAYERS, 1] - seconds[1, 1]) / _FURTHER_LAYERS - layer_micro_step)
    micro_step = max(0.0, few - layer_micro_step)
    step = max(0.0, seconds[1, 1] - micro_step - layer - layer_micro_step)
    return {"step": step, "micro_step": micro_step, "layer": layer, "layer_micro_step": layer_micro_step}


def costs_of(known: Device, device: Device) -> Device:
    """The device with the known one's seconds beside the model."""
    assert known.measured is not None
    return _with(device, **{name: getattr(known.measured.costs, name) for name in _BESIDE})


def _with(device: Device, **costs: Any) -> Device:
    assert device.measured is not None
    return replace(device, measured=device.measured._replace(costs=device.measured.costs._replace(**costs)))


def main() -> None:
    """Run, predict, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", default="runs/clock")
    flags = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found: dict[str, list[float]] = {kind: [] for kind in flags.kinds}
    small, device = SmallRuns(Path(flags.out) / "costs"), with_drawing(measured_cpu())
    for seed in range(flags.first, flags.first + flags.runs):
        runs = Runs(drawn_setting(seed), Path(flags.out) / str(seed))
        of_kinds, device = _in_turns(runs, flags.kinds, small.with_costs(device), small.with_rollout)
        for kind, turns in of_kinds.items():
            found[kind].append(statistics.median(turn.ratio for turn in turns))
            each = ", ".join(f"{turn.spent:.3f} {turn.predicted:.3f} {turn.ratio:.2f}" for turn in turns)
            print(f"{kind:6} {runs.setting.name:55} {found[kind][-1]:5.2f}   {each}", flush=True)
    for kind, ratios in found.items():
        close = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        middle = f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{kind}: {close} of {len(ratios)} within {WITHIN:.0%}, {middle}")


class Turn(NamedTuple):
    """Seconds of a step."""

    spent: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.spent


def _in_turns(
    runs: Runs, kinds: Sequence[str], device: Device, with_rollout: Callable[[Device], Device]
) -> tuple[dict[str, list[Turn]], Device]:
    """Each kind's turns, and the device as measured after them. device: as measured before, with the seconds beside the
    model. with_rollout: measures those of a rollout anew."""
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    before = {kind: runs.predicted(kind, device) for kind in kinds}
    for _ in range(_TURNS):
        spent = {kind: runs.seconds_of(kind, _steps_of(before[kind])) for kind in kinds}
        measured = with_drawing(measured_cpu())
        known = with_rollout(costs_of(device, measured))
        after = {kind: runs.predicted(kind, known) for kind in kinds}
        for kind in kinds:
            turns[kind].append(Turn(spent[kind], (before[kind] + after[kind]) / 2))
        before = after
    return turns, measured


def _steps_of(seconds: float) -> int:
    """How many steps of about so many seconds a run has."""
    return _WARM + min(_MOST_STEPS - _WARM, max(_STEPS - _WARM, math.ceil(_SECONDS / seconds)))


class Runs:
    """The runs of one setting, in a folder."""

    def __init__(self, setting: Drawn, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        rows = sequences(setting)
        self._rows = [{"prompt": text[:8], "completion": text[8:]} for text in rows]
        others = [*rows[1:], rows[0]]
        self._pairs = [
            {"prompt": text[:8], "chosen": text[8:], "rejected": other[8:]}
            for text, other in zip(rows, others, strict=True)
        ]
        shape = {"num_attention_heads": max(1, setting.width // 64), "max_position_embeddings": setting.tokens}
        self.model = str(
            threestep.new_model(
                self._rows,
                folder / "new",
                vocab_size=setting.vocabulary,
                hidden_size=setting.width,
                num_hidden_layers=setting.layers,
                **shape,
            )
        )
        never_ending(Path(self.model))

    def settings_of(self, kind: str) -> dict[str, Any]:
        """The flags of a run that change its seconds."""
        setting = self.setting
        if kind in ("sft", "reward", "dpo"):
            return {
                "max_seq_len": setting.tokens,
                "per_device_train_batch_size": setting.rows,
                "gradient_accumulation_steps": setting.accumulation,
                "gradient_checkpointing": setting.recomputes,
            }
        half = setting.tokens // 2
        shared: dict[str, Any] = {
            "max_prompt_seq_len": half,
            "prompt_truncation": "right",
            "max_answer_seq_len": half,
            "per_device_generation_batch_size": setting.rows * setting.accumulation,
            "per_device_training_batch_size": setting.rows,
            "gradient_accumulation_steps": setting.accumulation,
            "actor_gradient_checkpointing": setting.recomputes,
        }
        if kind == "ppo":
            return {**shared, "critic_gradient_checkpointing": setting.recomputes}
        samples = {"num_samples_per_prompt": 2, "per_device_generation_batch_size": max(1, setting.rows // 2)}
        return {**shared, **samples, "advantage": "grpo", "gradient_accumulation_steps": 1}

    def seconds_of(self, kind: str, steps: int = _STEPS) -> float:
        """Processor seconds of a step of a run of so many."""
        return self._run(kind, steps)[0]

    def seconds_beside(self, device: Device) -> float:
        """Of a step of SFT: those that neither its products and its attention took, as they ran in further steps, nor
        anything else that is counted, by the device's rates."""
        seconds, products = self._run("sft", _MOST_STEPS, _STEPS)
        return seconds - products - self.predicted("sft", without_products(device))

    def _run(self, kind: str, steps: int, further: int = 0) -> tuple[float, float]:
        """Seconds of one of `steps` steps, and in products and attention of one of `further` ones."""
        marks: list[float] = []
        inside = KernelSeconds()

        def follow(step: int, figures: dict[str, Any]) -> None:
            if not step or any(name.startswith("eval/") for name in figures):
                return
            answer = self.setting.tokens // 2
            assert figures.get("rollout/response_tokens", answer) == answer, "a response ended early: less was run"
            marks.append(now())
            if further and step == steps:
                inside.__enter__()
            elif further and step == steps + further:
                inside.__exit__(None, None, None)

        common = dict(
            max_train_steps=steps + further,
            output_dir=str(self.folder / kind),
            overwrite=True,
            report=False,
            callback=follow,
            eval_fraction=0.1,
            eval_interval=100,
            **_PRECISION,
        )
        self._call(kind)(**self.settings_of(kind), **common)
        plain = [later - earlier for earlier, later in zip(marks, marks[1:steps], strict=False)]
        products = (inside.seconds[PRODUCT] + inside.seconds[ATTENTION]) / max(1, further)
        return statistics.median(plain[_WARM - 1 :]), products

    def _call(self, kind: str) -> Callable[..., Any]:
        prompts = [{"prompt": row["completion"]} for row in self._rows]
        if kind == "grpo":
            return lambda **flags: threestep.ppo(self.model, prompts, **_OF_LENGTH, **flags)
        if kind == "ppo":
            scorer = str(self.folder / "reward" / "model")
            return lambda **flags: threestep.ppo(self.model, prompts, reward_model=scorer, **flags)
        rows = self._rows if kind == "sft" else self._pairs
        return lambda **flags: getattr(threestep, kind)(self.model, rows, **flags)

    def predicted(self, kind: str, device: Device) -> float:
        """The clock's seconds on the device."""
        places = {"sft": ("model",), "reward": ("model",), "dpo": ("model",)}.get(kind, ("actor_model", "critic_model"))
        models = {f"{place}_name_or_path": self.model for place in places}
        if kind == "grpo":
            models = {"actor_model_name_or_path": self.model, **_OF_LENGTH}
        settings = {
            **models,
            **self.settings_of(kind),
            **_PRECISION,
            "output_dir": str(self.folder / "dry"),
            "data_path": "embedded",
        }
        return predicted_seconds(kind, settings, device)


def never_ending(folder: Path) -> None:
    """Change a new model so that it does not draw the end token: the states have one number that no layer changes, and
    the output layer reads it for that token alone. So all responses are full."""
    weights = load_file(folder / "model.safetensors")
    embeddings, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings[:, 0] = embeddings.std() * embeddings.shape[1] ** 0.5  # half of every state
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    output[:, 0] = 0.0
    output[json.loads((folder / "config.json").read_text())["eos_token_id"], 0] = -100.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def sequences(setting: Drawn) -> list[str]:
    """Texts longer than a row."""
    dice = random.Random(1)
    words = ["".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 6))) for _ in range(400)]
    count = 2 * _MOST_STEPS * setting.rows * setting.accumulation
    return [" ".join(dice.choices(words, k=2 * setting.tokens)) for _ in range(count)]


if __name__ == "__main__":
    main()
