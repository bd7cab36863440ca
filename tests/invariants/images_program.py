"""Launched on one or two ranks: SFT, DPO, reward models and step 3 of tiny models of images and text, on rows with
images and rows without.

Arguments: the folder of the models, a folder for the weights, and the cases. Report: {case: {"losses", "norms",
"lacking", "said"}}; lacking: micro-batches of this rank that got an image because another
rank's had one. Of step 3: what `images_step3.run_step3` returns.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.lora_settings import lora_settings

SEED, STEPS, PER_STEP = 5, 3, 4
LONGEST = 40
VOCAB = 96
BETA = 0.3
FAMILY_NAMES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "gemma3",
    "idefics3",
    "smolvlm",
    "internvl",
)  # of vision_models.FAMILIES
LORA_DIM, LORA_ALPHA = 2, 16.0


@dataclass(frozen=True)
class Case:
    """One run. micro: rows in one forward of one rank."""

    family: str
    zero_stage: int = 0
    micro: int = 2
    packed: bool = True
    freeze_vision_tower: bool = True
    freeze_projector: bool = False
    lora_dim: int = 0
    gradient_checkpointing: bool = False
    offload: bool = False
    kept_mb: int = 0
    kind: str = "sft"  # or "dpo" or "reward", on pairs, "kto", on marked responses, or "grpo" or "ppo", on prompts

    @property
    def is_step3(self) -> bool:
        return self.kind in ("grpo", "ppo")

    @property
    def start(self) -> str:
        """The folder of the model, which for a reward model has a head."""
        return f"{self.family}_scalar" if self.kind == "reward" else self.family


# Cases named shared_... have each row on both ranks.
SHARED = {
    "shared_qwen2_z2_all": Case("qwen2_vl", 2, micro=2, freeze_vision_tower=False),
    "shared_qwen2_5_z3_all": Case("qwen2_5_vl", 3, freeze_vision_tower=False, gradient_checkpointing=True),
    "shared_qwen3_z3_all": Case("qwen3_vl", 3, freeze_vision_tower=False),
    "shared_gemma3_z2_padded": Case("gemma3", 2, packed=False, freeze_vision_tower=False),
    "shared_gemma3_z0": Case("gemma3", 0),
    "shared_llava_z3_kept": Case("llava", 3, freeze_projector=True),
    "shared_llava_next_z2": Case("llava_next", 2),
    "shared_llava_onevision_z2": Case("llava_onevision", 2),
    "shared_idefics3_z2_kept": Case("idefics3", 2, kept_mb=1),
    "shared_smolvlm_z0_all": Case("smolvlm", 0, freeze_vision_tower=False),
    "shared_internvl_z2_all": Case("internvl", 2, freeze_vision_tower=False),
    "shared_dpo_qwen2_z3_all": Case("qwen2_vl", 3, freeze_vision_tower=False, kind="dpo"),
    "shared_kto_lora_qwen2_z2": Case("qwen2_vl", 2, lora_dim=LORA_DIM, kind="kto"),
    "shared_reward_qwen2_5_z3_all": Case("qwen2_5_vl", 3, freeze_vision_tower=False, kind="reward"),
    "shared_reward_gemma3_z2_all": Case("gemma3", 2, freeze_vision_tower=False, kind="reward"),
    "shared_grpo_qwen2_z3_all": Case("qwen2_vl", 3, micro=1, freeze_vision_tower=False, kind="grpo"),
    "shared_ppo_gemma3_z2_padded": Case("gemma3", 2, micro=2, packed=False, kind="ppo"),
}
# The micro-batches of one row leave some rank without an image where the other has one.
CASES = {
    1: {
        "qwen2_z0": Case("qwen2_vl"),
        "qwen2_z3_all": Case("qwen2_vl", 3, freeze_vision_tower=False, gradient_checkpointing=True),
        "llava_padded_z0": Case("llava", 0, micro=4, packed=False),
        "gemma3_z2_all": Case("gemma3", 2, freeze_vision_tower=False),
        "qwen2_5_z0_all": Case("qwen2_5_vl", 0, freeze_vision_tower=False),
        "qwen3_z3_offload": Case("qwen3_vl", 3, offload=True),
        "idefics3_z3_all": Case("idefics3", 3, freeze_vision_tower=False),
        "dpo_qwen2_z0": Case("qwen2_vl", 0, kind="dpo"),
        "kto_qwen2_z0_kept": Case("qwen2_vl", 0, kept_mb=1, kind="kto"),
        "kto_lora_qwen2_z0": Case("qwen2_vl", 0, lora_dim=LORA_DIM, kind="kto"),
        "dpo_qwen2_z0_kept": Case("qwen2_vl", 0, kept_mb=1, kind="dpo"),
        "grpo_qwen2_z0": Case("qwen2_vl", 0, kind="grpo"),
        "grpo_gemma3_z0_padded": Case("gemma3", 0, packed=False, kind="grpo"),
        "grpo_idefics3_z3_all": Case("idefics3", 3, freeze_vision_tower=False, kind="grpo"),
        "grpo_qwen2_z0_kept": Case("qwen2_vl", 0, kept_mb=1, kind="grpo"),
        "ppo_llava_z0_kept": Case("llava", 0, kept_mb=1, kind="ppo"),
        "ppo_idefics3_z0_all": Case("idefics3", 0, freeze_vision_tower=False, kind="ppo"),
        "lora_qwen2_z0": Case("qwen2_vl", 0, lora_dim=LORA_DIM),
        "reward_qwen2_z0": Case("qwen2_vl", 0, kind="reward"),
        "reward_idefics3_z3_all": Case("idefics3", 3, freeze_vision_tower=False, kind="reward"),
        "reward_gemma3_z0_padded": Case("gemma3", 0, packed=False, kind="reward"),
        "reward_qwen3_z2_all": Case("qwen3_vl", 2, freeze_vision_tower=False, kind="reward"),
    },
    2: {
        "qwen2_z0_all": Case("qwen2_vl", 0, micro=1, freeze_vision_tower=False),
        "qwen2_z2_all": Case("qwen2_vl", 2, micro=1, freeze_vision_tower=False),
        "qwen2_z3": Case("qwen2_vl", 3, micro=1),
        "llava_z3_frozen": Case("llava", 3, micro=1, freeze_projector=True),
        "qwen2_z3_all": Case("qwen2_vl", 3, micro=1, freeze_vision_tower=False, gradient_checkpointing=True),
        "gemma3_z2": Case("gemma3", 2, micro=1),
        "gemma3_z3_padded": Case("gemma3", 3, micro=1, packed=False),
        "qwen3_z3_all": Case("qwen3_vl", 3, micro=1, freeze_vision_tower=False),
        "qwen2_5_z2_offload": Case("qwen2_5_vl", 2, micro=1, offload=True),
        "dpo_qwen2_z3_all": Case("qwen2_vl", 3, micro=1, freeze_vision_tower=False, kind="dpo"),
        "dpo_gemma3_z2_padded": Case("gemma3", 2, micro=1, packed=False, kind="dpo"),
        "kto_lora_qwen2_z2": Case("qwen2_vl", 2, micro=1, lora_dim=LORA_DIM, kind="kto"),
        "kto_gemma3_z3_padded": Case("gemma3", 3, micro=1, packed=False, kind="kto"),
        "dpo_llava_z3": Case("llava", 3, micro=1, kind="dpo"),
        "idefics3_z2_kept": Case("idefics3", 2, micro=1, kept_mb=1),
        "grpo_qwen2_z3_all": Case("qwen2_vl", 3, micro=1, freeze_vision_tower=False, kind="grpo"),
        "grpo_qwen2_z2_all": Case("qwen2_vl", 2, micro=1, freeze_vision_tower=False, kind="grpo"),
        "grpo_gemma3_z2_padded": Case("gemma3", 2, micro=2, packed=False, kind="grpo"),
        "dpo_llava_next_z3": Case("llava_next", 3, micro=1, kind="dpo"),
        "grpo_llava_next_z2": Case("llava_next", 2, micro=1, kind="grpo"),
        "ppo_llava_z2_kept": Case("llava", 2, micro=1, kept_mb=1, kind="ppo"),
        "ppo_gemma3_z0_kept_padded": Case("gemma3", 0, packed=False, kept_mb=1, kind="ppo"),
        "ppo_smolvlm_z3_all": Case("smolvlm", 3, micro=1, freeze_vision_tower=False, kind="ppo"),
        "reward_llava_onevision_z2": Case("llava_onevision", 2, micro=1, kind="reward"),
        "grpo_llava_z0": Case("llava", 0, micro=1, kind="grpo"),
        "grpo_qwen3_z3": Case("qwen3_vl", 3, micro=1, kind="grpo"),
        "grpo_qwen2_5_z2": Case("qwen2_5_vl", 2, micro=1, kind="grpo"),
        "ppo_qwen2_z3_all": Case("qwen2_vl", 3, micro=1, freeze_vision_tower=False, kind="ppo"),
        "ppo_gemma3_z2_padded": Case("gemma3", 2, micro=2, packed=False, kind="ppo"),
        "ppo_qwen3_z0": Case("qwen3_vl", 0, micro=1, kind="ppo"),
        "lora_qwen2_z3": Case("qwen2_vl", 3, micro=1, lora_dim=LORA_DIM),
        "reward_qwen2_z0_all": Case("qwen2_vl", 0, micro=1, freeze_vision_tower=False, kind="reward"),
        "reward_gemma3_z2_all": Case("gemma3", 2, micro=1, freeze_vision_tower=False, kind="reward"),
        "reward_qwen2_5_z3_all": Case("qwen2_5_vl", 3, micro=1, freeze_vision_tower=False, kind="reward"),
        "reward_llava_z3_padded": Case("llava", 3, micro=1, packed=False, kind="reward"),
        "reward_lora_qwen2_z2": Case("qwen2_vl", 2, micro=1, lora_dim=LORA_DIM, kind="reward"),
    },
}
# The long form has each family under each stage of ZeRO on one rank and on two, the tower in training but for LLaVA's:
# its last layer or norm is read by nothing, and decays under ZeRO while plain AdamW leaves it.
for cases in CASES.values():
    for family, stage in product(FAMILY_NAMES, (0, 2, 3)):
        if not any((case.family, case.zero_stage, case.kind) == (family, stage, "sft") for case in cases.values()):
            cases[f"{family}_z{stage}_each"] = Case(family, stage, micro=1, freeze_vision_tower="llava" in family)
CASES[2] |= SHARED
ORDINARY: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        "qwen2_z2_all",
        "gemma3_z3_padded",
        "dpo_qwen2_z3_all",
        "ppo_qwen2_z3_all",
        "ppo_llava_z2_kept",
        "reward_qwen2_5_z3_all",
        "reward_lora_qwen2_z2",
        "shared_qwen2_z2_all",
    ),
}


def main(models: Path, out: Path, names: list[str]) -> None:
    from tests.distributed.launch import report
    from tests.support.shared_rows import sharing_rows
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group() as ranks:
        shared = sharing_rows(ranks, ranks.world_size)
        report({name: run_case(name, models, out, shared if name in SHARED else ranks) for name in names})


def rows_of(family: Any) -> list[Any]:
    """Twelve rows: of an image, of a text, of two images in one turn, of images in two turns."""
    import numpy as np

    from tests.support.vision_models import sequence
    from training.utils.contracts.rows import SentenceRow

    shapes = [(2, "image 0", 7), (9,), (1, "image 1", 2, "image 3", 5), (4,), (8,), (2, "image 2", 5, "image 0", 6)]
    rows = []
    for index in range(STEPS * PER_STEP):
        tokens = sequence(family, *shapes[index % len(shapes)], seed=index)
        mask = np.zeros(len(tokens), dtype=bool)
        mask[-2 - index % 2 :] = True
        rows.append(SentenceRow(index, tokens.input_ids.numpy().astype(np.int32), mask, media=tokens.media))
    return rows


def pairs_of(family: Any) -> list[Any]:
    """The same prompts, each with two responses."""
    import numpy as np

    from tests.support.vision_models import answers
    from training.utils.contracts.rows import ResponsesRow

    rows = []
    for row in rows_of(family):
        responses = (answer.input_ids.numpy().astype(np.int32) for answer in answers(family, 2 + row.row_id % 3, 6))
        rows.append(ResponsesRow(row.row_id, row.input_ids, tuple(responses), media=row.media))
    return rows


def marked_of(family: Any) -> list[Any]:
    """The same prompts, each with the first of its responses, every second one good."""
    from training.utils.contracts.rows import MarkedRow

    return [
        MarkedRow(row.row_id, row.prompt_ids, row.response_ids[:1], media=row.media, is_good=row.row_id % 2 == 0)
        for row in pairs_of(family)
    ]


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    from functools import partial

    from tests.invariants.engine_program import keep_weights
    from tests.invariants.images_step3 import run_step3
    from tests.support.data_flags import data_flags
    from tests.support.vision_models import FAMILIES
    from threestep.plugins.images.run.row_images import row_images, with_kept_features
    from training.utils.data.rows.documents import responses_document, sentence_document
    from training.utils.engine.config.arguments import EngineArguments
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_arguments import RunArguments
    from training.utils.run.trackers import LogArguments
    from training.utils.setup.guests import GuestFeatures
    from training.utils.setup.one_model_run import loop_settings
    from training.utils.setup.setup import may_pack
    from training.utils.setup.training_run import TrainingRun

    case = CASES[ranks.world_size][name]
    family, of_pairs = FAMILIES[case.family](), case.kind != "sft"
    if case.is_step3:
        return run_step3(case, family, models, out / name, ranks)
    rows = {"sft": rows_of, "kto": marked_of}.get(case.kind, pairs_of)(family)
    longest = max(LONGEST, *(len(row.input_ids) for row in rows)) if not of_pairs else LONGEST
    document_of = partial(responses_document, are_targets=True) if of_pairs else sentence_document
    images = row_images(rows, family.pixels, document_of)
    engine, model = make_engine(case, models, ranks, images)
    said: list[str] = []
    read: Any = engine if case.kind == "reward" else lambda token_rows: engine(token_rows).logprobs_M
    images = with_kept_features(images, case.kept_mb, model, engine, read=read)
    packed = may_pack(
        not case.packed, model, engine, read, longest_tokens=longest, log=lambda text, is_main: said.append(text)
    )
    assert packed is case.packed, said
    flags: Any = SimpleNamespace(
        run=RunArguments(seed=SEED),
        engine=EngineArguments(per_device_train_batch_size=case.micro, max_tokens_per_micro_batch=None),
        data=data_flags(max_seq_len=longest),
        reporting=LogArguments(),
        guests=GuestFeatures(),
    )
    loop = loop_settings(flags, (STEPS, PER_STEP), model, packed, ranks=ranks, pad_token_id=0)
    loop = replace(loop, eval_interval=0, media=images)
    folder = out / name
    with MetricsWriter(folder, ranks.is_main) as metrics:
        run = TrainingRun(engine, rows, [], loop, metrics)
        trainer = make_trainer(case, run)
        lacking = counted_lacking(trainer, of_pairs)
        trainer.train()
    keep_weights(engine, model, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if ranks.is_main else []
    return {
        "losses": [line["train/loss"] for line in lines if "train/loss" in line],
        "norms": [line["train/grad_norm"] for line in lines if "train/grad_norm" in line],
        "lacking": lacking,
        "said": said,
    }


def make_trainer(case: Case, run: Any) -> Any:
    from tests.support.objectives import objectives
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer, Mismatch
    from training.step2_reward.loss import LossOptions
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.preference.batches import mismatched
    from training.utils.preference.reference import known_references

    if case.kind == "sft":
        return SftTrainer(run)
    if case.kind == "reward":
        return RewardTrainer(run, LossOptions())
    if case.kind == "kto":
        others = mismatched(run, LONGEST)
        references = known_references(run, None), Mismatch(others, known_references(others, None))
        return DpoTrainer(run, references[0], objectives("kto", BETA), others=references[1])
    return DpoTrainer(run, known_references(run, None), objectives("sigmoid", BETA))


def counted_lacking(trainer: Any, of_pairs: bool) -> int:
    """How many micro-batches of this rank have an image that none of their rows has."""
    from training.utils.layout.order import ShuffledStream
    from training.utils.preference.batches import train_batches

    run, count = trainer.run, 0
    taken = ShuffledStream(len(run.train_rows), SEED).take(0, STEPS * PER_STEP)
    for start in range(0, len(taken), PER_STEP):
        step = taken[start : start + PER_STEP]
        if of_pairs:
            are_targets = not hasattr(trainer, "read")  # a reward model predicts no tokens
            parts = [(batch.ranked.rows, batch) for batch in train_batches(run, step, are_targets).batches]
        else:
            batch = [run.train_rows[index] for index in step]
            parts = [(part.rows, part) for part in trainer._micro_batches(batch, run.settings.train_plan)]
        for token_rows, part in parts:
            own = any(segment.tokens.media for document in part.documents for segment in document.segments)
            count += token_rows.media is not None and not own
    return count


def make_engine(case: Case, models: Path, ranks: Any, images: Any) -> tuple[Any, Any]:
    from tests.invariants.plain import Recipe
    from training.utils.base.seeds import seed_everything
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.token_model import PolicyModel, ScalarModel
    from training.utils.setup.setup import load_under

    recipe = Recipe(total_steps=STEPS)
    settings = EngineSettings(
        dtype="fp32",
        zero_stage=case.zero_stage,
        offload=case.offload,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        num_warmup_steps=recipe.num_warmup_steps,
    )
    seed_everything(SEED, ranks.rank)
    model = load_under(settings, ranks, lambda dtype: load(case, models, dtype, images))
    wrapped = (ScalarModel if case.kind == "reward" else PolicyModel)(model, sharing=ranks.sharing)
    return TrainingEngine(wrapped, settings, ranks, STEPS), model


def load(case: Case, models: Path, dtype: Any, images: Any) -> Any:
    from training.utils.loading.models import load_causal_lm, load_scalar_model

    named = ("freeze_vision_tower", "freeze_projector", "lora_dim", "gradient_checkpointing")
    flags = {name: getattr(case, name) for name in named}
    start = lora_settings(str(models / case.start), takes_media=True, lora_alpha=LORA_ALPHA, **flags)
    if case.kind == "reward":
        return load_scalar_model(start, dtype, Vocabulary(), must_have_head=True, media=images)
    return load_causal_lm(start, dtype, VOCAB, media=images)


class Vocabulary:
    """What of a tokenizer a scalar model asks for."""

    pad_token_id = 0

    def __len__(self) -> int:
        return VOCAB


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
