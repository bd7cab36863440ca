"""Runs of the four programs on ranks that are forked from this process, which has imported everything once.

A start costs seconds of imports otherwise. Rank 0 tells through a pipe which part of a run it enters, so that a run can
be ended at a chosen moment. For programs in tests/ alone, which call `import_everything` before all else: torch and
its threads must not have worked in a process that forks.
"""

from __future__ import annotations

import os
import pkgutil
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.json_lines import write_lines
from training.utils.plugins.registry import plugins

os.environ.update(
    CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)  # fmt: skip

_STEP_3 = "ppo acting acting_mtp ahead acting_ahead free acting_free servers servers_free".split()
MODULES = {"sft": "step1_sft", "reward": "step2_reward", "dpo": "step2_dpo", **dict.fromkeys(_STEP_3, "step3_ppo")}
_LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Files:
    start: Path
    scorer: Path
    pairs: Path
    texts: Path
    environment: Path
    engine: Path


@dataclass(frozen=True)
class Moment:
    """When a run is ended: so many seconds after rank 0 entered `part` for the `count`-th time."""

    part: str
    count: int
    delay_seconds: float


@dataclass(frozen=True)
class Ended:
    """codes: of the ranks, a signal negative. hit: whether the moment came. parts: seconds of each that was left."""

    codes: tuple[int, ...]
    hit: bool
    parts: dict[str, list[float]]
    said: str


# Each answer comes after a time that no seed decides.
_ENVIRONMENT = """
import random
import time


class Late:
    def reset(self, row):
        self.left = 1 + sum(row["prompt"].encode()) % 4
        return row["messages"], None

    def step(self, message):
        time.sleep(random.SystemRandom().uniform(0.0, SECONDS))
        self.left -= 1
        number = sum(message.text.encode())
        answer = " ".join(["pear", "fig", "plum"][: 1 + number % 3])
        return [{"role": "user", "content": answer}], (number % 7) / 7, self.left == 0, {"letters": len(message.text)}

    def close(self):
        pass
"""

# A rollout engine whose rollouts take a time that no seed decides.
_ENGINE = """
import random
import time

from training.utils.generation.decoding.hf import TransformersRollout


class LateRollout(TransformersRollout):
    def roll_out(self, model, request):
        time.sleep(random.SystemRandom().uniform(0.0, SECONDS))
        return super().roll_out(model, request)
"""


def make_files(place: Path, rows: int = 240, delay_seconds: float = 0.0, heads: int = 2) -> Files:
    """A tiny model, a reward model of random weights, pairs and texts; an environment whose answers take up to so
    long, and an engine whose rollouts do. heads: of attention."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from tests.end_to_end.conftest import SENTENCES, pair_rows, save_scorer, save_start

    start = save_start(place / "start")
    if heads != 2:
        torch.manual_seed(1)
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64 // heads}
        LlamaForCausalLM(AutoConfig.from_pretrained(start, **shape)).save_pretrained(start)
    pairs = write_lines(place / "pairs.jsonl", pair_rows(rows))
    texts = write_lines(place / "texts.jsonl", [{"text": sentence * 3} for sentence in SENTENCES])
    environment, engine = place / "late.py", place / "late_engine.py"
    environment.write_text(f"SECONDS = {delay_seconds}\n{_ENVIRONMENT}")
    engine.write_text(f"SECONDS = {delay_seconds}\n{_ENGINE}")
    return Files(start, save_scorer(place / "scorer", start), pairs, texts, environment, engine)


def start_flags(program: str, files: Files) -> str:
    """What a program starts from, and its data."""
    data = f"--data_path jsonl:{files.pairs} --data_split 2,2,2 --max_prompt_seq_len 64"
    if program.startswith("acting"):
        return (
            f"{data} --actor_model_name_or_path {files.start} --environment {files.environment}:Late "
            "--reward environment --advantage grpo --stop e i s --answer_interval 6 --kl_coef 0 "
            "--prompt_style chat_template --chat_template examples/environments/template.jinja"
        )
    if MODULES[program] == "step3_ppo":
        return f"{data} --actor_model_name_or_path {files.start} --critic_model_name_or_path {files.scorer}"
    return f"{data} --model_name_or_path {files.start} --report_mfu false"


# A run: ranks that are forked from here.


def run(
    program: str,
    ranks: int,
    flags: Sequence[str],
    log: Path,
    moment: Moment | None = None,
    number: int = 0,
    prepare: Callable[[int], None] | None = None,
) -> Ended:
    """Run the program on so many ranks, and send signal `number` to all of them at `moment`. prepare: called in each
    rank's process, with its number, before the program."""
    from training.utils.run.launch import free_port

    reader, writer = os.pipe()
    port = free_port()
    processes = {}
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.close(reader)
            _rank(program, (rank, ranks, port), flags, log, writer, prepare)
        processes[process] = rank
    os.close(writer)
    try:
        parts, hit = _watch(reader, list(processes), moment, number)
        codes = _codes(processes)
    finally:
        os.close(reader)
        for process in processes:
            with _gone():
                os.kill(process, signal.SIGKILL)
    said = log.read_text(errors="replace")
    return Ended(codes, hit, parts, said)


@contextmanager
def _gone() -> Iterator[None]:
    with suppress(ProcessLookupError, ChildProcessError):
        yield


def _codes(processes: dict[int, int]) -> tuple[int, ...]:
    """The ranks' exit codes, once all have ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process, rank in processes.items():
            if rank not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for process in processes:
                with _gone():
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return tuple(codes[rank] for rank in range(len(processes)))


def _watch(
    reader: int, processes: list[int], moment: Moment | None, number: int
) -> tuple[dict[str, list[float]], bool]:
    """Read what rank 0 tells until it has ended, and send the signal when its moment has come."""
    parts: dict[str, list[float]] = {}
    entered: dict[str, int] = {}
    due: float | None = None
    hit = False
    deadline = time.monotonic() + _LIMIT_SECONDS
    rest = b""
    while True:
        now = time.monotonic()
        if due is not None and now >= due and not hit:
            hit = True
            for process in processes:
                with _gone():
                    os.kill(process, number)
        if now > deadline:
            return parts, hit
        wait = 0.2 if due is None or hit else max(due - now, 0.0)
        if not select.select([reader], [], [], wait)[0]:
            continue
        told = os.read(reader, 65536)
        if not told:
            return parts, hit
        *lines, rest = (rest + told).split(b"\n")
        for line in lines:
            what, part, seconds = line.decode().split()
            if what == "left":
                parts.setdefault(part, []).append(float(seconds))
                continue
            entered[part] = entered.get(part, 0) + 1
            if moment is not None and part == moment.part and entered[part] == moment.count:
                due = time.monotonic() + moment.delay_seconds


def _rank(
    program: str,
    group: tuple[int, int, int],
    flags: Sequence[str],
    log: Path,
    writer: int,
    prepare: Callable[[int], None] | None,
) -> None:
    """One rank, in a process of its own, which ends here. group: its number, how many there are, and their port"""
    rank, ranks, port = group
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )  # fmt: skip
        from tqdm import tqdm

        # tqdm's lock is a semaphore that forked processes share: one killed while it holds it stops all later ones.
        tqdm.set_lock(threading.RLock())
        if rank == 0:
            _tell_parts(writer)
        if prepare is not None:
            prepare(rank)
        code = _ran(MODULES[program], flags)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ran(module: str, flags: Sequence[str]) -> int:
    import importlib

    from training.utils.run.program import run_program

    sys.argv = [f"training.{module}.main", *flags]
    try:
        run_program(importlib.import_module(f"training.{module}.main").main, output_is_log=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _drawing_ahead() -> list[tuple[Any, str, str]]:
    if "ahead" not in plugins():
        return []
    places = {"pipeline:RolloutsAhead": "_drawn_by", "free:FreeRollouts": "_draw"}
    return [(pkgutil.resolve_name(f"threestep.plugins.ahead.{at}"), name, "rollout") for at, name in places.items()]


def _tell_parts(writer: int) -> None:
    """From now on this process tells when it enters and leaves a part of a run."""
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer
    from training.step2_reward.trainer import RewardTrainer
    from training.step3_ppo.parts import inputs
    from training.step3_ppo.parts.evaluation import Evaluator
    from training.step3_ppo.trainer import PpoTrainer
    from training.utils.checkpoints.loop import RunCheckpoints
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.setup import one_model_run

    def told(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            os.write(writer, f"entered {part} 0\n".encode())
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                os.write(writer, f"left {part} {time.monotonic() - started}\n".encode())

        return wrapped

    places: list[tuple[Any, str, str]] = [
        (one_model_run, "build_phase", "data"), (inputs, "build_phase", "data"), (RunCheckpoints, "save", "save"),
        (RunCheckpoints, "restore", "restore"), (TrainingEngine, "backward", "step"),
        (TrainingEngine, "step", "update"), (SftTrainer, "evaluate", "evaluation"),
        (RewardTrainer, "evaluate", "evaluation"), (DpoTrainer, "evaluate", "evaluation"),
        (Evaluator, "evaluate", "evaluation"), (PpoTrainer, "roll_out", "rollout"),
        *_drawing_ahead(),
        (TrainingEngine, "full_state", "model"),
    ]  # fmt: skip
    for owner, name, part in places:
        setattr(owner, name, told(part, getattr(owner, name)))


def import_everything() -> None:
    """What every run needs, so that a fork has it; and what is there now is no longer looked at by the garbage
    collector, which would copy all of it in each fork."""
    import gc

    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import training.step1_sft.main
    import training.step1_sft.trainer
    import training.step2_dpo.main
    import training.step2_dpo.trainer
    import training.step2_reward.main
    import training.step2_reward.trainer
    import training.step3_ppo.flags.checks
    import training.step3_ppo.main
    import training.step3_ppo.run
    import training.utils.checkpoints.loop
    import training.utils.loading.saving
    import training.utils.setup.one_model_run  # noqa: F401

    gc.collect()
    gc.freeze()
