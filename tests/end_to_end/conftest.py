"""Tiny models, tokenizers and data made on the spot, and the three steps run on them by their own command lines.

A chain of steps is run once a session; the tests look at what it left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.support.forked_programs import may_fork, run_python
from tests.support.json_lines import write_lines
from tests.support.sorted_words import pair_rows
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer

TIMEOUT_SECONDS = 600  # ten seconds on an idle core
MODULES: dict[int | str, str] = {
    1: "training.step1_sft.main",
    2: "training.step2_reward.main",
    3: "training.step3_ppo.main",
    "dpo": "training.step2_dpo.main",
}


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        return f"code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@dataclass(frozen=True)
class Chain:
    """The three steps, one after the other: their folders, what they said, and the flags of their data."""

    folders: dict[int, Path]
    ran: dict[int, Ran]
    data_flags: dict[int, list[str]]
    dtypes: dict[int, str]


def run_step(
    step: int | str,
    flags: Sequence[object],
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    launcher: bool = False,
) -> Ran:
    """What scripts/stepN_*.sh runs, on the CPU."""
    return run_module(MODULES[step], flags, ranks, environment, launcher)


def run_module(
    module: str,
    flags: Sequence[object],
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    launcher: bool = False,
) -> Ran:
    """A program by its command line, on the CPU. launcher: started by training.utils.run.launch in any case, and not by
    forks (tests/support/forked_programs.py)."""
    words = [str(flag) for flag in flags]
    own = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "THREESTEP_RANKS": str(ranks)}
    variables = {**os.environ, **own, **(environment or {})}
    if launcher or not may_fork(variables):
        command = [sys.executable, "-m", "training.utils.run.launch", module, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=variables)
    else:
        done = run_python(["-m", module, *words], variables, ranks, timeout_seconds=TIMEOUT_SECONDS)
    return Ran(done.returncode, done.stdout, done.stderr)


def save_start(
    folder: Path,
    pad_is_eos: bool = False,
    with_weights: bool = True,
    sentences: Sequence[str] = SENTENCES,
    tokenizer: Any = None,
    **tokenizer_changes: object,
) -> Path:
    """A Llama shape of some hundred thousand random weights (or without any), with a tokenizer of `sentences` or the
    one given."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or train_tokenizer(list(sentences), vocab_size=384, pad_is_eos=pad_is_eos)
    for name, value in tokenizer_changes.items():
        setattr(tokenizer, name, value)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if with_weights:
        model.save_pretrained(folder)
    else:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_scorer(folder: Path, start: Path) -> Path:
    """A reward model of random weights in the shape of `start`, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(1)
    LlamaForSequenceClassification(AutoConfig.from_pretrained(start, num_labels=1)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="session")
def pairs_file(place: Path) -> Path:
    return write_lines(place / "pairs.jsonl", pair_rows(60))


@pytest.fixture(scope="session")
def text_file(place: Path) -> Path:
    return write_lines(place / "text.jsonl", [{"text": sentence * 3} for sentence in SENTENCES])


def run_chain(
    place: Path,
    name: str,
    start: Path,
    ranks: int,
    shared: Sequence[object],
    flags: Mapping[int, Sequence[object]],
    environment: Mapping[str, str] | None = None,
) -> Chain:
    """Step 1 from `start`, step 2 from step 1's model, step 3 from both; two optimizer steps (rollouts) each."""
    folders = {step: place / name / f"step{step}" for step in (1, 2, 3)}
    models = {
        1: ["--model_name_or_path", start],
        2: ["--model_name_or_path", folders[1] / "model"],
        3: ["--actor_model_name_or_path", folders[1] / "model", "--critic_model_name_or_path", folders[2] / "model"],
    }
    data_flags = {
        step: [str(flag) for flag in [*shared, "--data_output_path", place / name / "cache"]] for step in (1, 2, 3)
    }
    ran = {}
    for step in (1, 2, 3):
        own = [*models[step], *data_flags[step], "--output_dir", folders[step], "--max_train_steps", 2, *flags[step]]
        ran[step] = run_step(step, own, ranks, environment)
        assert ran[step].code == 0, f"step {step}: {ran[step].words}"
    dtypes = {step: str(list(flags[step])[list(flags[step]).index("--dtype") + 1]) for step in (1, 2, 3)}
    return Chain(folders, ran, data_flags, dtypes)


def run_program(place: Path, name: str, world_size: int, runs: list[tuple[str, list[object], Path]]) -> list[str]:
    """Run (module, flags, folder) one after the other on every rank (resume_program.py); return how each ended on rank
    0."""
    note = place / f"{name}_rank_"
    wanted = [
        {"module": module, "flags": [str(flag) for flag in [*flags, "--output_dir", folder]], "note": str(note)}
        for module, flags, folder in runs
    ]
    (place / f"{name}.json").write_text(json.dumps({"runs": wanted}))
    program = Path(__file__).with_name("resume_program.py")
    run_ranks(program, world_size, [place / f"{name}.json"], 600)
    return Path(f"{note}0").read_text().splitlines()


SHARED = "--data_split 2,2,2 --eval_fraction 0.2 --max_prompt_seq_len 64 --max_seq_len 100"


@pytest.fixture(scope="session")
def alone(place: Path, pairs_file: Path, text_file: Path) -> Chain:
    """One process, float32, no ZeRO; pad is eos; step 2 with every option of its loss; step 3 with LoRA,
    unsupervised text, two passes and scores put on step 2's scale."""
    start = save_start(place / "start_pad_is_eos", pad_is_eos=True)
    trained = "--dtype fp32 --learning_rate 1e-3 --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    flags = {
        1: trained.split(),
        2: f"{trained} --gradient_checkpointing true --margin_scale 0.5 --label_smoothing 0.1 "
        "--center_coef 0.01".split(),
        3: "--dtype fp32 --actor_learning_rate 1e-3 --critic_learning_rate 1e-4 --actor_lora_dim 4 --ppo_epochs 2 "
        "--per_device_generation_batch_size 4 --per_device_training_batch_size 2 --max_answer_seq_len 8 "
        "--normalize_reward_scores true".split()
        + ["--unsupervised_dataset_name", f"jsonl:{text_file}"],
    }
    shared = ["--data_path", f"jsonl:{pairs_file}", "--margin_column", "margin", *SHARED.split()]
    return run_chain(place, "alone", start, 1, shared, flags)


@pytest.fixture(scope="session")
def without_compiler(place: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled, and nothing compiled before is found."""
    programs = place / "programs"
    programs.mkdir()
    return {"PATH": str(programs), "CXX": "", "CC": "", "TORCH_EXTENSIONS_DIR": str(place / "extensions")}


@pytest.fixture(scope="session")
def together(place: Path, pairs_file: Path, without_compiler: dict[str, str]) -> Chain:
    """Two ranks on a machine without a compiler: ZeRO-2 with offload, then ZeRO-3 in bf16."""
    start = save_start(place / "start")
    trained = "--learning_rate 1e-3 --per_device_train_batch_size 2"
    flags = {
        1: f"--dtype fp32 --zero_stage 2 --offload true {trained}".split(),
        2: f"--dtype bf16 --zero_stage 3 {trained}".split(),
        3: "--dtype bf16 --actor_zero_stage 3 --critic_zero_stage 3 --actor_learning_rate 1e-4 "
        "--critic_learning_rate 1e-4 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 "
        "--max_answer_seq_len 8".split(),
    }
    shared = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split()]
    return run_chain(place, "together", start, 2, shared, flags, without_compiler)


@pytest.fixture(scope="session")
def chain_named(request) -> Callable[[str], Chain]:
    """chain_named("alone" | "together"), run when it is first asked for."""
    return request.getfixturevalue
