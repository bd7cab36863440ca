"""Evaluates finished models on the held-out prompts of a dataset, and writes their answers for people to read.

    threestep evaluate win_rate   --model_name_or_path A --baseline B --reward_model RM --data_path ...
    threestep evaluate win_rate   --model_name_or_path A --baseline B --reward embedded --data_path embedded
    threestep evaluate reward     --model_name_or_path A --reward exact_match --data_path jsonl:questions.jsonl
    threestep evaluate gsm8k      --model_name_or_path A --temperature 0 --data_path openai/gsm8k ...
    threestep evaluate perplexity --model_name_or_path A --data_path ...
    threestep evaluate reward_model --model_name_or_path RM --benchmark rewardbench2 --data_path parquet:FILE
    threestep evaluate harness    --model_name_or_path A --tasks gsm8k my_task.yaml

Prompts and sampling are the same as in step 3; perplexity instead reads step 1's rows, or the text of
--unsupervised_dataset_name. --reward works as in step 3: it accepts rules, your own functions, and `model`, which means
the reward model in --reward_model. reward_model draws no answers: it scores the responses in a benchmark's files.
harness runs tasks of lm-evaluation-harness, which supplies their data, and adds the figures to the report of the
model's run. OUTPUT_DIR gets TASK.json and, if there are answers, TASK.jsonl and TASK.html. By default a single process
runs, on the GPU if there is one; `threestep evaluate win_rate ... --num_ranks 8` uses eight. Each rank loads the models
and answers every n-th batch of prompts; the first rank scores all answers and writes the files. The results are the
same as with one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from threestep.plugins.evaluation.arguments import EVALUATE_GROUPS, flags_of_training
from threestep.plugins.evaluation.harness.arguments import HarnessArguments
from threestep.plugins.pretraining_loss.arguments import TextArguments
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.flags.arguments import parse_arguments
from training.utils.plugins.registry import flag_names
from training.utils.run.program import run_program

HARNESS = "harness"
TASKS = ("win_rate", "reward", "gsm8k", "perplexity", "reward_model", HARNESS)
GROUPS = (*EVALUATE_GROUPS, TextArguments, HarnessArguments)
# What a first run needs, in the order of `--help`.
FIRST_FLAGS = (
    *("model_name_or_path", "data_path", "output_dir", "reward", "reward_model", "baseline", "tasks", "benchmark"),
    *("max_eval_rows", "val_samples", "max_new_tokens", "temperature", "rollout_engine", "num_ranks", "config"),
)


def main(argv: Sequence[str]) -> None:
    """Parse, evaluate, print."""
    task, flags = task_of(argv)
    names = {"old_flags": flag_names("evaluate"), "refused": flags_of_training("evaluate")}
    *groups, harness = parse_arguments(GROUPS, flags, __doc__ or "", **names, first_flags=FIRST_FLAGS)
    if task != HARNESS and harness.tasks:
        raise ThreestepError(f"--tasks is only for {HARNESS}, not for {task}; remove --tasks")

    from threestep.plugins.evaluation.harness.task import run_harness
    from threestep.plugins.evaluation.opening import Evaluated
    from threestep.plugins.evaluation.reward_benchmarks.task import TASK, run_benchmark
    from threestep.plugins.evaluation.tasks import run_task

    evaluated = Evaluated(task, *groups)
    runs: dict[str, Callable[[Evaluated], list[str]]] = {TASK: run_benchmark}
    runs[HARNESS] = partial(run_harness, harness=harness)
    for line in runs.get(task, run_task)(evaluated):
        print(line)


def task_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first word and the flags after it."""
    if not argv or argv[0] in ("-h", "--help"):
        return TASKS[0], list(argv) or ["--help"]
    if argv[0] not in TASKS:
        known = (*TASKS, "pairs")
        raise ThreestepError(
            f"expected a task first, one of {', '.join(known)}, got '{argv[0]}'{nearest_names(argv[0], known)}"
        )
    return argv[0], list(argv[1:])


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
