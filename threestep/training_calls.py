"""The training steps as Python functions: they take a model, rows and settings, and return a result.

    result = threestep.sft("Qwen/Qwen3-0.6B-Base", [{"prompt": "2 + 2 =", "completion": " 4"}, ...])

Settings are the flags of `threestep sft --help`, with the same names, defaults and errors. Calls can be repeated in one
process or notebook.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threestep.inputs import address_of_rows, with_addresses
from threestep.mistakes import mistakes_in_python
from threestep.new_models import new_model
from threestep.process_state import silent_bars
from threestep.result import Result, result_of
from threestep.row_forms import is_in_memory
from threestep.running import flags_of, run_here, run_on_ranks
from training.utils.base.console import WARNINGS
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import whole_split
from training.utils.flags.step import known_steps
from training.utils.plugins.registry import check_plugin, plugin_module

_GIVEN_FOLDER = "given"
_RUNS = "runs"
_EVALUATE, _PAIRS = (f"threestep.plugins.evaluation.{name}" for name in ("evaluate", "reward_evaluation.__main__"))


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that all steps have."""

    rows: Any
    eval_rows: Any
    num_ranks: int | None
    peft_config: Any
    settings: Mapping[str, Any]


@mistakes_in_python
def sft(
    model: Any,
    rows: Any,
    *,
    eval_rows: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    num_ranks: int | None = None,
    **settings: Any,
) -> Result:
    """Fine-tune on the chosen responses of `rows`.

    model: a folder, a hub name, the result of an earlier call, or a loaded transformers model, which is saved to a
        folder and trained from there. Frozen weights stay frozen. The object itself is not changed
    rows: a list or an iterable of dicts, a datasets.Dataset or DatasetDict, or a pandas or polars DataFrame, all of
        whose rows train in this step; or a path or an address, as in --data_path, whose rows --data_split divides.
        Columns: docs/data.md
    eval_rows: held-out rows in one of these forms, for evaluation; default: a share of `rows` (eval_fraction)
    tokenizer: the tokenizer of a loaded model
    peft_config: a peft.LoraConfig, instead of lora_dim and related settings
    num_ranks: processes to launch on this machine; None and 1 train in this process
    settings: flags, e.g. learning_rate=1e-5, max_train_steps=100. run_name names the run and its folder; default: a new
        folder in runs/. callback: a function (step, figures), called with each step's figures; if it returns "stop",
        training ends after that step and the model is saved; if it returns a dict, those figures are recorded too

    Raises ThreestepError for a mistake in the settings or the data, and if the run is stopped.
    """
    call = _Call(rows, eval_rows, num_ranks, peft_config, settings)
    return _trained("sft", {"model_name_or_path": (model, tokenizer)}, call)


@mistakes_in_python
def reward(
    model: Any,
    rows: Any,
    *,
    eval_rows: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    num_ranks: int | None = None,
    **settings: Any,
) -> Result:
    """Train a reward model on pairs of responses. Takes the arguments of `sft`."""
    call = _Call(rows, eval_rows, num_ranks, peft_config, settings)
    return _trained("reward", {"model_name_or_path": (model, tokenizer)}, call)


@mistakes_in_python
def dpo(
    model: Any,
    rows: Any,
    *,
    eval_rows: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    num_ranks: int | None = None,
    **settings: Any,
) -> Result:
    """Train the policy itself on pairs of responses. Takes the arguments of `sft`."""
    call = _Call(rows, eval_rows, num_ranks, peft_config, settings)
    return _trained("dpo", {"model_name_or_path": (model, tokenizer)}, call)


@mistakes_in_python
def ppo(
    model: Any,
    rows: Any,
    *,
    reward_model: Any = None,
    eval_rows: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    num_ranks: int | None = None,
    **settings: Any,
) -> Result:
    """Train the policy on prompts with PPO, GRPO or another estimator (`advantage`).

    reward_model: the model that `reward` uses, loaded or as a path; the critic also starts from it
        (--critic_model_name_or_path)
    peft_config: for the actor
    settings: those of `sft`. reward: a function fn(prompts, responses, **columns) that returns one number per response,
        or TRL's fn(completions, **columns); a value of --reward; a list of these; or a dict of weights. TRL's
        reward_funcs and reward_weights do the same. Other settings
        that name a function (checker, advantage, policy_loss, ...) also accept the function itself.

    Other arguments are those of `sft`; a loaded reward model uses the same tokenizer.
    """
    models = {"actor_model_name_or_path": (model, tokenizer)}
    if reward_model is not None:
        is_path = isinstance(reward_model, (str, os.PathLike))
        models["critic_model_name_or_path"] = (reward_model, None if is_path else tokenizer)
    return _trained("ppo", models, _Call(rows, eval_rows, num_ranks, peft_config, settings))


@mistakes_in_python
def grpo(model: Any, rows: Any, **settings: Any) -> Result:
    """Train the policy with GRPO: `ppo` with advantage="grpo". Takes the other arguments of `ppo`."""
    return replace(ppo(model, rows, **{"advantage": "grpo", "run_name": "grpo", **settings}), kind="grpo")


@mistakes_in_python
def rloo(model: Any, rows: Any, **settings: Any) -> Result:
    """Train the policy with RLOO: `ppo` with advantage="rloo". Takes the other arguments of `ppo`."""
    return replace(ppo(model, rows, **{"advantage": "rloo", "run_name": "rloo", **settings}), kind="rloo")


@mistakes_in_python
def evaluate(task: str, model: Any, rows: Any, *, tokenizer: Any = None, **settings: Any) -> dict[str, Any]:
    """Evaluate a model as `threestep evaluate TASK` does; needs the plugin `evaluation`. Return the figures by name.

    task: win_rate, reward, gsm8k, perplexity, pairs or reward_model
    model, rows, tokenizer: as in `sft`; all rows in memory are evaluated
    settings: flags of `threestep evaluate --help all`, e.g. baseline, reward_model, max_new_tokens; reward: as in `ppo`
    """
    check_plugin("evaluation", "evaluate")
    program, figures = (_PAIRS, "evaluation") if task == "pairs" else (_EVALUATE, task)
    plain, functions = with_addresses(settings, on_ranks=False)
    with _run_folder(f"evaluate_{task}", plain.pop("output_dir", None)) as folder:
        given = folder / _GIVEN_FOLDER
        with silent_bars():
            flags = _models_as_flags({"model_name_or_path": (model, tokenizer)}, given, resumes=False)
            flags["data_path"] = address_of_rows(rows, given)
        if is_in_memory(rows):
            flags |= {"split": "train", "eval_fraction": 0.0}
        words = flags_of({**flags, **plain, "output_dir": str(folder)})
        run_here(program, words if program == _PAIRS else [task, *words], functions, folder)
    return dict(json.loads((folder / f"{figures}.json").read_text(encoding="utf-8")))


def _trained(kind: str, models: Mapping[str, tuple[Any, Any]], call: _Call) -> Result:
    WARNINGS.clear()  # those of an earlier call that failed
    step = next(step for step in known_steps().values() if step.kind == kind)
    rows, num_ranks = call.rows, call.num_ranks
    on_ranks = _check(num_ranks, models, call.settings, in_memory=is_in_memory(rows))
    plain, functions = with_addresses(call.settings, on_ranks)
    if call.peft_config is not None:
        check_plugin("lora", "peft_config")
        plain |= plugin_module("lora", "peft_settings").flags_of_adapters(call.peft_config, kind, plain)
    with _run_folder(plain.get("run_name") or kind, plain.pop("output_dir", None)) as folder:
        given = folder / _GIVEN_FOLDER
        resumes = _resumes(folder, plain)
        with silent_bars():
            flags = _models_as_flags(models, given, resumes)
            flags["data_path"] = address_of_rows(rows, given, resumes, eval_rows=call.eval_rows)
        if is_in_memory(rows):
            flags["data_split"] = whole_split(int(step.number))
        words = flags_of({**flags, **plain, "output_dir": str(folder)})
        with contextlib.suppress(FileNotFoundError):  # an earlier run's figures are not this run's
            (folder / "summary.json").unlink()
        if on_ranks:
            run_on_ranks(kind, words, num_ranks or 1, folder)
        else:
            run_here(step.program, words, functions, folder)
    return result_of(kind, folder)


def _models_as_flags(models: Mapping[str, tuple[Any, Any]], given: Path, resumes: bool) -> dict[str, Any]:
    """The models' paths by flag; loaded ones are written to `given`."""
    flags: dict[str, Any] = {}
    for name, (model, tokenizer) in models.items():
        if isinstance(model, (str, os.PathLike)):
            if tokenizer is not None:
                raise ThreestepError(
                    f"tokenizer is only for a loaded model, but --{name} is '{model}', which has its own tokenizer; "
                    "remove tokenizer"
                )
            flags[name] = os.fspath(model)
            continue
        from threestep.given_models import folder_of_model

        flags[name] = folder_of_model(model, tokenizer, given, name, resumes=resumes)
    return flags


def _resumes(folder: Path, settings: Mapping[str, Any]) -> bool:
    """True if the call resumes a run that has checkpoints. ThreestepError if it would overwrite a run."""
    from training.utils.checkpoints.arguments import CheckpointArguments
    from training.utils.checkpoints.folder import CheckpointFolder
    from training.utils.checkpoints.other_runs import check_earlier_run

    resume = settings.get("resume")
    wanted = CheckpointArguments(resume=None if resume in (None, False) else str(resume)).resume is not None
    if not settings.get("overwrite"):
        check_earlier_run(CheckpointFolder(folder), resumes=wanted)
    return wanted and bool(CheckpointFolder(folder).steps())


def _check(
    num_ranks: int | None, models: Mapping[str, tuple[Any, Any]], settings: Mapping[str, Any], in_memory: bool
) -> bool:
    """Raise ThreestepError for mistakes in the call itself; return whether ranks are launched."""
    mistakes = Mistakes()
    is_count = num_ranks is None or (isinstance(num_ranks, int) and not isinstance(num_ranks, bool) and num_ranks > 0)
    mistakes.require(is_count, f"num_ranks expects a positive whole number, got {num_ranks!r}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun, ...: this process is one of its ranks
        loaded = in_memory or any(not isinstance(model, (str, os.PathLike)) for model, _ in models.values())
        mistakes.require(
            num_ranks is None and not loaded and "output_dir" in settings,
            "a call under a launcher such as torchrun expects an output_dir, paths for the model and rows, and no "
            "num_ranks; pass these, or start a single process with num_ranks",
        )
    mistakes.raise_if_any()
    return num_ranks is not None and num_ranks > 1


def _folder_of(name: Any, given: Any) -> tuple[Path, bool]:
    """The run's folder, and whether it was made here: runs/NAME, runs/NAME_2, ... by default."""
    if given is not None:
        folder = Path(given).expanduser().absolute()
        return folder, not folder.exists()
    name = str(name)
    if name.strip() in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        raise ThreestepError(f"run_name expects a valid folder name, got '{name}'; use another, or set output_dir")
    number = 1
    while True:
        folder = Path(_RUNS, name if number == 1 else f"{name}_{number}").absolute()
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError:
            number += 1


@contextlib.contextmanager
def _run_folder(name: Any, given: Any) -> Iterator[Path]:
    """The folder of a call (see `_folder_of`). It is removed if it is new and the call fails before its run starts."""
    folder, is_new = _folder_of(name, given)
    try:
        yield folder
    except BaseException:
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {_GIVEN_FOLDER}:
            shutil.rmtree(folder)
        raise


__all__ = ["Result", "ThreestepError", "dpo", "evaluate", "grpo", "new_model", "ppo", "reward", "rloo", "sft"]
