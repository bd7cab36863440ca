"""Judges finished models on the held-out prompts of a dataset, and writes what they answered for people to read.

    python -m training.evaluate win_rate   --model_name_or_path A --baseline B --reward_model RM --data_path ...
    python -m training.evaluate win_rate   --model_name_or_path A --baseline B --reward embedded --data_path embedded
    python -m training.evaluate reward     --model_name_or_path A --reward exact_match --data_path jsonl:questions.jsonl
    python -m training.evaluate gsm8k      --model_name_or_path A --temperature 0 --data_path openai/gsm8k ...
    python -m training.evaluate perplexity --model_name_or_path A --data_path ...

Prompts are step 3's (perplexity: step 1's sentences, or --unsupervised_dataset_name's text), answers are drawn as its
rollouts are, and --reward is its flag: rules, functions of yours, and `model`, which is --reward_model. OUTPUT_DIR gets
TASK.json, and of answers TASK.jsonl and TASK.html. One process, on the GPU where there is one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from training.asking.arguments import SamplingArguments
from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.data.arguments import DataArguments
from training.utils.engine.arguments import EngineArguments
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from training.asking.model import Answer, AskedModel
    from training.asking.scorer import Scorer
    from training.step3_ppo.rewards.weighted import Reward
    from training.utils.data.phases import PromptRow

TASKS = ("win_rate", "reward", "gsm8k", "perplexity")
SPLITS = ("eval", "train")


@dataclass
class EvaluateArguments:
    """Who is judged, by whom, on which rows."""

    model_name_or_path: str = field(default="", metadata={"help": "The model that is judged: folder or hub name."})
    baseline: str | None = field(default=None, metadata={"help": "win_rate: the model that it is compared with."})
    reward_model: str | None = field(default=None, metadata={"help": "What `model` in --reward stands for."})
    split: str = field(default="eval", metadata={"help": "Rows of the phase: eval, or train."})
    per_device_eval_batch_size: int = field(
        default=EngineArguments.per_device_eval_batch_size, metadata={"help": "Prompts answered together."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )
        mistakes.require(self.split in SPLITS, f"--split expects one of {', '.join(SPLITS)}, got '{self.split}'")
        got = self.per_device_eval_batch_size
        mistakes.require(got >= 1, f"--per_device_eval_batch_size expects a whole number from 1 up, got {got}")


GROUPS = (RunArguments, DataArguments, EvaluateArguments, SamplingArguments, RewardArguments, VllmArguments)


@dataclass(frozen=True)
class Asked:
    """A parsed command line."""

    task: str
    run: RunArguments
    data: DataArguments
    how: EvaluateArguments
    sampling: SamplingArguments
    reward: RewardArguments
    vllm: VllmArguments


def main(argv: Sequence[str]) -> None:
    """Parse, judge, write."""
    task, flags = task_of(argv)
    run, data, how, sampling, reward, vllm = parse_arguments(GROUPS, flags, __doc__ or "")
    if task == "gsm8k":
        reward = replace(reward, reward="gsm8k")
    asked = Asked(task, run, data, how, sampling, reward, vllm)
    rewards = checked_rewards(asked)
    (evaluate_perplexity if task == "perplexity" else evaluate_answers)(asked, rewards)


def task_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The first word, and the flags behind it."""
    if not argv or argv[0] in ("-h", "--help"):
        return TASKS[0], list(argv) or ["--help"]
    if argv[0] not in TASKS:
        raise ThreestepError(
            f"expected a task first, one of {', '.join(TASKS)}, got '{argv[0]}'{nearest_names(argv[0], TASKS)}"
        )
    return argv[0], list(argv[1:])


def checked_rewards(asked: Asked) -> tuple[Reward, ...]:
    """What --reward names; ThreestepError, before a model loads, for what does not go together."""
    from training.step3_ppo.rewards.weighted import named_rewards, reads_model

    mistakes = Mistakes()
    if asked.task == "perplexity":
        mistakes.require(
            asked.sampling.rollout_engine == "hf",
            "--rollout_engine is what draws answers, and perplexity draws none; leave it out",
        )
        mistakes.raise_if_any()
        return ()
    rewards = named_rewards(asked.reward, mistakes)
    mistakes.require(
        asked.how.reward_model is not None or not reads_model(rewards),
        "--reward has the reward model, and --reward_model names none; name one, or give a rule (--reward gsm8k)",
    )
    mistakes.require(
        (asked.how.baseline is not None) == (asked.task == "win_rate"),
        "win_rate expects the other model as --baseline, got none"
        if asked.task == "win_rate"
        else f"--baseline is for win_rate, and {asked.task} compares with nothing; leave it out",
    )
    mistakes.raise_if_any()
    return rewards


# Tasks on answers.


def evaluate_answers(asked: Asked, rewards: tuple[Reward, ...]) -> None:
    """Let each model answer the same prompts, score the answers, write figures and samples."""
    from training.asking.answers import answers_to, scores_of

    paths = [asked.how.model_name_or_path, *([asked.how.baseline] if asked.how.baseline else [])]
    models = [load(asked, path) for path in paths]
    prompts = shared_prompts([prompts_of(asked, model) for model in models])
    scorer = load_judge(asked, rewards)
    answers: list[list[Answer]] = []
    scores: list[list[float]] = []
    for model, rows in zip(models, prompts, strict=True):
        found = answers_to(model, rows, asked.sampling, asked.run.seed, asked.how.per_device_eval_batch_size)
        answers.append(found)
        scores.append(scores_of(model, rows, found, rewards, scorer, asked.reward.reward_timeout))
    figures = answer_figures(scores, answers, asked.run.seed)
    samples = [
        {
            "prompt": rows[0].prompt_text,
            "ground_truth": rows[0].reference,
            "answers": [own[place].text for own in answers],
            "scores": [own[place] for own in scores],
            "ended": [own[place].ended for own in answers],
            "uid": rows[0].uid,
        }
        for place, rows in enumerate(zip(*prompts, strict=True))
    ]
    write(asked, paths, figures, samples)


def answer_figures(scores: list[list[float]], answers: list[list[Answer]], seed: int) -> dict[str, Any]:
    """The figures of one model's answers, or of two models' to the same prompts. Rewards of 0 and 1 are shares."""
    from training.asking.figures import mean, share

    figures: dict[str, Any] = {"prompts": len(scores[0])}
    if len(scores) == 2:
        gains = [own - other for own, other in zip(*scores, strict=True)]
        wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        ties = len(gains) - wins - losses
        figures |= {"win_rate": share(wins + 0.5 * ties, len(gains)), "wins": wins, "ties": ties, "losses": losses}
        figures["reward_gain"] = mean(gains, seed)
    for name, own, said in zip(("", "baseline_"), scores, answers, strict=False):
        is_share = set(own) <= {0.0, 1.0}
        figures[f"{name}reward"] = share(sum(own), len(own)) if is_share else mean(own, seed)
        figures[f"{name}answer_tokens"] = sum(len(answer.token_ids) for answer in said) / len(said)
        figures[f"{name}ended_share"] = sum(answer.ended for answer in said) / len(said)
    return figures


def load(asked: Asked, path: str) -> AskedModel:
    """A model that answers in the prompt style of the data flags."""
    import torch
    from transformers.utils import logging

    from training.asking.engines import chosen
    from training.asking.model import load_asked_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    longest_tokens = asked.data.max_prompt_seq_len + asked.sampling.max_new_tokens
    drawing = chosen(asked.sampling.rollout_engine, asked.vllm, longest_tokens)
    return load_asked_model(path, asked.sampling.dtype, asked.data, device, drawing)


def load_judge(asked: Asked, rewards: tuple[Reward, ...]) -> Scorer | None:
    """The reward model, where one of the rewards is it."""
    import torch

    from training.asking.scorer import load_answer_scorer
    from training.step3_ppo.rewards.weighted import reads_model
    from training.utils.engine.startup import Ranks

    if not reads_model(rewards):
        return None
    assert asked.how.reward_model is not None  # checked with the rewards
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return load_answer_scorer(asked.how.reward_model, asked.sampling.dtype, asked.data, Ranks(0, 0, 1, device))


def prompts_of(asked: Asked, model: AskedModel) -> Sequence[PromptRow]:
    """Phase 3's rows in the model's tokens."""
    from training.utils.data.build import build_phase

    phase = build_phase(3, asked.data, model.tokenizer, asked.run.seed, log=note)
    return checked_rows({"eval": phase.eval, "train": phase.train}[asked.how.split], asked)


def checked_rows(rows: Any, asked: Asked) -> Any:
    if len(rows) == 0:
        raise ThreestepError(
            f"--split {asked.how.split} has no rows: raise --eval_fraction (it is {asked.data.eval_fraction:g}), or "
            "evaluate --split train"
        )
    return rows


def shared_prompts(sides: list[Sequence[PromptRow]]) -> list[Sequence[PromptRow]]:
    """The prompts that every model has, in one order: a tokenizer may make one too long."""
    by_id = [{row.row_id: row for row in rows} for rows in sides]
    both = [row_id for row_id in by_id[0] if all(row_id in own for own in by_id)]
    left_out = max(len(own) for own in by_id) - len(both)
    if left_out:
        note(f"{left_out} prompts are left out: in one of the tokenizers they are longer than --max_prompt_seq_len")
    if not both:
        raise ThreestepError("the two models share no prompt: raise --max_prompt_seq_len")
    return [[own[row_id] for row_id in both] for own in by_id]


# Perplexity.


def evaluate_perplexity(asked: Asked, rewards: tuple[Reward, ...]) -> None:
    """The exponential of the mean loss a token, of responses or of text."""
    from training.asking.perplexity import row_losses

    model = load(asked, asked.how.model_name_or_path)
    documents, longest, flag = documents_of(asked, model)
    losses, targets, right = row_losses(model, documents, longest, asked.how.per_device_eval_batch_size, flag)
    write(asked, [model.name], perplexity_figures(losses, targets, right, asked.run.seed), None)


def perplexity_figures(losses: list[float], targets: list[int], right: float, seed: int) -> dict[str, Any]:
    """loss: nats a token, resampled by rows. token_accuracy: the share that is the model's first choice."""
    import math

    from training.asking.figures import Figure, ratio

    loss = ratio(losses, targets, seed)
    perplexity = Figure(*(math.exp(end) for end in (loss.value, loss.low, loss.high)))
    figures = {"rows": len(losses), "tokens": sum(targets), "perplexity": perplexity, "loss": loss}
    return {**figures, "token_accuracy": right}


def documents_of(asked: Asked, model: AskedModel) -> tuple[list[Any], int, str]:
    """Step 1's sentences, or blocks of text where --unsupervised_dataset_name is given; the most tokens of one, and the
    flag that says so."""
    import numpy as np

    from training.utils.data.build import build_phase
    from training.utils.data.documents import sentence_document
    from training.utils.data.phases import SentenceRow
    from training.utils.data.unsupervised import build_unsupervised

    longest = asked.data.max_seq_len
    if asked.data.unsupervised_dataset_name is None:
        phase = build_phase(1, asked.data, model.tokenizer, asked.run.seed, log=note)
        rows = checked_rows({"eval": phase.eval, "train": phase.train}[asked.how.split], asked)
        return [sentence_document(row) for row in rows], longest, "--max_seq_len"
    blocks = build_unsupervised(asked.data, model.tokenizer, longest, asked.run.seed, log=note)
    targets = np.arange(longest) > 0
    rows = [SentenceRow(block.row_id, block.input_ids, targets) for block in blocks]
    return [sentence_document(row) for row in checked_rows(rows, asked)], longest, "--max_seq_len"


# What is left.


def write(asked: Asked, paths: Sequence[str], figures: dict[str, Any], samples: list[dict[str, Any]] | None) -> None:
    """Print the figures; write TASK.json, and of samples TASK.jsonl and TASK.html."""
    from training.asking.figures import Figure
    from training.asking.pairs_page import page
    from training.utils.run.run_folder import RunFolder

    folder = RunFolder(asked.run.output_dir, is_main_rank=True)
    plain = {name: asdict(value) if isinstance(value, Figure) else value for name, value in figures.items()}
    setting: dict[str, Any] = {"models": list(paths), "data_path": asked.data.data_path, "split": asked.how.split}
    if samples is not None:
        setting |= {**asdict(asked.sampling), "seed": asked.run.seed, "reward": asked.reward.reward}
        setting["reward_model"] = asked.how.reward_model
    folder.write_json(f"{asked.task}.json", {"task": asked.task, **setting, **plain})
    shown = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in figures.items()}
    for name, value in shown.items():
        print(f"{name:<24} {value}")
    written = [f"{asked.task}.json"]
    if samples is not None:
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        (folder.path / f"{asked.task}.jsonl").write_text(lines, encoding="utf-8")
        text = page(f"{asked.task} on {' '.join(asked.data.data_path)}", shown, paths, samples)
        (folder.path / f"{asked.task}.html").write_text(text, encoding="utf-8")
        written += [f"{asked.task}.jsonl", f"{asked.task}.html"]
    print(f"written to {folder.path}: {', '.join(written)}")


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # transformers loads deepspeed where it is installed, which then looks for a device; nothing here runs on it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_program(main)
