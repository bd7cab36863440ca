"""Draws n responses to each prompt, keeps the best as rows for steps 1 and 2, and plots the reward by n.

    threestep evaluate best_of --model_name_or_path A --reward_model RM --data_path jsonl:prompts.jsonl --output_dir OUT
    threestep evaluate best_of --model_name_or_path A --reward gsm8k --min_reward 1 --keep_best 4 ...
    threestep sft --model_name_or_path A --data_path jsonl:OUT/rows.jsonl ...    # the chosen responses
    threestep dpo --model_name_or_path A --data_path jsonl:OUT/rows.jsonl ...    # chosen against rejected
    threestep evaluate best_of --config best_of.yaml

Prompts are read as in step 3, from files, registered datasets or the hub. Sampling and --reward also work as in step 3.
OUTPUT_DIR gets rows.jsonl, answers.jsonl (every response with its scores), best_of.json and
best_of.html. The same command resumes a stopped run bit-exactly; --num_ranks 8 uses eight ranks and gives the same
rows as one.
"""

from __future__ import annotations

from collections.abc import Sequence

from threestep.plugins.evaluation.arguments import EvaluateArguments, flags_of_training
from threestep.plugins.evaluation.best_of.arguments import BEST_OF_GROUPS
from training.utils.flags.arguments import may_change_in, parse_arguments, resolved_settings
from training.utils.flags.flags import settings_of
from training.utils.run.program import run_program

GROUPS = BEST_OF_GROUPS
# What a first run needs, in the order of `--help`.
FIRST_FLAGS = (
    *("model_name_or_path", "data_path", "output_dir", "reward", "reward_model", "num_samples_per_prompt", "keep_best"),
    *("max_train_rows", "max_new_tokens", "temperature", "rollout_engine", "num_ranks", "config"),
)


def main(argv: Sequence[str]) -> None:
    """Parse, draw, print."""
    groups = parse_arguments(
        GROUPS, argv, __doc__ or "", {}, first_flags=FIRST_FLAGS, refused=flags_of_training("evaluate best_of")
    )
    run, data, wanted, *others = groups
    free = may_change_in(GROUPS)
    fixed = {f"--{name}": value for name, value in resolved_settings(groups).items() if name not in free}

    from threestep.plugins.evaluation.best_of.drawing import run_best_of
    from threestep.plugins.evaluation.opening import Evaluated

    asked = settings_of(
        EvaluateArguments, wanted, baseline=None, benchmark=None, val_samples=wanted.num_samples_per_prompt
    )
    for line in run_best_of(Evaluated("best_of", run, data, asked, *others), wanted, fixed):
        print(line)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
