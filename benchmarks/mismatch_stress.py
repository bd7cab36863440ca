"""What wrong rollouts cost, and what each recipe of step 3's correction gives back, on the embedded task.

    python -m benchmarks.mismatch_stress --model runs/quickstart/step1_sft/model [--seeds 1 2 3] [--wrong fp8 old8]
    python -m benchmarks.mismatch_stress --table          of the runs that are done

GRPO with the task's checker as the reward, from the quickstart's SFT model; a run for each seed, recipe and way of
being wrong (`wrong_rollouts.py`), each in a process forked from this one. Each ends with a line in
FOLDER/results.jsonl; a run that is there already is not made again. Seeds come first, then recipes, so that what is
there is always a table.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forked import run_in_fork
from benchmarks.wrong_rollouts import WRONGS, wrong_engine
from threestep.plugins.mismatch.recipes import RECIPES

NONE = "none"  # no correction
SAMPLES = 8
FLAGS = (
    "--data_path embedded --data_split 10,12,3 --max_prompt_seq_len 32 --max_answer_seq_len 16 --dtype fp32 "
    f"--advantage grpo --num_samples_per_prompt {SAMPLES} --per_device_generation_batch_size 16 "
    "--per_device_training_batch_size 128 --reward embedded --checker embedded --kl_coef 0 "
    "--lr_scheduler_type constant --num_train_epochs 10 --val_samples 2 --per_device_eval_batch_size 200 "
    "--show_samples 0 --report false --report_mfu false --report_to none"
).split()
RIGHT = "right"  # of WRONGS
_BEFORE, _AFTER = "before", "after"  # the checker's score on held-out prompts
# Means over rollouts, where the run has them.
_FIGURES = (
    "rollout/logprob_mismatch",
    "mismatch/k3",
    "mismatch/effective_sample_size",
    "mismatch/weight_mean",
    "mismatch/rejected_share",
    "actor/clip_fraction",
    "rollout/score",
)


class Run(NamedTuple):
    """One cell of the table, for one seed."""

    seed: int
    recipe: str
    wrong: str


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart/step1_sft/model", help="the quickstart's SFT model")
    parser.add_argument("--folder", type=Path, default=Path("runs/mismatch_stress"), help="of results.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=[NONE, *list(RECIPES)[1:]], choices=[NONE, *RECIPES])
    parser.add_argument("--wrong", nargs="+", default=["old8", "fp8", "hot", "old1"], choices=list(WRONGS))
    parser.add_argument("--steps", type=int, default=24, help="rollouts, each with one optimizer step")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--table", action="store_true", help="make no runs")
    arguments = parser.parse_args(argv)
    results = arguments.folder / "results.jsonl"
    if not arguments.table:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        flags = ["--max_train_steps", str(arguments.steps), "--actor_learning_rate", str(arguments.learning_rate)]
        flags += ["--actor_model_name_or_path", str(Path(arguments.model).resolve())]
        done = {run for run, _ in read(results)}
        for run in planned(arguments.seeds, arguments.recipes, arguments.wrong):
            if run not in done:
                print(f"{run.seed} {run.recipe} {run.wrong}", flush=True)
                line = made(run, flags, arguments.folder)
                with results.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
    print(table(read(results)))


def planned(seeds: Sequence[int], recipes: Sequence[str], wrongs: Sequence[str]) -> list[Run]:
    """Return the runs in their order: of each seed one that is right, then the recipes' rows."""
    return [
        run
        for seed in seeds
        for run in (Run(seed, NONE, RIGHT), *(Run(seed, recipe, wrong) for recipe in recipes for wrong in wrongs))
    ]


def read(results: Path) -> list[tuple[Run, dict[str, Any]]]:
    """Return the runs that are done, with what they found."""
    lines = results.read_text().splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    return [(Run(each["seed"], each["recipe"], each["wrong"]), each) for each in found]


def made(run: Run, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train, and return what the run found. SystemExit, with the end of its log, where it fails."""
    out = folder / f"{run.seed}_{run.recipe}_{run.wrong}"
    shutil.rmtree(out, ignore_errors=True)
    log = folder / f"{out.name}.log"
    correction = ["--mismatch_correction", "none"] if run.recipe == NONE else ["--mismatch_recipe", run.recipe]
    # The models that the runs of a seed begin with are the same: one of them evaluates it.
    before = ["--val_before_train", str(run.wrong == RIGHT).lower()]
    loss = ["--policy_loss", "gpg"] if run.recipe.startswith("bypass_pg") else []
    places = ["--output_dir", str(out), "--data_output_path", str(folder / "cache"), "--seed", str(run.seed)]
    words = [*FLAGS, *flags, *places, *before, *correction, *loss]
    began = _cpu_seconds()
    import_all()
    run_in_fork(out.name, partial(train, words, run.wrong), log)
    summary = json.loads((out / "summary.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {name: [line[name] for line in metrics if name in line] for name in _FIGURES}
    shutil.rmtree(out)
    log.unlink()
    return {
        **run._asdict(),
        **({_BEFORE: summary["checker_before"]} if run.wrong == RIGHT else {}),
        _AFTER: summary["checker_after"],
        **{name: sum(values) / len(values) for name, values in found.items() if values},
        "scores": found["rollout/score"],
        "cpu_seconds": _cpu_seconds() - began,
        "flags": " ".join(flags),
    }


def import_all() -> None:
    """What a run imports: eight seconds that its forks share."""
    import training.step3_ppo.run  # noqa: F401


def train(words: Sequence[str], wrong: str) -> None:
    """Run step 3 by its command line, but for the engine of its rollouts."""
    from training.step3_ppo import STEP
    from training.step3_ppo.flags.checks import checked_components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.run import run
    from training.utils.flags.arguments import parse_arguments

    flags = PpoFlags(*parse_arguments(STEP.groups, list(words), "", STEP.old_flags))
    components = checked_components(flags)._replace(rollout_engine=wrong_engine(WRONGS[wrong], SAMPLES))
    run(flags, components)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(found: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """Return the checker's score after training by recipe and by what is wrong: the mean over seeds, each seed's in
    brackets."""
    if not found:
        return "no run is done"
    wrongs = list(dict.fromkeys(run.wrong for run, _ in found if run.wrong != RIGHT))
    recipes = list(dict.fromkeys(run.recipe for run, _ in found))
    before, right = (
        {run.seed: each[which] for run, each in found if run.wrong == RIGHT} for which in (_BEFORE, _AFTER)
    )
    lines = [
        f"after SFT {_told(before)}; rollouts that are right {_told(right)}",
        "",
        "| | " + " | ".join(WRONGS[wrong].words for wrong in wrongs) + " |",
        "| --- |" + " --- |" * len(wrongs),
    ]
    for recipe in recipes:
        cells = [
            _told({run.seed: each[_AFTER] for run, each in found if (run.recipe, run.wrong) == (recipe, wrong)})
            for wrong in wrongs
        ]
        lines.append(f"| `{recipe}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _told(of_seed: dict[int, float]) -> str:
    if not of_seed:
        return ""
    each = ", ".join(f"{of_seed[seed]:.3f}" for seed in sorted(of_seed))
    return f"{sum(of_seed.values()) / len(of_seed):.3f} ({each})"


if __name__ == "__main__":
    main()
