"""Run setup shared by all steps: run folder, seeds, step counts, loading under ZeRO."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import training
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import seed_everything
from training.utils.contracts.run import ObservedRun, StepObservers
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.collectives import largest, on_main
from training.utils.engine.ranks.devices import device_sentence, free_bytes, make_deterministic
from training.utils.engine.ranks.matmul_rate import peak_of_all_ranks
from training.utils.engine.ranks.startup import DTYPES, Ranks, born_sharded, check_dtype
from training.utils.layout.order import steps_in
from training.utils.loading.configurations import load_config
from training.utils.loading.models import check_no_dropout
from training.utils.models.attention.attention import text_attention
from training.utils.models.attention.kernels import kernel_of
from training.utils.models.flops import ComputeMeter, model_shape
from training.utils.models.saved.one_precision import to_one_precision
from training.utils.models.target_head import CHUNK_MB, chunk_mb_for
from training.utils.plugins.registry import hooks
from training.utils.run.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.checkpoints.plan import CheckpointPlan
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.config.arguments import EngineArguments, EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.settings import ModelSettings
    from training.utils.run.run_arguments import RunArguments


def open_step_observers(run: ObservedRun) -> StepObservers:
    """Return what looks at the optimizer steps of a run: the observers of plugins."""
    found = (open_observer(run) for open_observer in hooks("step_observer"))
    return StepObservers(observer for observer in found if observer is not None)


def start_run(run: RunArguments, settings: dict[str, Any], ranks: Ranks, chosen: Collection[str] = ()) -> RunFolder:
    """Make the run's folder, write every setting to it (`--config` reads the file back) and what it runs on, seed this
    rank, and say on what it runs. chosen: as of `write_settings`"""
    on_main(lambda: [at_start(settings) for at_start in hooks("at_start")], ranks.is_main)
    folder = RunFolder(run.output_dir, ranks.is_main)
    write_settings(folder, settings, ranks, chosen)
    seed_everything(run.seed, ranks.rank)
    if run.deterministic:
        make_deterministic(ranks.device, os.environ)
    device = device_sentence(ranks.device, ranks.world_size, run.deterministic, os.environ)
    log("; ".join((device, *ranks.backends.words)), ranks.is_main)
    if ranks.is_main:
        folder.write_json("environment.json", environment_of(device.partition("; ")[0]))
    return folder


def write_settings(folder: RunFolder, settings: dict[str, Any], ranks: Ranks, chosen: Collection[str]) -> None:
    """Write every setting to the run's folder; `--config` reads the file back. chosen: names of those that the flags
    left to the program, which a resumed run leaves to it again."""
    folder.write_config(settings, f"A run of {ranks.world_size} rank{'s' if ranks.world_size > 1 else ''}.", chosen)


def with_head_chunk(plan: CheckpointPlan, model: ModelSettings, dtype: str, ranks: Ranks) -> CheckpointPlan:
    """Return the plan with --head_chunk_mb decided: as given, as the resumed run has it, or by the rank with the least
    free memory. model: the one that is trained. A collective."""
    chunk_mb = model.head_chunk_mb or plan.began_with("head_chunk_mb")
    if not chunk_mb and ranks.device.type != "cuda":
        chunk_mb = CHUNK_MB
    elif not chunk_mb:
        vocabulary = load_config(model.name_or_path, model.trust_remote_code).get_text_config().vocab_size
        chunk_mb = chunk_mb_for(least_free_bytes(ranks), vocabulary, DTYPES[dtype])
        log(
            f"the output layer computes {chunk_mb} MiB of logits at a time, {chunk_mb * 2**18 // vocabulary:,} tokens: "
            f"chosen by the memory that is free; --head_chunk_mb {chunk_mb} gives the same bits elsewhere",
            ranks.is_main,
        )
    return plan.decided({"head_chunk_mb": chunk_mb})


def least_free_bytes(ranks: Ranks) -> int:
    """Return the memory that is free for the rank that has the least. A collective."""
    return -largest(-free_bytes(ranks.device, ranks.world_size, os.environ), ranks.device)


def whole_steps(engine: EngineArguments, rows: int, ranks: Ranks) -> tuple[int, int]:
    """Return (optimizer steps, sequences of each). Raises ThreestepError if the rows do not fill one."""
    assert engine.per_device_train_batch_size is not None, "chosen as the run was opened"
    sequences = engine.per_device_train_batch_size * ranks.groups * engine.gradient_accumulation_steps
    steps = steps_in(rows, engine.num_train_epochs, sequences)
    if steps == 0:
        dealt = ranks_in_words(ranks.world_size, ranks.sharing.size)
        raise ThreestepError(
            f"an optimizer step takes {sequences} sequences (--per_device_train_batch_size "
            f"{engine.per_device_train_batch_size} x {dealt} x --gradient_accumulation_steps "
            f"{engine.gradient_accumulation_steps}) and {engine.num_train_epochs:g} epochs of {rows} training rows do "
            "not fill one; lower the batch or add rows or epochs"
        )
    if engine.max_train_steps is not None:
        steps = min(steps, engine.max_train_steps)
    return steps, sequences


def ranks_in_words(ranks: int, sharing: int) -> str:
    """Among how many rows are dealt: ranks, or groups of `sharing` of them."""
    return f"{ranks} ranks" if sharing == 1 else f"{ranks // sharing} groups of {sharing} ranks"


def may_pack(
    padded: bool,
    model: Any,
    engine: TrainingEngine,
    read: Callable[[TokenRows], torch.Tensor],
    *,
    longest_tokens: int,
    log: Callable[..., None],
    sharing: bool = True,
    needs_segments: str | None = None,
) -> bool:
    """Check what `engine` reads from `model` against the model's own forward, and return whether documents may share
    rows: the user did not ask for padding, and the model can do it. ThreestepError if not even padded rows are right.

    sharing: the documents share prompts
    needs_segments: the flag that gives a document segments which do not see each other, padded or not; ThreestepError
        if the model cannot do that
    """
    from training.utils.models.layout_check import check_padded, check_segments, notes_on, why_not_packed

    name, device, was_training = type(model).__name__, engine.ranks.device, engine.module.training
    engine.eval()
    try:
        check_padded(model, read, device)
        reason = None
        if not padded or needs_segments is not None:
            sharing = sharing or needs_segments is not None
            reason = why_not_packed(model, read, longest_tokens, device, sharing=sharing)
    except ThreestepError as problem:
        if (together := engine.ranks.sharing).size == 1:
            raise
        raise ThreestepError(f"{together.flag} {together.size}: {problem}; one rank a row may do") from problem
    finally:
        engine.train(was_training)
    for note in notes_on(model):
        log(f"{name}: {note}", engine.ranks.is_main)
    check_segments(reason, needs_segments, name)
    if reason is not None:
        log(f"warning: {name} trains on padded rows: {reason}", engine.ranks.is_main)
    packs = reason is None and not padded
    if packs and device.type == "cuda" and engine.ranks.is_main:
        _time_attention(engine.module, model, lambda said: log(f"{name}: {said}"))
    return packs


def may_share(
    model: Any, engine: TrainingEngine, read: Callable[[TokenRows], torch.Tensor], longest_tokens: int
) -> bool:
    """Return whether `engine`, which may pack, reads documents that share their beginnings as the model's own forward
    does, and has no dropout, which would fall on all of them alike. A collective."""
    from training.utils.models.layout_check import why_not_packed

    was_training = engine.module.training
    engine.eval()
    try:
        if why_not_packed(model, read, longest_tokens, engine.ranks.device, sharing=True) is not None:
            return False
    finally:
        engine.train(was_training)
    return not differs_in_training(model, engine.ranks)


def differs_in_training(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Return whether the model computes something else in train mode, as with dropout, on any rank. Call it before the
    weights change. A collective."""
    try:
        check_no_dropout(model)
        differs = False
    except ThreestepError:
        differs = True
    return bool(largest(int(differs), ranks.device))


def _time_attention(reader: Any, model: Any, say: Callable[[str], None]) -> None:
    kernel = kernel_of(text_attention(model))
    if kernel is not None and getattr(reader, "model", None) is model:
        kernel.time_first_rows(reader, model, say)


def compute_meter(model: Any, ranks: Ranks) -> ComputeMeter:
    """Measure and log the matmul rate of this machine in the model's precision. A collective."""
    peak = peak_of_all_ranks(model.dtype, ranks)
    dtype = str(model.dtype).removeprefix("torch.")
    log(f"mfu: matmuls in {dtype} reach {peak / 1e12:.3g} TFLOP/s here; train/mfu is the share of it", ranks.is_main)
    return ComputeMeter(model_shape(model), peak)


def load_under(settings: EngineSettings, ranks: Ranks, load: Callable[[torch.dtype], Any]) -> Any:
    """Call `load(dtype)`: a ZeRO-3 model is born sharded, any other is moved to this rank's device."""
    dtype = check_dtype(settings.dtype)
    config = engine_config(settings, ranks.world_size, 1, ranks.device.type == "cuda")
    for line in settings.own_config.notes(config) if settings.own_config is not None else ():
        log(line, ranks.is_main)
    with born_sharded(config, settings.zero_stage):
        model = load(dtype)
    to_one_precision(model, dtype)
    return model if settings.zero_stage == 3 else model.to(ranks.device)


_PACKAGES = ("torch", "deepspeed", "transformers")


def environment_of(device: str) -> dict[str, Any]:
    """The content of environment.json. device: in words."""
    versions = {"threestep": training.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on the path without being installed
            continue
    started = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    commit = commit_of(Path(training.__file__).parents[1])
    code = {} if commit is None else {"commit": commit}
    return {"device": device, "started": started, "versions": versions, **code}


def commit_of(root: Path) -> str | None:
    """The commit of a checkout, with a `+` where files of it are changed; None for what is no checkout."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    words = "describe --always --abbrev=12 --exclude=* --dirty=+".split()
    command = [git, "--no-optional-locks", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # it refuses the folder
        return None
    return done.stdout.strip()
