"""Who runs against whom: for each benchmark, the command of every competitor. The first is the one that is compared."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.endless import PROMPTS, make_endless
from benchmarks.pictured import make_pictured
from benchmarks.speculation import make_drafting, make_embedded_drafting
from benchmarks.workload import Workload

TRL = "trl==1.16.0"
TRL_WITH_PPO = "trl==1.12.0"  # the last release with a PPOTrainer
ROOT = Path(__file__).parents[1]
# Sequences (SFT) of an optimizer step, 163 tokens each on GSM8K: 3,900, as the bare loop's 8 x 512 = 4,096.
SFT_FORWARD, SFT_ACCUMULATION = 8, 3
PAIRS = 8
# Conversations about pictures of 256 tokens: the longest has two of them and some 200 tokens of text.
PICTURED_FORWARD, PICTURED_ACCUMULATION, PICTURED_TOKENS = 4, 2, 1280


@dataclass(frozen=True)
class Competition:
    """unit: what a competitor counts a second. commands: by name. notes: lines printed under the table."""

    unit: str
    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)


_MFU = "Threestep's share of the matmul rate measured in its own run: train/mfu of metrics.jsonl, in step1_sft_run"
Make = Callable[[Workload, argparse.Namespace], Competition]


def _sft(workload: Workload, arguments: argparse.Namespace) -> Competition:
    commands = {
        "Threestep": _threestep_sft(workload, arguments),
        "Threestep, all in one forward": [*_threestep_sft(workload, arguments), "--max_tokens_per_micro_batch", "4096"],
        "bare loop, loss on every token": _ours("floor_sft", workload, arguments, []),
        "bare loop, the same logits only": _ours("floor_sft", workload, arguments, ["--head", "targets"]),
    }
    if not arguments.without_trl:
        for mode in ("plain", "padding_free", "grouped"):
            accumulate = ["--mode", mode, "--batch", str(SFT_FORWARD), "--accumulate", str(SFT_ACCUMULATION)]
            commands[f"TRL, {mode}"] = _trl("sft", workload, arguments, accumulate)
    return Competition("token", commands, [_MFU])


def _overhead(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """What the engine, the planner and the loop cost: the same rows and model without them."""
    commands = {
        "Threestep": _threestep_sft(workload, arguments),
        "the same rows by bare PyTorch": _ours("floor_rows", workload, arguments, []),
    }
    return Competition("token", commands)


def _pairwise(file: str, trainer: str, workload: Workload, arguments: argparse.Namespace) -> Competition:
    step = {"reward": "step2_reward", "dpo": "step2_dpo"}[trainer]
    flags = ["--data_path", f"jsonl:{workload.folder / file}", "--data_split", "0,1,0", "--learning_rate", "1e-5"]
    flags += ["--per_device_train_batch_size", str(PAIRS)]
    flags += ["--normalization_rows", "0"] if trainer == "reward" else ["--max_train_rows", "200"]
    commands = {
        "Threestep": _threestep(step, "pairs", workload, arguments, flags),
        "Threestep, padded": _threestep(step, "pairs", workload, arguments, [*flags, "--padded"]),
    }
    if not arguments.without_trl:
        commands["TRL"] = _trl(trainer, workload, arguments, ["--pairs", file, "--batch", str(PAIRS)])
    return Competition("pair", commands, [_tokens_ratio(workload, file)])


def _dpo(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """The steps alone, the reference read before them as both can; then with that reading counted, which a pair needs
    once: what the first epoch costs. TRL's own default reads the reference in each step."""
    competition = _pairwise("pairs.jsonl", "dpo", workload, arguments)
    threestep = list(competition.commands["Threestep"])
    threestep[threestep.index("--") : threestep.index("--") + 1] = ["--count_reference", "--"]
    competition.commands["Threestep, reference counted"] = [*threestep, "--rebuild_cache", "true"]
    if not arguments.without_trl:
        competition.commands["TRL, reference in each step"] = [*competition.commands["TRL"], "--reference_in_steps"]
    return competition


def _kto(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Rows that are marked one by one, each pair as two. The reference is read before the steps, as both can; TRL's own
    default reads it in each step."""
    flags = ["--data_path", f"jsonl:{workload.marked()}", "--data_split", "0,1,0", "--learning_rate", "1e-5"]
    flags += ["--loss_type", "kto", "--per_device_train_batch_size", str(2 * PAIRS), "--max_train_rows", "400"]
    commands = {"Threestep": _threestep("step2_dpo", "samples", workload, arguments, flags, samples=2 * PAIRS)}
    if not arguments.without_trl:
        commands["TRL"] = _trl("kto", workload, arguments, ["--batch", str(2 * PAIRS)])
        commands["TRL, reference in each step"] = [*commands["TRL"], "--reference_in_steps"]
    return Competition("sample", commands)


def _orpo(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A loss without a reference, on pairs."""
    flags = ["--data_path", f"jsonl:{workload.pairs}", "--data_split", "0,1,0", "--learning_rate", "1e-5"]
    flags += ["--loss_type", "orpo", "--per_device_train_batch_size", str(PAIRS), "--max_train_rows", "200"]
    padded = [*flags, "--padded"]
    commands = {
        "Threestep": _threestep("step2_dpo", "samples", workload, arguments, flags, samples=PAIRS),
        "Threestep, padded": _threestep("step2_dpo", "samples", workload, arguments, padded, samples=PAIRS),
    }
    if not arguments.without_trl:
        commands["TRL"] = _trl("orpo", workload, arguments, ["--batch", str(PAIRS)])
    return Competition("pair", commands, [_tokens_ratio(workload, workload.pairs.name)])


def _ranked(responses: int, workload: Workload, arguments: argparse.Namespace) -> Competition:
    """K ranked responses a prompt: the prompt once, or K times."""
    file = workload.ranked(responses)
    flags = ["--dataset_module", str(ROOT / "benchmarks" / "ranked_dataset.py"), "--data_path", str(file.parent)]
    flags += ["--data_split", "0,1,0", "--learning_rate", "1e-5"]
    flags += ["--per_device_train_batch_size", str(prompts_of(responses)), "--normalization_rows", "0"]
    commands = {
        "Threestep": _threestep("step2_reward", "pairs", workload, arguments, flags),
        "Threestep, padded": _threestep("step2_reward", "pairs", workload, arguments, [*flags, "--padded"]),
        "bare PyTorch, shared": _ours("floor_ranked", workload, arguments, ["--responses", str(responses)]),
        "bare PyTorch, packed, unshared": _ours(
            "floor_ranked", workload, arguments, ["--responses", str(responses), "--unshared"]
        ),
    }
    return Competition("pair", commands, [_tokens_ratio(workload, str(file.relative_to(workload.folder)))])


def prompts_of(responses: int) -> int:
    """Prompts of an optimizer step, so that a step has 16 sequences for any number of responses."""
    return 2 * PAIRS // responses


def _head(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """The loss from hidden states, 4,096 tokens at a vocabulary of 128,000."""
    program = [sys.executable, "-m", "benchmarks.competitors.head"]
    common = ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    names = {"Threestep": "threestep", "torch's linear_cross_entropy": "torch", "all logits at once": "whole"}
    return Competition("token", {name: [*program, "--how", how, *common] for name, how in names.items()})


def _data(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Raw rows to cached tokens of phase 1, in as many processes (or threads) each as --threads says."""

    def ours(how: str) -> list[str]:
        return _ours("data", workload, arguments, ["--how", how, "--threads", str(arguments.threads)])

    commands = {"Threestep": ours("threestep"), "encode_batch alone": ours("encode_batch")}
    if not arguments.without_trl:
        flags = ["--prepare_only", "--processes", str(arguments.threads)]
        commands["TRL's SFTTrainer, its dataset alone"] = _trl("sft", workload, arguments, flags)
    opening = [sys.executable, "-m", "benchmarks.competitors.opening", "--folder", str(workload.folder / "opening")]
    done = subprocess.run(opening, cwd=ROOT, capture_output=True, text=True, check=True)
    return Competition("token", commands, [done.stdout.strip()])


def _rollout(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Generation alone: what decoding costs beyond the forwards that it cannot do without."""

    def ours(how: str, *flags: str) -> list[str]:
        return _ours("rollout", workload, arguments, ["--how", how, *flags])

    cut = ("--top_p", "0.9")
    commands = {
        "Threestep": ours("threestep"),
        "bare decode loop": ours("bare"),
        "transformers generate": ours("generate"),
        "Threestep, top-p 0.9": ours("threestep", *cut),
        "transformers generate, top-p 0.9": ours("generate", *cut),
        "Threestep, rows finish early": ours("threestep", "--stop", "q"),
    }
    # A random model says a token with this letter once in some fifty: lengths spread over the whole range.
    return Competition("sequence", commands, ["rows finish early: a stop string ends a response where it comes up"])


def _vllm(prompts: int, workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Rollouts by the two engines; where vLLM is installed, with the Python that has it."""
    flags = ["--prompts", str(prompts), "--new_tokens", "64"]
    commands = {
        name: _ours("rollout", workload, arguments, ["--how", how, *flags])
        for name, how in (("hf", "threestep"), ("vLLM", "vllm"))
    }
    return Competition("sequence", commands, ["vLLM's time has the weights in it, sent before each rollout"])


def _vllm_step(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A whole step by the two rollout engines: 16 prompts x 4 responses of at most 64 tokens, a rule as the reward, no
    KL, one update, after which vLLM is sent the weights."""
    flags = _grpo_flags(workload, arguments, prompts=16)
    flags += ["--mismatch_correction", "none"]  # on by itself for vLLM alone
    commands = {
        name: _threestep_ppo(workload, [*flags, "--rollout_engine", engine])
        for name, engine in (("hf", "hf"), ("vLLM", "vllm"))
    }
    return Competition("step", commands, ["weights_to_vllm is a part of the rollout's seconds"])


def _speculation(prompts: int, workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Rollouts by guesses, of a model with a trained head: four responses to each of its prompts."""
    return _by_guesses(make_drafting(workload, prompts), prompts, arguments)


def _speculation_embedded(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """The same of the embedded task's held-out prompts: 4 sequences of about 14 tokens."""
    return _by_guesses(make_embedded_drafting(workload, arguments.shape, prompts=1), 1, arguments)


def _by_guesses(drafting: tuple[Path, Path, str], prompts: int, arguments: argparse.Namespace) -> Competition:
    model, rows, note = drafting
    program = [sys.executable, "-m", "benchmarks.competitors.speculation", "--model", str(model), "--rows", str(rows)]
    program += ["--prompts", str(prompts), "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    names = {
        "plain": "plain",
        "--speculate 1": "head",
        "--speculate 2": "head2",
        "--speculate_by ngram": "ngram",
        "--speculate auto": "auto",
    }
    return Competition("token", {name: [*program, "--how", how] for name, how in names.items()}, [note])


def _speculation_step(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A whole step of GRPO of that model, whose head learns in every one: 2 prompts x 4 responses of at most 64."""
    model, rows, note = make_drafting(workload, prompts=2)
    flags = _grpo_flags(workload, arguments, prompts=2, model=model, rows=rows)
    return _steps_by_guesses(workload, [*flags, "--num_train_epochs", str(arguments.steps)], note)


def _speculation_embedded_step(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """The same of the embedded task and its checker: 4 rollouts of one prompt x 4 responses, an update of all 16."""
    model, _, note = make_embedded_drafting(workload, arguments.shape, prompts=1)
    flags = [*_grpo_flags(workload, arguments, prompts=1, model=model), "--data_path", "embedded"]
    flags += ["--generation_batches", "4", "--per_device_training_batch_size", "16"]
    return _steps_by_guesses(workload, [*flags, "--reward", "embedded", "--max_prompt_seq_len", "64"], note)


def _steps_by_guesses(workload: Workload, flags: list[str], note: str) -> Competition:
    flags = [*flags, "--mtp_num_layers", "1"]
    ways = {"without": [], "--speculate 1": ["--speculate", "1"], "--speculate 2": ["--speculate", "2"]}
    ways |= {"--speculate auto": ["--speculate", "auto"]}
    commands = {name: _threestep_ppo(workload, [*flags, *way]) for name, way in ways.items()}
    return Competition("step", commands, [note, "of its first six rollouts --speculate 1 draws three without guesses"])


def _grpo(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A whole step: 8 prompts x 4 responses of at most 64 tokens, a rule as the reward, no KL, one update."""
    commands = {"Threestep": _threestep_ppo(workload, _grpo_flags(workload, arguments, prompts=8))}
    if not arguments.without_trl:
        commands["TRL"] = _trl("grpo", workload, arguments, ["--batch", "32", "--samples", "4", "--new_tokens", "64"])
    return Competition("step", commands)


def _grpo_flags(
    workload: Workload,
    arguments: argparse.Namespace,
    prompts: int,
    model: Path | None = None,
    rows: Path | None = None,
) -> list[str]:
    """model, rows: if not the workload's."""
    actor, data = model or workload.model, rows or workload.sft
    flags = ["--actor_model_name_or_path", str(actor), "--dtype", arguments.dtype, "--actor_zero_stage", "1"]
    flags += ["--data_path", f"jsonl:{data}", "--data_split", "0,0,1", "--max_train_rows", "400"]
    flags += ["--data_output_path", str(workload.folder / "cache"), "--max_train_steps", str(arguments.steps)]
    flags += ["--max_eval_rows", "1", "--reward", "gsm8k", "--advantage", "grpo", "--kl_coef", "0"]
    flags += ["--num_samples_per_prompt", "4", "--per_device_generation_batch_size", str(prompts)]
    return [*flags, "--per_device_training_batch_size", str(4 * prompts), "--max_answer_seq_len", "64"]


def _sft_images(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """Conversations about pictures: the loss on the last answer alone, a frozen tower, a trained projector."""
    pictured, size = make_pictured(workload, arguments.shape), PICTURED_FORWARD * PICTURED_ACCUMULATION
    flags = ["--data_path", f"jsonl:{pictured.rows}", "--prompt_style", "chat_template", "--data_split", "1,0,0"]
    flags += ["--learning_rate", "1e-5", "--per_device_train_batch_size", str(PICTURED_FORWARD)]
    flags += ["--gradient_accumulation_steps", str(PICTURED_ACCUMULATION), "--freeze_vision_tower", "true"]
    longest = argparse.Namespace(**{**vars(arguments), "max_seq_len": PICTURED_TOKENS})
    commands = {"Threestep": _threestep("step1_sft", "samples", workload, longest, flags, pictured.model, size)}
    if not arguments.without_trl:
        accumulate = ["--batch", str(PICTURED_FORWARD), "--accumulate", str(PICTURED_ACCUMULATION)]
        commands["TRL"] = _trl("sft_images", workload, arguments, accumulate)
    return Competition("sample", commands)


def _grpo_images(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A whole step as in `grpo`, of prompts with pictures: 4 of them, 4 responses each of at most 64 tokens."""
    pictured = make_pictured(workload, arguments.shape)
    flags = _grpo_flags(workload, arguments, prompts=4, model=pictured.model, rows=pictured.rows)
    flags += ["--prompt_style", "chat_template", "--max_prompt_seq_len", str(PICTURED_TOKENS)]
    commands = {"Threestep": _threestep_ppo(workload, flags)}
    if not arguments.without_trl:
        sizes = ["--batch", "16", "--samples", "4", "--new_tokens", "64"]
        commands["TRL"] = _trl("grpo_images", workload, arguments, sizes)
    return Competition("step", commands)


def _ppo(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """A whole step of four models: the same 32 prompts in each, 64 tokens to each, one pass in one minibatch."""
    endless = make_endless(workload)
    flags = _four_models(workload, arguments, endless.prompts, sequences=PROMPTS)
    flags += ["--max_answer_seq_len", "64", "--per_device_generation_batch_size", str(PROMPTS)]
    flags += ["--num_train_epochs", str(arguments.steps)]
    commands = {"Threestep": _threestep_ppo(workload, flags)}
    for name, reuses in (("Threestep, reading apart", "false"), ("Threestep, reusing forwards", "true")):
        commands[name] = _threestep_ppo(workload, [*flags, "--reuse_forwards", reuses, "--reuse_values", reuses])
    if arguments.dtype == "bf16":
        # As TRL trains by default: no float32 copy of a weight, gradient or moment.
        commands["Threestep, states of 16 bits"] = _threestep_ppo(workload, [*flags, "--bf16_optimizer_states"])
    if not arguments.without_trl:
        common = ["--prompts", str(PROMPTS), "--new_tokens", "64"]
        for batch in (8, PROMPTS):
            sizes = ["--batch", str(batch), "--accumulate", str(PROMPTS // batch)]
            command = _trl("ppo", workload, arguments, [*common, *sizes], "trl_1_12_venv", TRL_WITH_PPO)
            commands[f"TRL 1.12, forwards of {batch}"] = command
            if arguments.dtype == "bf16":
                commands[f"TRL 1.12, float32 weights, forwards of {batch}"] = [*command, "--autocast"]
    return Competition("step", commands)


def _experience(workload: Workload, arguments: argparse.Namespace) -> Competition:
    """What follows the rollout, four models: 4 prompts x 4 responses of 16 to 256 tokens, one update."""
    flags = _four_models(workload, arguments, workload.sft, sequences=16)
    flags += ["--max_train_rows", "400", "--max_answer_seq_len", "256"]
    flags += ["--rollout_engine", f"{Path(__file__).parent}/rollout_engines.py:SpreadRollout"]
    flags += ["--num_samples_per_prompt", "4", "--per_device_generation_batch_size", "4"]
    commands = {
        "Threestep": _threestep_ppo(workload, flags),
        "Threestep, padded": _threestep_ppo(workload, [*flags, "--padded"]),
    }
    return Competition("step", commands, ["nothing is generated: responses are random tokens"])


def _four_models(workload: Workload, arguments: argparse.Namespace, prompts: Path, sequences: int) -> list[str]:
    endless = make_endless(workload)
    flags = ["--actor_model_name_or_path", str(endless.actor), "--actor_zero_stage", "1", "--dtype", arguments.dtype]
    flags += ["--critic_model_name_or_path", str(endless.reward_model), "--critic_zero_stage", "1"]
    flags += ["--data_path", f"jsonl:{prompts}", "--data_split", "0,0,1", "--max_eval_rows", "1"]
    flags += ["--data_output_path", str(workload.folder / "cache"), "--max_train_steps", str(arguments.steps)]
    return [*flags, "--per_device_training_batch_size", str(sequences)]


def _threestep_ppo(workload: Workload, flags: list[str]) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.competitors.threestep", "--step", "step3_ppo", "--unit", "steps"]
    return [*command, "--output_dir", str(workload.folder / "step3_ppo_run"), "--", *flags]


COMPETITIONS: dict[str, Make] = {
    "grpo": _grpo,
    "grpo_images": _grpo_images,
    "ppo": _ppo,
    "experience": _experience,
    "rollout": _rollout,
    "speculation": partial(_speculation, 8),
    "speculation8": partial(_speculation, 2),
    "speculation4": partial(_speculation, 1),
    "speculation_step": _speculation_step,
    "speculation_embedded": _speculation_embedded,
    "speculation_embedded_step": _speculation_embedded_step,
    "vllm64": partial(_vllm, 16),
    "vllm256": partial(_vllm, 64),
    "vllm_step": _vllm_step,
    "sft": _sft,
    "sft_images": _sft_images,
    "overhead": _overhead,
    "reward": partial(_pairwise, "pairs.jsonl", "reward"),
    "reward_half": partial(_pairwise, "pairs_half.jsonl", "reward"),
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _orpo,
    "ranked2": partial(_ranked, 2),
    "ranked4": partial(_ranked, 4),
    "ranked8": partial(_ranked, 8),
    "head": _head,
    "data": _data,
}


def _threestep_sft(workload: Workload, arguments: argparse.Namespace) -> list[str]:
    flags = ["--data_path", f"jsonl:{workload.sft}", "--data_split", "1,0,0", "--learning_rate", "1e-5"]
    flags += ["--per_device_train_batch_size", str(SFT_FORWARD)]
    flags += ["--gradient_accumulation_steps", str(SFT_ACCUMULATION)]
    return _threestep("step1_sft", "tokens", workload, arguments, flags)


def _threestep(
    step: str,
    unit: str,
    workload: Workload,
    arguments: argparse.Namespace,
    flags: list[str],
    model: Path | None = None,
    samples: int | None = None,
) -> list[str]:
    """model: if not the workload's. samples: of an optimizer step, which the unit "samples" needs."""
    output = str(workload.folder / f"{step}_run")
    program = [sys.executable, "-m", "benchmarks.competitors.threestep", "--step", step, "--unit", unit]
    program += ["--samples", str(samples)] if samples else []
    shared = ["--model_name_or_path", str(model or workload.model), "--dtype", arguments.dtype, "--zero_stage", "1"]
    shared += ["--max_train_steps", str(arguments.steps), "--max_eval_rows", "8", "--eval_interval", "0"]
    shared += ["--max_seq_len", str(arguments.max_seq_len), "--attn_implementation", arguments.attn_implementation]
    shared += ["--data_output_path", str(workload.folder / "cache")]
    return [*program, "--output_dir", output, "--", *shared, *flags]


def _ours(competitor: str, workload: Workload, arguments: argparse.Namespace, flags: list[str]) -> list[str]:
    program = [sys.executable, "-m", f"benchmarks.competitors.{competitor}", "--workload", str(workload.folder)]
    return [*program, "--dtype", arguments.dtype, "--steps", str(arguments.steps), *flags]


def _trl(
    trainer: str,
    workload: Workload,
    arguments: argparse.Namespace,
    flags: list[str],
    environment: str = "trl_venv",
    release: str = TRL,
) -> list[str]:
    python = _trl_python(Path(arguments.folder) / environment, release)
    program = str(ROOT / "benchmarks" / "competitors" / "trl_peer.py")
    common = ["--workload", str(workload.folder), "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    return [python, program, "--trainer", trainer, *common, *flags]


def _trl_python(folder: Path, release: str) -> str:
    python = folder.absolute() / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        pins = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pins, "torch==2.13.0"], check=True)
        subprocess.run([*pins, release, "datasets", "accelerate", "pillow"], check=True)
        (folder / "done").touch()
    return str(python)


def _tokens_ratio(workload: Workload, file: str) -> str:
    """Of the tokens computed, unshared over shared: what sharing prompts could gain at most."""
    shared, unshared = workload.tokens(file)
    return f"tokens computed, unshared over shared: {unshared / shared:.3f}"
