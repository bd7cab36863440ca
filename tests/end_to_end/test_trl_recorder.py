"""TRL's trainers under the recorder, where TRL is installed: right steps agree, and a planted fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import save_start
from training.audit import recorded
from training.audit.judge import DIFFERS, first_wrong, judge
from training.audit.quantities.step import AuditedStep
from training.audit.text import verdict
from training.utils.recording.files import read_record

trl = pytest.importorskip("trl", reason="TRL is no dependency; install trl==1.16.* beside the package")
pytestmark = pytest.mark.timeout(900)

WORDS = "pear apple fig plum cherry quince lemon".split()
ROWS = [
    {"prompt": f"Sort {WORDS[i % 7]}:", "completion": " " + " ".join(WORDS[: 1 + i % 6])} for i in range(16)
]  # fmt: skip
FAST = {
    "report_to": [], "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
    "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "max_steps": 2, "gradient_accumulation_steps": 2,
}  # fmt: skip


def trainer_of(kind: str, folder: Path, **changes: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = save_start(folder / "start")
    model, reference = (AutoModelForCausalLM.from_pretrained(start) for _ in range(2))
    for weight in reference.parameters():
        weight.data += 0.02
    common = {"model": model, "processing_class": AutoTokenizer.from_pretrained(start)}
    own = {**FAST, "per_device_train_batch_size": 2, "output_dir": str(folder / "trl"), **changes}
    if kind == "sft":
        return trl.SFTTrainer(args=trl.SFTConfig(max_length=64, **own), train_dataset=Dataset.from_list(ROWS), **common)
    if kind == "dpo":
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in ROWS]
        args = trl.DPOConfig(max_length=64, **own)
        return trl.DPOTrainer(ref_model=reference, args=args, train_dataset=Dataset.from_list(pairs), **common)
    own |= {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 10, "beta": 0.1}
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS])

    def letters(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    return trl.GRPOTrainer(args=trl.GRPOConfig(**own), reward_funcs=letters, train_dataset=prompts, **common)


@pytest.mark.parametrize(
    ("kind", "judged"),
    [
        ("sft", ("denominator", "loss", "micro_losses", "weights_after")),
        ("dpo", ("loss_mask", "loss", "weights_after")),
        ("grpo", ("rollout_advantages", "advantages", "loss_mask", "loss", "weights_after")),
    ],
)
def test_right_steps_agree(tmp_path: Path, kind: str, judged: tuple[str, ...]):
    trainer = trainer_of(kind, tmp_path)
    with recorded(trainer, tmp_path / "record", steps=(1, 2)):
        trainer.train()
    assert "compute_loss" not in vars(trainer) and not trainer.model._forward_hooks
    for step in (1, 2):
        findings = judge(AuditedStep(read_record(tmp_path / "record" / f"step_{step:06}")))
        states = {finding.name: finding.state for finding in findings}
        assert DIFFERS not in states.values(), verdict(findings)
        assert {states[name] for name in judged} == {"agrees"}


def test_a_loss_that_forgets_the_count_is_named(tmp_path: Path):
    trainer = trainer_of("sft", tmp_path)
    plain = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *args, **more: plain(model, inputs)  # a mean of its own rows
    with recorded(trainer, tmp_path / "record"):
        trainer.train()
    wrong = first_wrong(judge(AuditedStep(read_record(tmp_path / "record" / "step_000001"))))
    assert wrong is not None and wrong.name == "loss" and wrong.difference is not None
    assert "the sum over micro-batches of their means" in wrong.difference.causes[0]
