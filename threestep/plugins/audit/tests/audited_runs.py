"""Right steps of our own programs under the judge: runs in settings drawn at random, each step with its values.

    python -m threestep.plugins.audit.tests.audited_runs 7                  300 steps of eight runs under seed 7
    python -m threestep.plugins.audit.tests.audited_runs 7 --steps 40 --keep FOLDER

A step counts if nothing differs. The last lines are the figures: steps, false alarms, quantities that were judged. The
exit code is 1 where a right step raises an alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.conftest import run_module
from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.text import verdict

DATA = "--data_path embedded --max_seq_len 64 --max_train_rows 32 --max_eval_rows 4 --eval_interval 0"
ROLLOUT = (
    "--max_answer_seq_len 10 --max_prompt_seq_len 40 --reward length --reward_length_characters 12 --ppo_epochs 2 "
    "--per_device_generation_batch_size 4 --num_samples_per_prompt 2 --actor_learning_rate 1e-3"
)
PAIRS = "sigmoid ipo hinge robust sigmoid_norm apo_zero apo_down simpo cpo orpo sigmoid:0.8,sft:0.2".split()
MARKED = ("kto", "bco")
ESTIMATORS = "grpo rloo reinforce++ reinforce++_baseline remax opo grpo_passk gpg optimal_token_baseline".split()
POLICIES = "ppo gspo cispo geo_mean sapo gpg kl_cov clip_cov".split()


@dataclass(frozen=True)
class Run:
    """A run of a step's program."""

    name: str
    module: str
    flags: str
    ranks: int


def drawn_runs(seed: int, steps: int) -> Iterator[Run]:
    """Yield eight runs of `steps` optimizer steps together, at least."""
    each = -(-steps // 8)
    for place in range(8):
        draw = random.Random(f"{seed} {place}")  # noqa: S311 (settings, no secrets)
        dtype, padded, ranks = draw.choice(("fp32", "bf16")), draw.choice(("true", "false")), 1 + place % 2
        stage = draw.choice((0, 1, 2, 3)) if ranks == 2 else draw.choice((0, 2))
        common = f"--dtype {dtype} --max_train_steps {each} --num_train_epochs inf"
        trained = (
            f"{common} --padded {padded} --zero_stage {stage} --per_device_train_batch_size 8 --learning_rate 1e-3 "
            f"--max_tokens_per_micro_batch 160 --weight_decay {draw.choice((0, 0.1))} "
            f"--lr_scheduler_type {draw.choice(('cosine', 'linear', 'constant'))} "
            f"--num_warmup_steps {draw.choice((0, 3))} "
            f"--max_grad_norm {draw.choice((0.3, 1.0))}"
        )
        if place in (0, 1):
            more = draw.choice(("", "--z_loss_coef 1e-2", "--lora_dim 4 --lora_learning_rate 3e-3"))
            yield Run(f"sft {more}", "step1_sft", f"{trained} {more}", ranks)
        elif place in (2, 3, 4):
            loss = draw.choice(MARKED if place == 4 else PAIRS)
            more = " --ld_alpha 0.4 --final_beta 0.3" if loss in ("sigmoid", "hinge", "cpo", "apo_zero") else ""
            yield Run(f"dpo {loss}{more}", "step2_dpo", f"{trained} --loss_type {loss}{more}", ranks)
        elif place == 5:
            more = draw.choice(("--label_smoothing 0.1", "--center_coef 0.01"))
            yield Run(f"reward {more}", "step2_reward", f"{trained} {more}", ranks)
        else:
            estimator, loss = draw.choice(ESTIMATORS), draw.choice(POLICIES)
            kl = draw.choice(("--kl_in loss --kl_coef 0.1", "--kl_in reward --kl_coef 0.05", "--kl_coef 0"))
            rollouts = (
                f"--dtype {dtype} --max_train_steps {-(-each // 2)} --num_train_epochs inf --actor_zero_stage {stage}"
            )
            flags = f"{rollouts} {ROLLOUT} --advantage {estimator} --policy_loss {loss} {kl}"
            yield Run(f"{estimator} {loss} {kl}", "step3_ppo", flags, ranks)


def start_of(folder: Path) -> Path:
    """A small model, made once."""
    if not (folder / "start").is_dir():
        shape = "--vocab_size 353 --hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2"
        _run(
            "threestep.plugins.programs.new_model",
            ["--data_path", "embedded", "--out", str(folder / "start"), *shape.split()],
            1,
        )
    return folder / "start"


def marked_rows(folder: Path) -> Path:
    path = folder / "marked.jsonl"
    words = "pear apple fig plum cherry quince lemon".split()
    rows = (
        {"prompt": f"Sort {words[i % 7]} {i}:", "completion": " " + " ".join(words[: 1 + i % 6]), "label": i % 3 > 0}
        for i in range(32)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records_of(run: Run, folder: Path, steps: int) -> list[Path]:
    """Train, and return the records."""
    start, out = start_of(folder), folder / run.name.replace(" ", "_").replace(":", "_")
    data = DATA
    if any(f"--loss_type {name}" in run.flags for name in MARKED):
        data = f"--data_path {marked_rows(folder)} --max_seq_len 64 --eval_fraction 0.1 --eval_interval 0"
    model = "--actor_model_name_or_path" if run.module == "step3_ppo" else "--model_name_or_path"
    own = [model, str(start), "--output_dir", str(out), "--data_output_path", str(folder / "cache")]
    own += ["--record_values", "true", "--record_steps", *map(str, range(1, steps + 1))]
    _run(f"training.{run.module}.main", [*own, *data.split(), *run.flags.split()], run.ranks)
    return sorted((out / "records").iterdir())


def _run(module: str, flags: list[str], ranks: int) -> None:
    ran = run_module(module, flags, ranks)
    if ran.code:
        raise SystemExit(f"{module} {' '.join(flags)}\n{ran.words[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m threestep.plugins.audit.tests.audited_runs", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=300, help="right steps")
    parser.add_argument("--keep", type=Path, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    judged, lacking, steps, alarms = Counter[str](), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for run in drawn_runs(options.seed, options.steps):
            begun = time.monotonic()
            records = records_of(run, folder, options.steps)
            trained = time.monotonic() - begun
            for record in records:
                findings = judge(AuditedStep(read_record(record)))
                steps += 1
                judged.update(finding.name for finding in findings if finding.state == AGREES)
                lacking.update(f"{each.name}: {each.lacks}" for each in findings if each.state == NOT_JUDGED)
                if any(finding.state == DIFFERS for finding in findings):
                    alarms += 1
                    print(f"ALARM, {run.name} {run.flags}: {record.name}: {verdict(findings)}", flush=True)
            seconds = time.monotonic() - begun
            print(f"{run.name}, {run.ranks} ranks, {run.flags}: {len(records)} steps", flush=True)
            print(f"  {trained:.0f} s training, {seconds - trained:.0f} s judging", flush=True)
    print("judged: " + ", ".join(f"{name} {count}" for name, count in sorted(judged.items())))
    print("not judged: " + "; ".join(f"{name} {count}" for name, count in sorted(lacking.items())))
    print(f"{steps} right steps of ours: {alarms} false alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
