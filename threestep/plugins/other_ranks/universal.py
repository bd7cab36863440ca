"""A checkpoint of another number of ranks or ZeRO stage, converted by DeepSpeed's universal checkpoint and loaded.

A universal checkpoint has whole float32 tensors, `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt` for each trained weight. The
names are DeepSpeed's, the files those of `engine.checkpoint_files`: nothing is pickled.
DeepSpeed's converter (deepspeed.checkpoint.ds_to_universal) and loaders support stages 1 to 3, to the same stage on
another number of ranks. The rest is done here (deepspeed 0.19):

- stage 3 before its first step: the converter looks for moments that are not there yet;
- stage 0: neither side handles its optimizer (engine.load_checkpoint ends in optimizer.update_lp_params);
- stages 1 and 2 to 3 and back: tensors, `optimizer_state.pt` and file names differ in form;
- stage 3 loads the first parameter group's learning rate and weight decay into all groups, and one step counter, which
  all of them then count up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import seed_everything
from training.utils.checkpoints.parts import saved_shares
from training.utils.engine.checkpoint_files import (
    SHARD_FILE,
    WHOLE_FILE,
    file_of,
    for_deepspeed,
    joined_shards,
    load_engine,
    read_state,
    set_rates,
    write_state,
)
from training.utils.engine.config.arguments import ADAMW
from training.utils.engine.ranks.collectives import barrier, on_main
from training.utils.models.weights import whole_shape

if TYPE_CHECKING:
    from training.utils.checkpoints.parts import CheckpointParts
    from training.utils.engine.training_engine import TrainingEngine

_STATES = ("exp_avg", "exp_avg_sq")
_MODEL_FILES = (WHOLE_FILE, SHARD_FILE)


def load_converted(parts: CheckpointParts, folder: Path, converted: Path, *, saved_ranks: int, seed: int) -> None:
    """Load the files of `saved_ranks` ranks, with any ZeRO stages. converted: a folder to use meanwhile. A collective.

    With the same number of ranks the generators continue; otherwise each starts anew from `seed` and its rank.
    """
    ranks = parts.ranks

    def convert_all() -> None:
        shutil.rmtree(converted, ignore_errors=True)
        for name, engine in parts.engines.items():
            convert(folder / name, converted / name, engine)

    on_main(convert_all, ranks.is_main, patient=True)
    for name, engine in parts.engines.items():
        load(engine, converted, name)
    for each in parts.others:
        each.load_whole([saved_shares(folder, each.name, rank) for rank in range(saved_ranks)])
    if saved_ranks == ranks.world_size:
        parts.load_random(folder)
    else:
        seed_everything(seed, ranks.rank)
    barrier()
    if ranks.is_main:
        shutil.rmtree(converted, ignore_errors=True)


def convert(source: Path, target: Path, engine: TrainingEngine) -> None:
    """Write the universal checkpoint of `source`, DeepSpeed's folder of the same model from any number of ranks and any
    stage, into the new folder `target`, on one rank. ThreestepError for another optimizer than AdamW."""
    name = engine.settings.optimizer
    if name != ADAMW:
        raise ThreestepError(
            f"--resume: {source} holds the state of --optimizer {name}, which can only resume with the checkpoint's "
            "own number of ranks and ZeRO stage; use those"
        )
    try:
        target.mkdir(parents=True)
        if file_of(source / SHARD_FILE).exists() and not _holds_moments(source):
            _convert_untouched(source, target, engine)
        elif list(source.glob("*_optim_states.*")):
            _convert_shards(source, target)
        else:
            _convert_whole(source, target, engine)
        _write_common(source, target, engine)
    except OSError as problem:
        raise ThreestepError(
            f"--resume: cannot convert {source} into {target} for another number of ranks or ZeRO stage: "
            f"{problem.filename or 'the disk'}: {problem.strerror}; free disk space, or resume with the checkpoint's "
            "own number of ranks and ZeRO stage"
        ) from problem
    except (KeyError, IndexError, RuntimeError, AssertionError, ValueError, NotImplementedError) as problem:
        raise ThreestepError(
            f"--resume: cannot convert DeepSpeed's files in {source} for another number of ranks or ZeRO stage "
            f"({type(problem).__name__}: {problem}); resume with the checkpoint's own number of ranks and ZeRO stage"
        ) from problem


def load(engine: TrainingEngine, folder: Path, name: str) -> None:
    """Load the state that `convert` wrote into folder/name. A collective."""
    if engine.settings.zero_stage == 0:
        _load_whole(engine, folder / name)
    else:
        engine.engine._config.load_universal_checkpoint = True  # in DeepSpeed a setting of the whole run
        try:
            load_engine(engine.engine, folder, name)
        finally:
            engine.engine._config.load_universal_checkpoint = False
    for weight, state in _adam(engine).state.items():  # stage 3 shares one tensor, which each would count up
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(weight.device, copy=True)
    # The loaders restore no learning rate, or the first group's for all groups.
    for group, rate in zip(_adam(engine).param_groups, engine.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _convert_whole(source: Path, target: Path, engine: TrainingEngine) -> None:
    """Convert from stage 0, whose optimizer's state is numbered in the order of its groups."""
    content = read_state(file_of(source / WHOLE_FILE))
    optimizer, weights = content["optimizer"], content["module"]
    names = [name for group in engine.parameter_groups for name in group]
    masters = {name: weights[name].float() for name in names}
    if "fp32_groups" in optimizer:  # half precision
        masters = dict(zip(names, (part for group in optimizer["fp32_groups"] for part in group), strict=True))
        optimizer = optimizer["optimizer_state_dict"]
    for number, name in enumerate(names):
        state = optimizer["state"].get(number, {})  # none before the first step
        folder = target / "zero" / name
        folder.mkdir(parents=True)
        write_state({"param": masters[name].detach()}, folder / "fp32.pt")
        for key in _STATES:
            write_state({"param": state.get(key, torch.zeros_like(masters[name]))}, folder / f"{key}.pt")
        write_state(state.get("step", torch.tensor(0.0)), folder / "step.pt")


def _convert_shards(source: Path, target: Path) -> None:
    """Convert from ZeRO stages 1 to 3."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder="",
        output_folder=str(target),
        num_extract_workers=1,  # more would be forked from a process that has threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with for_deepspeed(source) as options.input_folder:
        ds_to_universal.main(options)


def _holds_moments(folder: Path) -> bool:
    """True if the shards in `folder` hold Adam's counts and averages: not before its first step."""
    shard = read_state(min(folder.glob("*_optim_states.*")), mapped=True)["optimizer_state_dict"]
    return bool(shard["optimizer_state_dict"]["state"])


def _convert_untouched(source: Path, target: Path, engine: TrainingEngine) -> None:
    """Convert from stage 3 before the optimizer's first step (an actor whose critic warms up): DeepSpeed's converter
    wants moments, which `_write_common` makes."""
    weights = joined_shards(source)
    for name in (name for group in engine.parameter_groups for name in group):
        folder = target / "zero" / name
        folder.mkdir(parents=True)
        write_state({"param": weights[name]}, folder / "fp32.pt")


def _write_common(source: Path, target: Path, engine: TrainingEngine) -> None:
    """Write the values that all stages' loaders read besides the tensors. Groups stay empty: an engine has its own."""
    path = target / "zero" / "optimizer_state.pt"
    saved = read_state(path) if path.exists() else {}
    inner = saved.get("optimizer_state_dict", {}).get("state") or {0: {}}
    steps = [*target.glob("zero/**/step.pt")]
    step = read_state(steps[0]) if steps else inner[0].get("step", torch.tensor(0.0))
    weights: dict[str, Any] = dict(engine.module.named_parameters())
    for name in (name for group in engine.parameter_groups for name in group):
        folder = target / "zero" / name
        write_state(step, folder / "step.pt")
        for key in ("fp32", *_STATES):
            _complete(folder, key, whole_shape(weights[name]))
    scaling = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    common = {
        **{key: saved[key] for key in scaling if key in saved},
        "ds_version": importlib.metadata.version("deepspeed"),
        "param_groups": [{} for _ in engine.parameter_groups],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{"params": []}]},
    }
    write_state(common, path)
    (file,) = [path for name in _MODEL_FILES if (path := file_of(source / name)).exists()]
    content = {key: value for key, value in read_state(file).items() if key not in ("module", "optimizer")}
    for name in _MODEL_FILES:
        write_state({**content, "module": {}}, target / name)


def _complete(folder: Path, key: str, shape: torch.Size) -> None:
    """Bring a weight's file into the form that stages 1 and 2 read: stage 3 writes a bare flat tensor, or none before
    the optimizer's first step."""
    path = folder / f"{key}.pt"
    if key == "fp32" and not path.exists():
        raise KeyError(folder.name)
    content = read_state(path) if path.exists() else torch.zeros(shape)
    if isinstance(content, torch.Tensor):
        write_state({"param": content.detach().float().reshape(shape)}, path)


def _load_whole(engine: TrainingEngine, folder: Path) -> None:
    inner, adam = engine.engine, _adam(engine)
    weights = dict(engine.module.named_parameters())
    for names, group in zip(engine.parameter_groups, adam.param_groups, strict=True):
        for name, master in zip(names, group["params"], strict=True):
            tensors = {key: read_state(folder / "zero" / name / f"{key}.pt")["param"] for key in ("fp32", *_STATES)}
            master.data.copy_(tensors["fp32"].view_as(master))
            weights[name].data.copy_(master.data)
            adam.state[master] = {key: tensors[key].view_as(master).to(master.device) for key in _STATES}
            adam.state[master]["step"] = read_state(folder / "zero" / name / "step.pt")
    content = read_state(folder / WHOLE_FILE)
    engine.scheduler.load_state_dict(content["lr_scheduler"])
    set_rates(engine.scheduler)
    inner.global_steps, inner.skipped_steps = content["global_steps"], content["skipped_steps"]
    inner.global_samples = content.get("global_samples", 0)


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """The optimizer itself, inside DeepSpeed's wrapper if it has one."""
    return getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer)
