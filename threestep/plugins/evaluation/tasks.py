"""The tasks of `threestep evaluate`: draw and score answers, or read perplexity; write the results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples
from threestep.plugins.evaluation.answers import Scores, answers_to, check_rewards, scores_of, with_comparisons
from threestep.plugins.evaluation.model import Answer, ChatFolder, start_alone
from threestep.plugins.evaluation.opening import (
    Evaluated,
    built_rows,
    checked_rows,
    engine_of,
    folder_of,
    load,
    open_rewards,
    scored_by,
)
from threestep.plugins.evaluation.pairs_page import page
from threestep.plugins.evaluation.perplexity import row_losses
from threestep.plugins.evaluation.scorer import check_scored, load_answer_scorer
from threestep.plugins.evaluation.sharing import ALONE, Sharers, sharers
from threestep.plugins.pretraining_loss.blocks import build_unsupervised
from training.utils.base.console import counted, note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rows import MEDIA_COLUMN, PromptRow, SentenceRow
from training.utils.data.arguments import NO_DATA, RowFlags
from training.utils.data.rows.documents import sentence_document
from training.utils.flags.arguments import defaults_of, resolved_settings
from training.utils.generation.arguments import SamplingArguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.rewards.figures import Figure, Sample, ratio, value_names
from training.utils.rewards.weighted import Reward, check_comparisons, comparing, reads_messages, reads_model
from training.utils.run.run_folder import RunFolder, check_place
from training.utils.setup.media import keep_media

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import RunMedia


def run_task(flags: Evaluated) -> list[str]:
    """Evaluate, write files, and return the lines to print."""
    if flags.task == "gsm8k":
        flags = replace(flags, reward=replace(flags.reward, reward="gsm8k"))
    rewards = checked_rewards(flags)
    for ending in ("json", "jsonl", "html"):
        check_place("--output_dir", os.path.join(flags.run.output_dir, f"{flags.task}.{ending}"))
    for path in (flags.evaluation.model_name_or_path, flags.evaluation.baseline, flags.evaluation.reward_model):
        if path is not None:
            check_model_folder(path)
    with sharers() as together:
        if flags.task == "perplexity":
            return evaluate_perplexity(flags, together)
        return evaluate_answers(flags, rewards, together)


def checked_rewards(flags: Evaluated) -> tuple[Reward, ...]:
    """Return the rewards of --reward; ThreestepError, before a model loads, for flags that exclude each other."""
    mistakes = Mistakes()
    mistakes.require(
        flags.evaluation.benchmark is None,
        f"--benchmark is only for reward_model, not for {flags.task}; remove it",
    )
    if flags.task == "perplexity":
        mistakes.require(
            flags.sampling.rollout_engine == SamplingArguments.rollout_engine,
            "--rollout_engine is not used here, because perplexity generates no answers; remove it",
        )
        mistakes.require(
            flags.evaluation.val_samples == 1,
            f"--val_samples {flags.evaluation.val_samples} is not used here, because perplexity generates no answers; "
            "remove it",
        )
        mistakes.raise_if_any()
        return ()
    mistakes.require(bool(flags.data.source.data_path), NO_DATA)
    rewards = scored_by(flags, mistakes)
    mistakes.require(
        (flags.evaluation.baseline is not None) == (flags.task == "win_rate"),
        "win_rate expects --baseline, the model to compare against, got none"
        if flags.task == "win_rate"
        else f"--baseline is only for win_rate, not for {flags.task}; remove it",
    )
    if flags.task != "win_rate":
        check_comparisons(
            rewards, {f"--val_samples {flags.evaluation.val_samples}": flags.evaluation.val_samples}, mistakes
        )
    mistakes.require(
        flags.evaluation.val_samples == 1 or flags.sampling.temperature > 0,
        f"--val_samples {flags.evaluation.val_samples} samples several answers, but --temperature 0 produces the same "
        "one each time; raise --temperature, or remove --val_samples",
    )
    mistakes.raise_if_any()
    return rewards


def evaluate_answers(flags: Evaluated, rewards: tuple[Reward, ...], together: Sharers = ALONE) -> list[str]:
    """Let each model answer the same prompts, score the answers, write figures and samples. The first rank scores all
    answers and writes; the others return no line."""
    task, start_engine = flags.evaluation, engine_of(flags)
    paths = [task.model_name_or_path, *([task.baseline] if task.baseline else [])]
    folders = [folder_of(flags, path) for path in paths]
    built = [built_rows(flags, "prompts", folder, with_messages=reads_messages(rewards)) for folder in folders]
    seen = next((side.media for side in built if side.media is not None), None)
    if reads_model(rewards) and seen is not None:
        assert task.reward_model is not None, "checked with the flags"
        check_scored(task.reward_model, [(side.tokenizer, side.reader) for side in folders if side.reader is not None])
    if together.is_main:
        open_rewards(flags, rewards, folders[0], ALONE)
    prompts = shared_prompts([side.rows for side in built])
    check_rewards(rewards, prompts[0])
    models = [load(flags, folder, start_engine, side.media) for folder, side in zip(folders, built, strict=True)]
    scorer = None
    if task.reward_model is not None and reads_model(rewards) and together.is_main:
        scorer = load_answer_scorer(task.reward_model, flags.sampling.dtype, flags.data, start_alone(), media=seen)
    judges = comparing(rewards) if task.baseline is not None else []
    alone = [reward for reward in rewards if all(reward is not each for each, _ in judges)]
    answers: list[list[Answer]] = []
    scores: list[Scores] = []
    for place, (model, rows) in enumerate(zip(models, prompts, strict=True)):
        shared = (together, f"answers of {place}")
        batch, each = task.per_device_eval_batch_size, task.val_samples
        drawn = answers_to(
            model, rows, flags.sampling, flags.run.seed, rows_per_batch=batch, shared=shared, samples=each
        )
        if not together.is_main:
            continue
        answers.append(drawn)
        scores.append(scores_of(model, rows, drawn, alone, scorer=scorer, flags=flags.reward))
    if not together.is_main:
        return []
    if judges:
        parts = [each.parts for each in scores]
        scores = with_comparisons(
            parts, rewards, prompts[0], answers, device=models[0].model.device, flags=flags.reward
        )
    sides = [answer_samples(*each) for each in zip(prompts, answers, scores, strict=True)]
    samples = side_by_side(sides, [list(row.media_digests) for row in prompts[0]])
    keep_media(RunFolder(flags.run.output_dir, is_main_rank=True), built[0].seen, prompts[0])
    return write(flags, paths, answer_figures(sides, flags.run.seed), samples)


def side_by_side(sides: Sequence[Sequence[Sample]], media: Sequence[list[str]]) -> list[dict[str, Any]]:
    """The lines of TASK.jsonl. sides: each model's samples. media: the sha256 of each prompt's."""
    return [
        {
            "prompt": of_all[0]["prompt"],
            **({MEDIA_COLUMN: named} if (named := media[of_all[0]["prompt_index"]]) else {}),
            "ground_truth": of_all[0]["ground_truth"],
            "answers": [sample["response"] for sample in of_all],
            "scores": [sample["reward"] for sample in of_all],
            "rewards": [{name: sample[name] for name in value_names([sample])} for sample in of_all],
            "ended": [sample["ended"] for sample in of_all],
            **({"paths": [sample["paths"] for sample in of_all]} if "paths" in of_all[0] else {}),
            "uid": of_all[0]["uid"],
            "sample": of_all[0]["sample"],
        }
        for of_all in zip(*sides, strict=True)
    ]


def shared_prompts(sides: list[Sequence[PromptRow]]) -> list[Sequence[PromptRow]]:
    """The prompts that every model has, in one order: some may be too long in one tokenizer."""
    by_id = [{row.row_id: row for row in rows} for rows in sides]
    both = [row_id for row_id in by_id[0] if all(row_id in side for side in by_id)]
    left_out = max(len(side) for side in by_id) - len(both)
    if left_out:
        note(f"left out: {counted(left_out, 'prompt')} above --max_prompt_seq_len with one of the tokenizers")
    if not both:
        raise ThreestepError("no prompt fits both models; raise --max_prompt_seq_len")
    return [[side[row_id] for row_id in both] for side in by_id]


def evaluate_perplexity(flags: Evaluated, together: Sharers = ALONE) -> list[str]:
    """The exponential of the mean loss per token, of responses or of text."""
    longest, seed = flags.data.rows.max_seq_len, flags.run.seed
    start_engine, folder = engine_of(flags), folder_of(flags, flags.evaluation.model_name_or_path)
    documents, media = _documents(flags, folder, longest)
    model = load(flags, folder, start_engine, media)
    losses, targets, accuracy = row_losses(
        model, documents, longest, flags.evaluation.per_device_eval_batch_size, flag="--max_seq_len", sharers=together
    )
    if not together.is_main:
        return []
    loss = ratio(losses, targets, seed)  # nats per token, resampled by rows
    perplexity = Figure(*(math.exp(end) for end in (loss.value, loss.low, loss.high)))
    figures = {"rows": len(losses), "tokens": sum(targets), "perplexity": perplexity, "loss": loss}
    return write(flags, [model.name], {**figures, "token_accuracy": accuracy}, None)


def _documents(flags: Evaluated, folder: ChatFolder, longest: int) -> tuple[list[Document], RunMedia | None]:
    """Step 1's sentences with their media, or blocks of text if --unsupervised_dataset_name is given."""
    if flags.texts.unsupervised_dataset_name is None:
        built = built_rows(flags, "sentences", folder)
        return [sentence_document(row) for row in built.rows], built.media
    blocks = build_unsupervised(flags.texts, flags.data, folder.tokenizer, longest, seed=flags.run.seed, log=note)
    targets = np.arange(longest) > 0
    rows = [SentenceRow(block.row_id, block.input_ids, targets) for block in blocks]
    return [sentence_document(row) for row in checked_rows(rows, flags)], None


def write(
    flags: Evaluated, paths: Sequence[str], figures: dict[str, Any], samples: list[dict[str, Any]] | None
) -> list[str]:
    """Write TASK.json and, for samples, TASK.jsonl and TASK.html; return the lines to print."""
    task, folder = flags.task, RunFolder(flags.run.output_dir, is_main_rank=True)
    plain = {name: asdict(value) if isinstance(value, Figure) else value for name, value in figures.items()}
    data_path = flags.data.source.data_path
    setting: dict[str, Any] = {"models": list(paths), "data_path": data_path, "split": flags.evaluation.split}
    shown = {
        name: f"{value:.3f}".removesuffix(".000") if isinstance(value, float) else str(value)
        for name, value in figures.items()
    }
    files = {}
    of_forms, of_rows = resolved_settings([flags.data.forms]), defaults_of([RowFlags])
    if samples is not None:
        setting |= {
            **asdict(flags.sampling),
            **{name: each for name, each in of_forms.items() if name not in of_rows},
            "val_samples": flags.evaluation.val_samples,
            "seed": flags.run.seed,
            "reward": flags.reward.reward,
        }
        setting["reward_model"] = flags.evaluation.reward_model
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        told = {name: setting[name] for name in ("reward", "reward_model", "split", "temperature", "seed")}
        title = f"{task} on {' '.join(data_path)}"
        html = page(title, shown, paths, samples, folder=folder.path, settings=told)
        files = {f"{task}.jsonl": lines, f"{task}.html": html}
    folder.write_json(f"{task}.json", {"task": task, **setting, **plain})
    for name, text in files.items():
        (folder.path / name).write_text(text, encoding="utf-8")
    written = ", ".join([f"{task}.json", *files])
    return [*(f"{name:<24} {value}" for name, value in shown.items()), f"written to {folder.path}: {written}"]
