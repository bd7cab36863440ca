"""Our programs as the examiner runs them, and the program that plants a fault into one before it starts.

python -m threestep.plugins.audit.tests.examined.ours FAULT MODULE FLAGS...
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.conftest import MODULES, Ran, pair_rows, run_module, run_step, save_start
from threestep.plugins.audit.tests.examined.fault import OurFault
from threestep.plugins.audit.tests.examined.scoring import Verdict, judged, same_records

_DATA = "--max_seq_len 100 --eval_interval 0 --eval_fraction 0.1 --dtype fp32 --seed 3"
_TRAINED = "--per_device_train_batch_size 6 --learning_rate 1e-2 --max_train_steps 3 --max_tokens_per_micro_batch 128"
_ADAM = "--adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 1e-6 --weight_decay 0.1 --num_warmup_steps 2"
_ROLLOUT = (
    "--max_answer_seq_len 10 --max_prompt_seq_len 64 --max_train_steps 2 --per_device_generation_batch_size 8 "
    "--per_device_training_batch_size 8 --actor_learning_rate 2e-2 --temperature 0.7 --ppo_epochs 2 "
    "--reward length --reward_length_characters 20 --max_tokens_per_micro_batch 96 --dtype fp32 --seed 3"
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Run:
    """step, flags: of the program. record: the name of the record that is judged."""

    step: int | str
    flags: str
    ranks: int = 1
    record: str = "step_000003"


RUNS = {
    "sft": Run(1, f"{_DATA} {_TRAINED} {_ADAM} --max_grad_norm 0.5"),
    "sft 2 ranks": Run(1, f"{_DATA} {_TRAINED} {_ADAM}", 2),
    "sft chat": Run(
        1, f"{_DATA} {_TRAINED} {_ADAM} "
        "--prompt_style chat_template --chat_template TEMPLATE"),
    "dpo": Run("dpo", f"{_DATA} {_TRAINED} {_ADAM} --beta 0.2"),
    "dpo padded": Run("dpo", f"{_DATA} {_TRAINED} {_ADAM} --beta 0.2 --padded true"),
    "dpo smoothed": Run("dpo", f"{_DATA} {_TRAINED} {_ADAM} --beta 0.2 --label_smoothing 0.2"),
    "reward": Run(2, f"{_DATA} {_TRAINED} {_ADAM} --margin_scale 1.0 --center_coef 0.1 --label_smoothing 0.1"),
    "grpo": Run(
        3, f"{_ROLLOUT} --advantage grpo --kl_in loss --kl_coef 0.2 --num_samples_per_prompt 4 --clip_range_low 0.1 "
        "--clip_range_high 0.3", record="step_000002_update2",
    ),
    "rloo": Run(
        3, f"{_ROLLOUT} --advantage rloo --kl_in reward --kl_coef 0.2 --num_samples_per_prompt 4",
        record="step_000002_update2",
    ),
    "ppo": Run(
        3, f"{_ROLLOUT.replace('2e-2', '3e-3')} --advantage gae --kl_in reward --kl_coef 0.2 --gamma 0.95 "
        "--lam 0.8 --clip_range_value 0.05 --critic_learning_rate 1e-2", record="step_000002_update2",
    ),
}  # fmt: skip


class Workshop:
    """Models and data of all runs in one folder, made once."""

    def __init__(self, place: Path) -> None:
        self._right: dict[str, Path] = {}
        self._making = threading.Lock()
        self._caches = itertools.count()  # a fault may be in the rows
        self.place, self.start = place, save_start(place / "start")
        self.rows = place / "pairs.jsonl"
        rows = pair_rows(240)
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.short = place / "short.jsonl"  # of responses that end soon
        short = [{**row, "chosen": row["chosen"][: 1 + number % 6]} for number, row in enumerate(rows)]
        self.short.write_text("".join(json.dumps(row) + "\n" for row in short))
        self.template = place / "template.jinja"
        self.template.write_text(TEMPLATE)
        self.actor, self.scorer = place / "actor", place / "scorer"
        few = f"{_DATA} --per_device_train_batch_size 8 --learning_rate 1e-2".split()
        for step, steps, folder, rows in ((1, 20, self.actor, self.short), (2, 1, self.scorer, self.rows)):
            own = ["--max_train_steps", steps, "--num_train_epochs", 9, "--output_dir", folder]
            ran = run_step(step, [*self._data(step, rows), *few, *own])
            assert ran.code == 0, ran.words

    def run(self, name: str, place: str, fault: str = "") -> tuple[Ran, Path]:
        """Make a run of RUNS, with a fault by its name; return what it said and the folder of the record."""
        run, folder = RUNS[name], self.place / re.sub("[: ]+", "_", place)
        recorded = ["--record_steps", 1, 2, 3, "--record_values", "true"]
        flags = [*self._data(run.step), *run.flags.split(), "--output_dir", folder, *recorded]
        flags = [str(self.template if flag == "TEMPLATE" else flag) for flag in flags]
        if fault:
            ran = run_module(
                "threestep.plugins.audit.tests.examined.ours", [fault, MODULES[run.step], *flags], run.ranks
            )
        else:
            ran = run_step(run.step, flags, run.ranks)
        return ran, folder / "records" / run.record

    def verdict(self, fault: OurFault) -> Verdict:
        """The verdict on a run with a fault; a run without a record finds nothing."""
        ran, record = self.run(fault.run, fault.name, fault.name)
        if not (record / "record.json").is_file():
            last = (ran.stdout + ran.stderr).strip().splitlines()[-1:]
            return Verdict("", (), f"no record: {' '.join(last)}")
        assert not same_records(record, self.right(fault.run)), f"{fault.name} changes nothing"
        return judged(record, fault.said)

    def right(self, run: str) -> Path:
        """The record of a run without a fault, made once."""
        with self._making:
            if run not in self._right:
                ran, self._right[run] = self.run(run, f"right {run}")
                assert ran.code == 0, ran.words
        return self._right[run]

    def _data(self, step: int | str, rows: Path | None = None) -> list[object]:
        data = ["--data_path", f"jsonl:{rows or self.rows}", "--margin_column", "margin", "--data_split", "2,2,2"]
        models = ["--model_name_or_path", self.start]
        if step == 3:
            models = [
                "--actor_model_name_or_path",
                self.actor / "model",
                "--critic_model_name_or_path",
                self.scorer / "model",
            ]
        return [*models, *data, "--data_output_path", self.place / f"cache_{next(self._caches)}"]


def main(argv: Sequence[str]) -> None:
    from threestep.plugins.audit.tests.examined.our_faults import OUR_FAULTS

    fault, module, *flags = argv
    plant: Callable[[], None] = next(each.plant for each in OUR_FAULTS if each.name == fault)
    program = importlib.import_module(module)
    plant()
    program.main(flags)


if __name__ == "__main__":
    from training.utils.run.program import run_program

    run_program(main, uses_deepspeed=False) if "--help" in sys.argv else run_program(main)
