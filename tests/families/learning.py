"""Are a family's adapters merged as PEFT applies them, do its optimizer steps equal plain PyTorch's, is PPO's first
ratio 1, is its reward model its own.

B sequences, M tokens to be predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from tests.families.answers import RIGHT, WRONG, Answer, asked, compared
from tests.families.builds import NoTokenizer, build
from tests.families.configs import PAD
from tests.families.reading import answers_of_lengths, load, saved
from tests.families.subjects import (
    LONG,
    Subject,
    alone,
    documents,
    drawn_ids,
    plain_scalar_model,
    true_logprobs,
    true_scores,
)
from threestep.plugins.routers.routers import RouterRecord, balance_of, balancing_loss, router_sums
from training.utils.base.errors import ThreestepError
from training.utils.contracts.token_rows import TokenRows
from training.utils.engine.config.arguments import ADAM_BETAS, EngineSettings
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.zero3 import full_tensors
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import load_scalar_model
from training.utils.models.layout_check import notes_on
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel

STEPS, RATE = 2, 3e-3
# Two optimizer steps on tiny gradients: AdamW makes steps of one size from them, whatever rounding left.
LOSS_TOLERANCE = 2e-3


def ask_lora(subject: Subject, place: Path) -> list[Answer]:
    """With adapters that do something: log-probabilities are PEFT's own, and so is the merged model."""
    model = load(subject.folder, subject.dtype, lora_dim=4, dropout=0.0)
    generator = torch.Generator().manual_seed(3)
    adapted = [part for name, part in model.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for part in adapted:
            part.copy_(torch.randn(part.shape, generator=generator) * 0.1)
    sequences = alone(documents(LONG))
    said = [note for note in notes_on(model) if "adapters" in note]
    truth = true_logprobs(model, sequences)
    moved = float((truth - true_logprobs(subject.model, sequences)).abs().max())
    with torch.no_grad():
        read = PolicyModel(model)(padded_rows(sequences, PAD)).logprobs_M.double()
    words = "; ".join([*said, f"adapters move {moved:.2g}"])
    answers = [compared("lora.read", float((read - truth).abs().max()), subject.tolerance, words)]
    try:
        folder = saved(model, {name: tensor.clone() for name, tensor in full_tensors(model, 0)}, place / "merged")
    except ThreestepError as sentence:  # once a run has trained, it is too late for one
        return [*answers, Answer("lora.merged", WRONG, None, str(sentence))]
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=subject.dtype).eval()
    difference = float((true_logprobs(again, sequences) - truth).abs().max())
    return [*answers, compared("lora.merged", difference, subject.tolerance * 5)]


def ask_ratio(subject: Subject, place: Path) -> list[Answer]:
    """With dropout 0, log-probabilities in train mode are those in eval mode: PPO's first ratio is 1."""
    model = load(subject.folder, subject.dtype, dropout=0.0)
    policy, rows = PolicyModel(model), padded_rows(alone(documents(LONG)), PAD)
    read = []
    for is_training in (False, True, True):
        policy.train(is_training)
        torch.manual_seed(len(read))
        with torch.no_grad():
            read.append(policy(rows).logprobs_M.double())
    difference = max(float((other - read[0]).abs().max()) for other in read[1:])
    return [compared("ratio", difference, subject.tolerance)]


def ask_routers(subject: Subject, place: Path) -> list[Answer]:
    """The balancing loss of a mixture of experts, with the model's own coefficient: it is transformers' own. Where none
    is added, the reason that a run gives."""
    model = load(subject.folder, subject.dtype)
    balance = balance_of(model, None)
    if balance is None or not balance.coefficient:
        return [] if balance is None else [Answer("routers", RIGHT, None, balance.said)]
    ids_1T = drawn_ids(19, seed=4).unsqueeze(0)
    record = RouterRecord(model)
    with torch.no_grad(), record.without_gradients():
        model.base_model(input_ids=ids_1T, use_cache=False)
        theirs = subject.model(input_ids=ids_1T, use_cache=False, output_router_logits=True).aux_loss
    sums = router_sums(record.take(), torch.ones(19, dtype=torch.int64), balance.top_k)
    difference = float((balancing_loss(sums.probability_E, sums) - theirs).abs())
    return [compared("routers", difference, max(subject.tolerance, 1e-4), balance.said)]


def engine_of(module: torch.nn.Module, ranks: Ranks, **settings: Any) -> TrainingEngine:
    recipe = EngineSettings(learning_rate=RATE, lr_scheduler_type="constant", **settings)
    return TrainingEngine(module, recipe, ranks, STEPS)


def losses_of(model: Any, loss_of: Callable[[], torch.Tensor]) -> list[float]:
    """Losses before and after each of STEPS steps of plain AdamW in float32, as the engine's settings above say."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=ADAM_BETAS, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return [*losses, float(loss_of())]


def engine_losses(engine: TrainingEngine, loss_of: Callable[[], torch.Tensor]) -> list[float]:
    losses = []
    for _ in range(STEPS):
        engine.train()
        loss = loss_of()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    with torch.no_grad():
        return [*losses, float(loss_of())]


def compared_losses(question: str, found: list[float], expected: list[float]) -> Answer:
    difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    said = f"losses {', '.join(f'{loss:.4f}' for loss in expected)}"
    return compared(question, difference if math.isfinite(difference) else math.nan, LOSS_TOLERANCE, said)


def ask_sft(subject: Subject, ranks: Ranks) -> list[Answer]:
    """Two optimizer steps of SFT on padded rows in float32, and of plain PyTorch, sequence by sequence."""
    sequences = alone(documents(LONG))
    rows = padded_rows(sequences, PAD)
    count = rows.target_ids_M.numel()
    engine = engine_of(PolicyModel(load(subject.folder, torch.float32, dropout=0.0)), ranks)
    found = engine_losses(engine, lambda: -engine(rows).logprobs_M.sum() / count)
    plain = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32).eval()

    def loss_of() -> torch.Tensor:
        total = torch.zeros(())
        for part in sequences:
            ids_1T = part.input_ids.unsqueeze(0)
            logits_TV = plain(input_ids=ids_1T, use_cache=False).logits[0].float()
            columns = torch.nonzero(part.is_target).flatten()
            total = total + functional.cross_entropy(logits_TV[columns - 1], part.input_ids[columns], reduction="sum")
        return total / count

    return [compared_losses("sft", found, losses_of(plain, loss_of))]


# The reward model


def ask_reward(subject: Subject, place: Path, ranks: Ranks) -> list[Answer]:
    """Scores in every layout, and two optimizer steps on pairs, where the family has a scalar head."""
    if subject.family.partition("+")[0] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return []
    folder = place / "scalar"
    build(subject.family, folder, scalar=True)
    settings = ModelSettings(str(folder), dropout=0.0)
    tokenizer: Any = NoTokenizer()
    model = load_scalar_model(settings, torch.float32, tokenizer, must_have_head=True).eval()
    scalar = ScalarModel(model)
    plain = plain_scalar_model(folder, torch.float32)

    def read(rows: TokenRows) -> torch.Tensor:
        with torch.no_grad():
            return scalar(rows)

    here = replace(subject, tolerance=1e-3)
    answers = answers_of_lengths(here, model, read, lambda shared: true_scores(plain, alone(shared)), "reward", LONG)
    return answers + asked("reward.steps", lambda: _reward_steps(settings, folder, ranks))


def _reward_steps(settings: ModelSettings, folder: Path, ranks: Ranks) -> list[Answer]:
    sequences = alone(documents(LONG))[:4]
    rows = padded_rows(sequences, PAD)
    tokenizer: Any = NoTokenizer()
    engine = engine_of(ScalarModel(load_scalar_model(settings, torch.float32, tokenizer, True)), ranks)

    def margin(score_B: torch.Tensor) -> torch.Tensor:
        return -functional.logsigmoid(score_B[0::2] - score_B[1::2]).mean()

    found = engine_losses(engine, lambda: margin(engine(rows)))
    plain = plain_scalar_model(folder, torch.float32)

    def loss_of() -> torch.Tensor:
        return margin(torch.stack([plain(input_ids=part.input_ids.unsqueeze(0)).logits[0, 0] for part in sequences]))

    return [compared_losses("reward.steps", found, losses_of(plain, loss_of))]
