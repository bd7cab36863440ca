"""Finds the best settings for a model on given GPUs, and the cost of a run, before you rent any.

    threestep plan --model_name_or_path 70B --step ppo --gpus 32xh100 --price_per_hour 2.5
    threestep plan --model_name_or_path runs/sft/model --step grpo --gpus 8xa100

Tries ZeRO stages, offload, recomputation, micro-batches and, in step 3, rollout engines. Drops settings that do not fit
on a GPU by --dry_run's memory estimate, and sorts the rest by its time estimate. Prints the three best with reasons,
writes the first as a YAML file for the step, and prints the cost of a run on 1 to 4,096 GPUs.
More: threestep/plugins/plan/README.md
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from threestep.command import CORE_COMMANDS
from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.failure_flags import FailureArguments
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, nearest_names
from training.utils.data.arguments import SourceArguments
from training.utils.data.rows.arguments import RowArguments
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.arguments import parse_arguments, words_of
from training.utils.flags.flags import flag, flag_of
from training.utils.flags.step import known_steps
from training.utils.generation.arguments import PromptSamplesArguments, SamplingArguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.arguments import ModelArguments
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import make_output_dir

if TYPE_CHECKING:
    from threestep.plugins.plan.choices import Settings, Wanted
    from threestep.plugins.plan.dry_run.estimate import Estimate, ModelCounts
    from threestep.plugins.plan.failures import Losses
    from training.utils.flags.step import Step

TASKS = tuple(CORE_COMMANDS)  # the steps; step 3 also by the commands that set its estimator
FILE = "plan.yaml"


@dataclass
class PlanArguments:
    """The model, the task and the GPUs."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments,
        "A folder with a config.json, or the size of a public model: 0.5B, 1.5B, 7B, 32B (Qwen2.5), 8B, 70B, 405B "
        "(Llama 3.1), 13B (Llama 2). In step 3, the critic and the reward model have the same shape.",
        aliases=["--model"],
    )
    step: str = flag("sft", "Step to plan.", choices=TASKS, aliases=["--task"])
    gpus: str = flag("8xh100", f"Number and type of GPUs, NUMBERxTYPE; TYPE is one of {', '.join(DEVICES)}.", "NxNAME")
    sequences_per_step: int = flag(
        512,
        "Sequences (step 2: prompts) per optimizer step across all ranks; in step 3 also the number of responses "
        "per rollout.",
        "1 <= sequences <= 1e9",
    )
    num_samples_per_prompt: int = flag_of(
        PromptSamplesArguments, "grpo, rloo: responses per prompt.", default=8, aliases=()
    )
    max_prompt_seq_len: int = flag_of(
        RowArguments, "Maximum prompt length; a sequence is a prompt plus its response.", default=1024
    )
    max_answer_seq_len: int = flag_of(
        SamplingArguments, "Longest response.", name="max_new_tokens", default=1024, aliases=()
    )
    host_memory_gb: float = flag(
        250.0, "Host memory per rank, in GB (1e9 bytes); default: an eighth of a node's 2 TB.", "0 < gigabytes <= 1e9"
    )
    price_per_hour: float | None = flag_of(DryRunArguments, "Price per GPU-hour, in any currency.")
    max_train_steps: int = flag_of(EngineArguments, "Number of steps (step 3: rollouts) in the run.", default=1000)
    data_path: list[str] = flag_of(SourceArguments, "Dataset named in the YAML file; default: embedded.")
    output_dir: str = flag_of(
        RunArguments, f"Folder for {FILE} and the config.json of the chosen size.", default="runs/plan"
    )
    curve: bool = flag(True, "Also plan for 1 to 4,096 GPUs.")

    @property
    def estimator(self) -> dict[str, str]:
        """The setting that --step grpo or rloo stands for."""
        flags = CORE_COMMANDS[self.step].flags
        return {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(
            bool(self.model_name_or_path),
            "--model_name_or_path expects a folder with a config.json or a size such as 70B, got nothing",
        )
        number, _, name = self.gpus.partition("x")
        mistakes.require(
            re.fullmatch("[0-9]{1,7}", number) is not None and int(number) > 0 and name in DEVICES,
            f"--gpus expects NUMBERxNAME, such as 32xh100, got '{self.gpus:.40}'; valid names are "
            f"{', '.join(DEVICES)}{nearest_names(name[:40], DEVICES) if name not in DEVICES else ''}, and numbers "
            "have at most 7 digits",
        )


GROUPS = (PlanArguments, FailureArguments)


def main(argv: Sequence[str]) -> None:
    """Parse, search, print, write."""
    flags, failing = parse_arguments(GROUPS, argv, __doc__ or "")
    make_output_dir(flags.output_dir)
    from threestep.plugins.plan.curve import GPUS, points
    from threestep.plugins.plan.dry_run.estimate import kept_counts
    from threestep.plugins.plan.failures import WholeRun, losses
    from threestep.plugins.plan.search import best_of
    from threestep.plugins.plan.text import Terms, as_yaml, best_lines, curve_lines, losses_line

    step = next(step for step in known_steps().values() if step.program == CORE_COMMANDS[flags.step].module)
    counts = kept_counts()
    wanted = wanted_of(flags, step, counts)
    find = partial(_found, step, counts)
    tried = find(wanted)
    best = best_of(tried, wanted)
    is_rollout = wanted.drawn is not None
    terms = Terms(wanted.device, "rollout" if is_rollout else "step", flags.max_train_steps, flags.price_per_hour)
    fitting = sum(one.parts is not None for one in tried)
    print(
        f"{flags.step} of {flags.model_name_or_path} on {wanted.ranks} x {wanted.device}, {wanted.sequences:,} "
        f"sequences of {sum(wanted.tokens):,} tokens per {terms.unit}: {len(tried):,} settings tried, {fitting:,} "
        "fit"
    )
    print("\n".join(best_lines(best, tried, wanted.ranks, terms)))
    size = saved_bytes(wanted.common[next(iter(step.inputs))], counts, 2 if is_rollout else 1)

    def lost(ranks: int, seconds: float) -> Losses:
        return losses(WholeRun(flags.max_train_steps, seconds, ranks, size), failing.reliability)

    of_best = lost(wanted.ranks, best[0].seconds)
    print(losses_line(of_best, terms, best[0].seconds, wanted.ranks))
    saving = {"save_every": of_best.every} if of_best.every < flags.max_train_steps else {}
    chosen = best[0]._replace(settings={**best[0].settings, **saving})
    path = Path(flags.output_dir) / FILE
    path.write_text(as_yaml(chosen, f"threestep {flags.step} --config {path} --num_ranks {wanted.ranks}"), "utf-8")
    note(f"written: {path}")
    if flags.curve:
        print("\n".join(curve_lines(points(wanted, GPUS, find, lost), terms)))


def wanted_of(flags: PlanArguments, step: Step, counts: ModelCounts) -> Wanted:
    """Return the run that the flags ask for. Writes the folder of a public shape."""
    from threestep.plugins.plan.choices import Wanted
    from threestep.plugins.plan.shapes import shape_of, write_shape

    shape, model = shape_of(flags.model_name_or_path), flags.model_name_or_path
    if shape is not None:
        model = str(Path(flags.output_dir) / "model")
        write_shape(shape, Path(model))
    check_model_folder(model)
    number, _, device = flags.gpus.partition("x")
    folder = str(Path(flags.output_dir) / flags.step)
    wanted = Wanted(
        device,
        int(number),
        flags.sequences_per_step,
        (flags.max_prompt_seq_len, flags.max_answer_seq_len),
        int(DEVICES[device].memory_gb * 1e9),
        int(flags.host_memory_gb * 1e9),
        {
            "output_dir": folder,
            **dict.fromkeys(step.inputs, model),
            "data_path": flags.data_path or ["embedded"],
            **flags.estimator,
        },
    )
    samples = flags.num_samples_per_prompt if flags.estimator else 1
    return _with_drawing(wanted, model, counts, samples) if len(step.inputs) > 1 else wanted


def saved_bytes(model: str, counts: ModelCounts, trains: int) -> float:
    """Bytes of a checkpoint of so many models of one shape."""
    import torch

    from threestep.plugins.plan.failures import SAVED_BYTES
    from training.utils.models.settings import ModelSettings

    built = counts.model(ModelSettings(model), torch.bfloat16)
    return SAVED_BYTES * trains * sum(part.numel() for part in built.parameters())


def _with_drawing(wanted: Wanted, model: str, counts: ModelCounts, samples: int) -> Wanted:
    """Add the load of a rank's rollout engine."""
    import torch

    from threestep.plugins.plan.drawing_flags import EngineLoad
    from threestep.plugins.plan.dry_run.activations import cache_bytes
    from training.utils.models.settings import ModelSettings

    actor = counts.model(ModelSettings(model), torch.bfloat16)
    weights = 2 * sum(part.numel() for part in actor.parameters())
    cache = cache_bytes(actor.config, 1, sum(wanted.tokens), 2)
    heads = actor.config.num_attention_heads
    return replace(wanted, drawn=EngineLoad(weights, cache, wanted.sequences, wanted.gpu_bytes, heads, samples))


def _found(step: Step, counts: ModelCounts, wanted: Wanted) -> list[Any]:
    from threestep.plugins.plan.search import search

    return search(wanted, partial(estimate, step, counts, wanted))


def estimate(step: Step, counts: ModelCounts, wanted: Wanted, settings: Settings) -> Estimate:
    """Return the estimate of the step's own dry run with `settings` on the wanted GPUs."""
    return estimate_of(step, counts, {**settings, "device": wanted.device, "num_ranks": wanted.ranks})


def estimate_of(step: Step, counts: ModelCounts, settings: Settings) -> Estimate:
    """Return the estimate of the step's own dry run with `settings`."""
    from threestep.plugins.plan.dry_run.steps import estimated

    program: Any = importlib.import_module(step.program)
    words = [word for name, value in {**settings, "dry_run": True}.items() for word in words_of(name, value)]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        return estimated(program.main.checked(words), counts)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
