"""`threestep audit explain` on our own runs: it says what the step did, and a rule equals the run under that rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.conftest import run_step
from tests.support.new_models import save_new_model
from threestep.plugins.explain.asked_step import AskedRules, AskedStep, explanation_of
from threestep.plugins.explain.records import whole_record
from threestep.plugins.explain.rules import counterfactual, rule_of
from threestep.plugins.explain.updates import cosine, dot, update_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

DATA = (
    "--data_path embedded --max_seq_len 64 --max_train_rows 32 --max_eval_rows 4 --eval_interval 0 --dtype fp32".split()
)
ROLLOUT = (
    "--max_answer_seq_len 10 --max_prompt_seq_len 40 --max_train_steps 2 --reward length --reward_length_characters 12 "
    "--per_device_generation_batch_size 4 --num_samples_per_prompt 2 --actor_learning_rate 1e-3"
).split()
RECORDED = "--dtype fp32 --record_values true --record_steps 1 2".split()


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_new_model(place / "explain_start")


# step, flags, ranks
CASES = {
    "sft packed, two ranks, ZeRO-2": (1, "--max_tokens_per_micro_batch 96 --zero_stage 2 --weight_decay 0.1", 2),
    "sft padded, z-loss, shared beginnings": (1, "--z_loss_coef 1e-3 --share_beginnings 2 --max_grad_norm 0.1", 1),
    "sft LoRA, two ranks, ZeRO-3": (1, "--zero_stage 3 --lora_dim 4 --lora_learning_rate 5e-3", 2),
    "dpo ipo, two ranks, ZeRO-1": ("dpo", "--loss_type ipo --zero_stage 1", 2),
    "dpo a sum, lengths": ("dpo", "--loss_type sigmoid:0.8,sft:0.2 --ld_alpha 0.4", 1),
    "dpo orpo": ("dpo", "--loss_type orpo", 1),
    "reward model": (2, "--label_smoothing 0.1 --center_coef 0.01", 1),
    "grpo, KL in the loss, two ranks": (3, "--advantage grpo --kl_in loss --entropy_coef 0.01 --actor_zero_stage 2", 2),
    "remax, cispo": (3, "--advantage remax --policy_loss cispo --kl_in loss", 1),
    "rloo, gspo, two epochs": (3, "--advantage rloo --policy_loss gspo --ppo_epochs 2 --max_grad_norm 0.05", 1),
}


def _run(place: Path, start: Path, name: str, step: int | str, flags: list[str], ranks: int = 1) -> Path:
    folder = place / f"explain_{name.replace(' ', '_').replace(',', '')}"
    model = "--actor_model_name_or_path" if step == 3 else "--model_name_or_path"
    size = ROLLOUT if step == 3 else ["--per_device_train_batch_size", "8", "--learning_rate", "1e-3"]
    own = [model, start, "--data_output_path", place / "records_cache", "--output_dir", folder]
    ran = run_step(step, [*own, *DATA, *size, *flags], ranks)
    assert ran.code == 0, ran.words
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_shares_of_a_step_sum_to_its_gradient_along_its_update(place: Path, start: Path, name: str):
    step, flags, ranks = CASES[name]
    folder = _run(place, start, name, step, [*RECORDED, *flags.split()], ranks)
    for record in sorted((folder / "records").iterdir()):
        found = explanation_of(AskedStep(record))
        own = whole_record(record)
        change = dot(own.state("gradients."), update_of(own).whole)
        sizes = float(np.abs(found.table.tokens["share"]).sum())
        assert found.table.figures["change"] == pytest.approx(change, abs=1e-5 * sizes + 1e-12)


def test_a_rule_is_the_run_under_that_rule(place: Path, start: Path):
    """From the same start the first step has the same samples, whatever the estimator and the loss."""
    flags = [*RECORDED, "--kl_in", "loss", "--advantage"]
    real = whole_record(_run(place, start, "rule_grpo", 3, [*flags, "grpo"]) / "records" / "step_000001_update1")
    rules = {
        "advantage=rloo": "rloo",
        "loss=gspo kl_coef=0.3": "grpo --policy_loss gspo --kl_coef 0.3",
        "advantage=reinforce++": "reinforce++",
    }
    for said, other in rules.items():
        run = _run(place, start, f"rule_{said}", 3, [*flags, *other.split()])
        record = whole_record(run / "records" / "step_000001_update1")
        np.testing.assert_array_equal(record.tensor("token_ids"), real.tensor("token_ids"))
        found = counterfactual(real, update_of(real), rule_of(said, "policy"))
        recorded, gradients = record.state("gradients."), found.gradients
        assert cosine(recorded, gradients) > 1.0 - 1e-9
        assert dot(recorded, recorded) == pytest.approx(dot(gradients, gradients), rel=1e-4)


def test_a_run_without_records_is_run_again(place: Path, start: Path):
    folder = _run(place, start, "again", 1, ["--save_every", "1", "--max_train_steps", "3"])
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    found = explanation_of(AskedStep(folder, step=2, work=place / "explain_work", trust_run=True))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    assert found.table.title.startswith("sft, step 2")
    assert found.table.figures["change"] < 0.0


def test_a_rule_by_the_runs_program_is_the_run_under_it_to_the_bit(place: Path, start: Path):
    """Of step 1 from the start, beside a run under the rule; and of step 2 from the checkpoint of step 1."""
    flags = [*RECORDED, "--save_every", "1", "--advantage"]
    real = _run(place, start, "by_run_grpo", 3, [*flags, "grpo"])
    other = _run(place, start, "by_run_rloo", 3, [*flags, "rloo"])
    rules = AskedRules(("advantage=rloo",), are_run=True)
    for step in (1, 2):
        work = place / f"explain_work_{step}"
        found = explanation_of(AskedStep(real, step=step, rules=rules, work=work, trust_run=True)).rules[0]
        assert 0.0 < found.cosine < 1.0
        assert found.rule.ran is not None
        if step == 1:
            want = whole_record(other / "records" / "step_000001_update1")
            for kind in ("gradients.", "weights_after."):
                for name, values in want.state(kind).items():
                    np.testing.assert_array_equal(found.rule.ran.state(kind)[name], values)


def test_a_run_explains_the_steps_that_it_is_asked_for(place: Path, start: Path):
    folder = _run(place, start, "at_end", 1, ["--max_train_steps", "3", "--explain_steps", "2"])
    assert [path.name for path in (folder / "records").iterdir()] == ["step_000002"]
    made = sorted(path.name for path in (folder / "explained" / "step_000002").iterdir())
    assert made == ["explained.html", "tokens.parquet"]
