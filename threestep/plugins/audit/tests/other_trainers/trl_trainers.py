"""One of TRL's trainers under the recorder, in any release of it; run in its environment.

python -m threestep.plugins.audit.tests.other_trainers.trl_trainers KIND START FOLDER [NAME=VALUE ...]     values are
JSON
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "sft": ("SFTTrainer", "SFTConfig"), "dpo": ("DPOTrainer", "DPOConfig"), "reward": ("RewardTrainer", "RewardConfig"),
    "kto": ("KTOTrainer", "KTOConfig"), "grpo": ("GRPOTrainer", "GRPOConfig"), "rloo": ("RLOOTrainer", "RLOOConfig"),
    "plain": ("Trainer", "TrainingArguments"),
}  # fmt: skip
FAST: dict[str, Any] = {
    "report_to": [], "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
    "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "max_steps": 2, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
}  # fmt: skip
POLICY = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 10, "beta": 0.1}


def letters(completions: list[str], **columns: Any) -> list[float]:
    """The number of different letters."""
    return [float(len(set(text))) for text in completions]


def trainer_of(kind: str, start: Path, folder: Path, **changes: Any) -> Any:
    """The trainer on the data of `start`; settings that this release does not have are left out."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    trainer_name, config_name = NAMES[kind]
    library = importlib.import_module("transformers" if kind == "plain" else "trl")
    Trainer, Config = getattr(library, trainer_name), getattr(library, config_name)
    own = FAST | (POLICY if kind in ("grpo", "rloo") else {}) | changes
    known = {each.name for each in dataclasses.fields(Config)}
    args = Config(output_dir=str(folder / "out"), **{name: value for name, value in own.items() if name in known})
    tokenizer = AutoTokenizer.from_pretrained(start / "model")
    more: dict[str, Any] = {"processing_class": tokenizer, "args": args}
    if kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(start / "score", num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(start / "model")
    if kind in ("dpo", "kto"):
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(start / changes.get("reference", "reference"))
    if kind in ("grpo", "rloo"):
        more["reward_funcs"] = letters
    samples = changes.get("samples")
    if samples is not None:
        more |= replayed(json.loads(Path(samples).read_text()))
    if kind == "plain":
        from transformers import DataCollatorForSeq2Seq

        more["data_collator"] = DataCollatorForSeq2Seq(tokenizer)
    rows = [{"prompt": str(place)} for place in range(64)] if samples else list(rows_of(kind, start, tokenizer))
    trainer = Trainer(model=model, train_dataset=Dataset.from_list(rows), **more)
    if kind in ("grpo", "rloo") and trainer.ref_model is not None and samples is None:
        other = AutoModelForCausalLM.from_pretrained(start / "reference")
        trainer.ref_model.load_state_dict(other.state_dict())
    return trainer


def replayed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A rollout and a reward for GRPOTrainer: these prompts, responses and scores, whatever is asked."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(samples), (len(prompts), len(samples))
        return {
            "prompt_ids": [one["prompt"] for one in samples],
            "completion_ids": [one["response"] for one in samples],
            "logprobs": None,
            "given": [one["score"] for one in samples],
        }

    def given_score(completions: list[str], given: list[float], **columns: Any) -> list[float]:
        return list(given)

    return {"rollout_func": roll_out, "reward_funcs": given_score}


def rows_of(kind: str, start: Path, tokenizer: Any) -> Any:
    """Yield the rows as the trainer takes them."""
    pairs = [json.loads(line) for line in (start / "pairs.jsonl").read_text().splitlines()]
    for number, pair in enumerate(pairs):
        if kind in ("dpo", "reward"):
            yield pair | ({"margin": 0.1 * number} if kind == "reward" and number < 0 else {})
        elif kind == "kto":
            side = "chosen" if number % 3 else "rejected"
            yield {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        elif kind in ("grpo", "rloo"):
            yield {"prompt": pair["prompt"]}
        elif kind == "sft":
            yield {"prompt": pair["prompt"], "completion": pair["chosen"]}
        else:
            ids = tokenizer(pair["prompt"] + pair["chosen"] + tokenizer.eos_token)["input_ids"]
            yield {"input_ids": ids[:8], "labels": ids[:8], "attention_mask": [1] * len(ids[:8])}


def main(argv: list[str]) -> None:
    kind, start, folder, *changes = argv
    from threestep.audit import recorded

    named = (change.partition("=") for change in changes)
    trainer = trainer_of(kind, Path(start), Path(folder), **{name: json.loads(value) for name, _, value in named})
    with recorded(trainer, folder, steps=(1, 2)):
        trainer.train()
    assert "compute_loss" not in vars(trainer) and not trainer.model._forward_hooks


if __name__ == "__main__":
    main(sys.argv[1:])
