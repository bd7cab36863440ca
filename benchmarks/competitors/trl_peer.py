"""TRL's trainers on the workload, in TRL's own environment (this file imports nothing of Threestep).

python trl_peer.py --trainer sft --workload DIR --dtype fp32 --steps 10 [--mode plain|padding_free|grouped|packing]
python trl_peer.py --trainer sft_images|grpo_images ...    # rows with pictures (`benchmarks.pictured`)
python trl_peer.py --trainer reward|dpo|orpo --workload DIR --pairs pairs.jsonl ...
python trl_peer.py --trainer kto --workload DIR ...    # reads marked.jsonl
python trl_peer.py --trainer ppo --workload DIR --batch 8 --accumulate 4 ...    # TRL 1.12.0: later ones have none
python trl_peer.py --trainer sft --prepare_only --processes 2 --workload DIR --steps 10
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset, Image, List, load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

MODES = {
    "plain": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "packing": {"packing": True},
}


class Clock(TrainerCallback):
    """Prints the units and the seconds from the end of one optimizer step to the end of the next."""

    def __init__(self, units_of_step: int = 0) -> None:
        """units_of_step: counted by itself; else who collates batches counts."""
        self.units = self.units_of_step = units_of_step
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        print(json.dumps({"units": self.units, "seconds": now - self.started}), flush=True)
        self.units, self.started = self.units_of_step, now


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", required=True, choices=sorted(MAKERS))
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mode", default="plain", choices=sorted(MODES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pairs", default="pairs.jsonl")
    parser.add_argument("--prepare_only", action="store_true", help="time the dataset's preparation, --steps times")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4, help="GRPO: responses to a prompt")
    parser.add_argument("--new_tokens", type=int, default=64, help="GRPO, PPO: most tokens of a response")
    parser.add_argument("--prompts", type=int, default=32, help="PPO: prompts of a step")
    parser.add_argument("--autocast", action="store_true", help="PPO in bfloat16: weights in float32, as Threestep's")
    parser.add_argument("--weights", default="float32", choices=("float32", "bfloat16"), help="but PPO's")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels in the model; SFT: its loss too")
    parser.add_argument("--reference_in_steps", action="store_true")
    arguments = parser.parse_args()
    if arguments.prepare_only:
        _prepare(arguments)
        return
    trainer, clock = MAKERS[arguments.trainer](arguments)
    collate = trainer.data_collator

    def counted(features: list) -> dict:
        batch = collate(features)
        if arguments.trainer != "sft":  # of sft_images, rows
            clock.units += len(features)
        elif "attention_mask" in batch:
            clock.units += int(batch["attention_mask"].sum())
        else:
            clock.units += batch["input_ids"].numel()
        return batch

    if not clock.units_of_step:
        trainer.data_collator = counted
    trainer.add_callback(clock)
    trainer.train()
    if torch.cuda.is_available():
        print(json.dumps({"peak_bytes": torch.cuda.max_memory_allocated()}), flush=True)


def _settings(arguments: argparse.Namespace) -> dict:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulate,
        "max_steps": arguments.steps,
        "bf16": arguments.dtype == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_length": 512,
        "dataloader_pin_memory": False,
        "use_liger_kernel": arguments.liger,
    }


def _policy(arguments: argparse.Namespace) -> AutoModelForCausalLM:
    folder = Path(arguments.workload) / "model"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.weights))


def _sft(arguments: argparse.Namespace) -> tuple:
    from trl import SFTConfig, SFTTrainer

    workload = Path(arguments.workload)
    data = load_dataset("json", data_files=str(workload / "sft.jsonl"), split="train")
    data = data.rename_column("chosen", "completion")
    trainer = SFTTrainer(
        model=_policy(arguments),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=SFTConfig(**{**_settings(arguments), **MODES[arguments.mode]}),
        train_dataset=data,
    )
    return trainer, Clock()


def _prepare(arguments: argparse.Namespace) -> None:
    """What SFTTrainer does with its dataset before it trains, by itself; nothing is taken from a cache."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *given: object, **named: object) -> object:
            started = time.perf_counter()
            prepared = super()._prepare_dataset(*given, **named)
            seconds = time.perf_counter() - started
            print(json.dumps({"units": sum(map(len, prepared["input_ids"])), "seconds": seconds}), flush=True)
            return prepared

    datasets.disable_caching()
    workload = Path(arguments.workload)
    data = load_dataset("json", data_files=str(workload / "sft.jsonl"), split="train")
    data = data.rename_column("chosen", "completion")
    processes = arguments.processes if arguments.processes > 1 else None
    for _ in range(arguments.steps):
        Timed(
            model=AutoModelForCausalLM.from_pretrained(workload / "model"),
            processing_class=AutoTokenizer.from_pretrained(workload / "model"),
            args=SFTConfig(**_settings(arguments), dataset_num_proc=processes),
            train_dataset=data,
        )


def _reward(arguments: argparse.Namespace) -> tuple:
    from trl import RewardConfig, RewardTrainer

    workload = Path(arguments.workload)
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            workload / "model", num_labels=1, dtype=getattr(torch, arguments.weights)
        ),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=RewardConfig(**_settings(arguments)),
        train_dataset=load_dataset("json", data_files=str(workload / arguments.pairs), split="train"),
    )
    return trainer, Clock()


def _dpo(arguments: argparse.Namespace) -> tuple:
    from trl import DPOConfig, DPOTrainer

    workload = Path(arguments.workload)
    trainer = DPOTrainer(
        model=_policy(arguments),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=DPOConfig(**_settings(arguments), precompute_ref_log_probs=not arguments.reference_in_steps),
        train_dataset=load_dataset("json", data_files=str(workload / arguments.pairs), split="train[:200]"),
    )
    return trainer, Clock()


def _kto(arguments: argparse.Namespace) -> tuple:
    from trl import KTOConfig, KTOTrainer

    workload = Path(arguments.workload)
    trainer = KTOTrainer(
        model=_policy(arguments),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=KTOConfig(**_settings(arguments), precompute_ref_log_probs=not arguments.reference_in_steps),
        train_dataset=load_dataset("json", data_files=str(workload / "marked.jsonl"), split="train[:400]"),
    )
    return trainer, Clock(units_of_step=arguments.batch * arguments.accumulate)


def _orpo(arguments: argparse.Namespace) -> tuple:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    workload = Path(arguments.workload)
    trainer = ORPOTrainer(
        model=_policy(arguments),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=ORPOConfig(**_settings(arguments)),
        train_dataset=load_dataset("json", data_files=str(workload / arguments.pairs), split="train[:200]"),
    )
    return trainer, Clock(units_of_step=arguments.batch * arguments.accumulate)


def _grpo(arguments: argparse.Namespace) -> tuple:
    from trl import GRPOConfig, GRPOTrainer

    workload = Path(arguments.workload)
    settings = {name: value for name, value in _settings(arguments).items() if name != "max_length"}

    def right(completions: list, **columns: list) -> list[float]:
        return [float("####" in completion) for completion in completions]

    trainer = GRPOTrainer(
        model=_policy(arguments),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        reward_funcs=right,
        args=GRPOConfig(
            **settings, num_generations=arguments.samples, max_completion_length=arguments.new_tokens, beta=0.0
        ),
        train_dataset=load_dataset("json", data_files=str(workload / "sft.jsonl"), split="train[:400]"),
    )
    return trainer, Clock(units_of_step=1)


def _ppo(arguments: argparse.Namespace) -> tuple:
    """Four models and one pass over one minibatch, responses never cut short: Threestep's settings."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    endless = Path(arguments.workload) / "endless"
    tokenizer = AutoTokenizer.from_pretrained(endless / "actor", padding_side="left")
    data = load_dataset("json", data_files=str(endless / "prompts" / "train.jsonl"), split="train")
    data = data.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=data.column_names)
    is_bf16 = arguments.dtype == "bf16" and not arguments.autocast
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    settings = {name: value for name, value in _settings(arguments).items() if name not in ("max_length", "max_steps")}
    # By default the weights have the dtype, which is faster than autocast from float32 weights.
    settings["bf16"] = arguments.autocast

    def scalar() -> AutoModelForSequenceClassification:
        return AutoModelForSequenceClassification.from_pretrained(endless / "reward_model", num_labels=1, dtype=dtype)

    def policy() -> AutoModelForCausalLM:
        return AutoModelForCausalLM.from_pretrained(endless / "actor", dtype=dtype)

    trainer = PPOTrainer(
        model=policy(),
        ref_model=policy(),
        reward_model=scalar(),
        value_model=scalar(),
        processing_class=tokenizer,
        args=PPOConfig(
            **settings,
            total_episodes=arguments.prompts * arguments.steps,
            num_ppo_epochs=1,
            num_mini_batches=1,
            response_length=arguments.new_tokens,
            local_rollout_forward_batch_size=arguments.batch,
            num_sample_generations=0,
            temperature=1.0,
            kl_coef=0.1,
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    return trainer, Clock(units_of_step=1)


def _sft_images(arguments: argparse.Namespace) -> tuple:
    """The tower frozen, as Threestep's is by default; pictures as long as they are, so no row is cut."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    folder = Path(arguments.workload) / "pictured"
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    model.model.vision_tower.requires_grad_(False)
    trainer = SFTTrainer(
        model=model,
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
        args=SFTConfig(**{**_settings(arguments), "max_length": None}),
        train_dataset=_pictured_rows(folder / "rows", ["images", "prompt", "completion"]),
    )
    return trainer, Clock()


def _grpo_images(arguments: argparse.Namespace) -> tuple:
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    folder = Path(arguments.workload) / "pictured"
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    model.model.vision_tower.requires_grad_(False)
    settings = {name: value for name, value in _settings(arguments).items() if name != "max_length"}

    def right(completions: list, **columns: list) -> list[float]:
        return [float("####" in completion[0]["content"]) for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoProcessor.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=right,
        args=GRPOConfig(
            **settings, num_generations=arguments.samples, max_completion_length=arguments.new_tokens, beta=0.0
        ),
        train_dataset=_pictured_rows(folder / "rows", ["images", "prompt"]),
    )
    return trainer, Clock(units_of_step=1)


def _pictured_rows(folder: Path, columns: list[str]) -> Dataset:
    """The rows with their pictures as datasets reads them: decoded when a batch is made."""
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train").select_columns(columns)
    data = data.map(lambda row: {"images": [str(folder / path) for path in row["images"]]})
    return data.cast_column("images", List(Image()))


MAKERS = {
    "sft": _sft,
    "sft_images": _sft_images,
    "reward": _reward,
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _orpo,
    "grpo": _grpo,
    "grpo_images": _grpo_images,
    "ppo": _ppo,
}


if __name__ == "__main__":
    main()
