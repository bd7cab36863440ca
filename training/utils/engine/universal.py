"""One engine's state between numbers of ranks and ZeRO stages: DeepSpeed's universal checkpoint, completed.

A universal checkpoint has whole float32 tensors, `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt` for each trained weight.
DeepSpeed's own converter (deepspeed.checkpoint.ds_to_universal) and loaders go from stages 1 to 3 to the same stage on
another number of ranks. What they lack is done here (deepspeed 0.19):

- stage 0, whose optimizer has no part in it on either side (engine.load_checkpoint ends in optimizer.update_lp_params);
- from stages 1 and 2 to 3 and back: each side has tensors and `optimizer_state.pt` of another form, and other file
  names;
- stage 3 takes the first parameter group's learning rate and weight decay for all of them, and one counter of steps,
  which each of them then counts up.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from training.utils.engine.training_engine import TrainingEngine
from training.utils.run.errors import ThreestepError

_STATES = ("exp_avg", "exp_avg_sq")
# What the engine keeps beside weights and optimizer, in the file of each stage's name.
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def convert(source: Path, target: Path, engine: TrainingEngine) -> None:
    """Write the universal checkpoint of `source`, a folder that DeepSpeed wrote of the same model on any ranks and
    stage, into the folder `target`. On one rank; the files are pickles, so only for a run's own folder."""
    try:
        target.mkdir(parents=True)
        if list(source.glob("*_optim_states.pt")):
            _convert_sharded(source, target)
        else:
            _convert_whole(source, target, engine)
        _write_common(source, target, engine)
    except OSError as problem:
        raise ThreestepError(
            f"--resume: {source} is to be converted for another number of ranks or ZeRO stage into {target}, and "
            f"{problem.filename or 'the disk'} refuses ({problem.strerror}); make room, or go on with those that it "
            "was written with"
        ) from problem
    except (KeyError, IndexError, RuntimeError, AssertionError, ValueError, NotImplementedError) as problem:
        raise ThreestepError(
            f"--resume: DeepSpeed's files in {source} cannot be converted for another number of ranks or ZeRO stage "
            f"({type(problem).__name__}: {problem}); go on with those that the checkpoint was written with"
        ) from problem


def load(engine: TrainingEngine, folder: Path, name: str) -> None:
    """Take up what `convert` wrote into folder/name. A collective."""
    if engine.settings.zero_stage == 0:
        _load_whole(engine, folder / name)
    else:
        _load_sharded(engine, folder, name)
    for weight, state in _adam(engine).state.items():  # stage 3 gives all one tensor, in which each would count
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(weight.device, copy=True)
    # The loaders bring no learning rate, or the first group's for all.
    for group, rate in zip(_adam(engine).param_groups, engine.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _convert_sharded(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    asked = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more would be forked from a process that has threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        ds_to_universal.main(asked)


def _convert_whole(source: Path, target: Path, engine: TrainingEngine) -> None:
    """From stage 0, where the optimizer's state is numbered in the order of its groups."""
    content = _read(source / _MODEL_FILES[0])
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
        torch.save({"param": masters[name].detach()}, folder / "fp32.pt")
        for key in _STATES:
            torch.save({"param": state.get(key, torch.zeros_like(masters[name]))}, folder / f"{key}.pt")
        torch.save(state.get("step", torch.tensor(0.0)), folder / "step.pt")


def _write_common(source: Path, target: Path, engine: TrainingEngine) -> None:
    """What the loaders of all stages read beside the tensors; in the groups nothing, so that each engine's stay."""
    path = target / "zero" / "optimizer_state.pt"
    saved = _read(path) if path.exists() else {}
    inner = saved.get("optimizer_state_dict", {}).get("state") or {0: {}}
    steps = [*target.glob("zero/**/step.pt")]
    step = _read(steps[0]) if steps else inner[0].get("step", torch.tensor(0.0))
    weights: dict[str, Any] = dict(engine.module.named_parameters())
    for name in (name for group in engine.parameter_groups for name in group):
        folder = target / "zero" / name
        torch.save(step, folder / "step.pt")
        for key in ("fp32", *_STATES):
            _complete(folder, key, getattr(weights[name], "ds_shape", weights[name].shape))
    import deepspeed

    kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    common = {
        **{key: saved[key] for key in kept if key in saved},
        "ds_version": deepspeed.__version__,
        "param_groups": [{} for _ in engine.parameter_groups],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{"params": []}]},
    }
    torch.save(common, path)
    (file,) = [source / name for name in _MODEL_FILES if (source / name).exists()]
    content = {key: value for key, value in _read(file).items() if key not in ("module", "optimizer")}
    for name in _MODEL_FILES:
        torch.save({**content, "module": {}}, target / name)


def _complete(folder: Path, key: str, shape: torch.Size) -> None:
    """Bring a weight's file into the form that stages 1 and 2 read: from stage 3 it is a bare flat tensor, and missing
    where the optimizer has not stepped yet."""
    path = folder / f"{key}.pt"
    if key == "fp32" and not path.exists():
        raise KeyError(folder.name)
    content = _read(path) if path.exists() else torch.zeros(shape)
    if isinstance(content, torch.Tensor):
        torch.save({"param": content.detach().float().reshape(shape)}, path)


def _load_sharded(engine: TrainingEngine, folder: Path, name: str) -> None:
    inner = engine.engine
    inner._config.load_universal_checkpoint = True  # otherwise a setting of the whole run
    try:
        loaded, _ = inner.load_checkpoint(str(folder), tag=name)
    finally:
        inner._config.load_universal_checkpoint = False
    if loaded is None:
        raise ThreestepError(f"--resume: DeepSpeed finds no state of '{name}' in {folder}")


def _load_whole(engine: TrainingEngine, folder: Path) -> None:
    inner, adam = engine.engine, _adam(engine)
    weights = dict(engine.module.named_parameters())
    for names, group in zip(engine.parameter_groups, adam.param_groups, strict=True):
        for name, master in zip(names, group["params"], strict=True):
            tensors = {key: _read(folder / "zero" / name / f"{key}.pt")["param"] for key in ("fp32", *_STATES)}
            master.data.copy_(tensors["fp32"].view_as(master))
            weights[name].data.copy_(master.data)
            adam.state[master] = {key: tensors[key].view_as(master).to(master.device) for key in _STATES}
            adam.state[master]["step"] = _read(folder / "zero" / name / "step.pt")
    content = _read(folder / _MODEL_FILES[0])
    engine.scheduler.load_state_dict(content["lr_scheduler"])
    inner.global_steps, inner.skipped_steps = content["global_steps"], content["skipped_steps"]
    inner.global_samples = content.get("global_samples", 0)


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """The optimizer inside DeepSpeed's wrapper of it, where there is one."""
    return getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer)


def _read(path: Path) -> Any:
    """One of DeepSpeed's files, by the loader that runs no code; the classes of its that stand in them are known."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location="cpu", weights_only=True)
