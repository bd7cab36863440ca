"""What ranks do for the tests of models of images and text: SFT, DPO, reward models and step 3 of tiny ones, on rows
with images and rows without.

Report: {case: {"losses", "norms", "lacking", "said"}}; lacking: micro-batches of this rank that got an image because
another rank's had one. Of step 3: what `run_step3` returns. Its prompts have images or none, a reference is its own,
two epochs learn from each rollout. GRPO has a rule as its reward, PPO a reward model and a critic that start as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from tests.invariants import ppo_program
from tests.invariants.engine_program import column, engine_settings, keep_weights, lines_of, loop_of
from tests.support.lora_settings import lora_settings
from tests.support.objectives import objectives
from tests.support.shared_rows import sharing_rows
from tests.support.vision_models import FAMILIES, answers, sequence
from threestep.plugins.images.run.row_images import row_images, with_kept_features
from training.step1_sft.trainer import SftTrainer
from training.step2_dpo.trainer import DpoTrainer, Mismatch
from training.step2_reward.loss import LossOptions
from training.step2_reward.trainer import RewardTrainer
from training.step3_ppo.contracts.rollouts import PromptSource
from training.step3_ppo.contracts.settings import (
    LengthSettings,
)
from training.step3_ppo.experience.sequences import packed_sequences, unpacked_sequences
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.parts.assembly import with_guests
from training.step3_ppo.parts.settings import with_kept_media
from training.step3_ppo.roles.roles import RolesNeeded, Tokenizers, load_roles
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.seeds import seed_everything
from training.utils.contracts.rollout_engine import Ends, Sampling
from training.utils.contracts.rows import MarkedRow, PromptRow, ResponsesRow, SentenceRow
from training.utils.data.rows.documents import prompt_document, responses_document, sentence_document
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.training_engine import TrainingEngine
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import rank_share
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.models.own_forward import own_forward_of
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.preference.batches import mismatched, train_batches
from training.utils.preference.reference import known_references
from training.utils.rewards.weighted import Reward, Rewards
from training.utils.run.metrics import MetricsWriter
from training.utils.setup.guests import GuestFeatures
from training.utils.setup.setup import load_under, may_pack
from training.utils.setup.training_run import TrainingRun

SEED, STEPS, PER_STEP = 5, 3, 4
LONGEST = 40
VOCAB = 96
BETA = 0.3
FAMILY_NAMES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision", "gemma3", "idefics3", "smolvlm"),
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
    # As engine_program's cases have them.
    dtype: ClassVar[str] = "fp32"
    per_step: ClassVar[int] = PER_STEP
    max_tokens: ClassVar[None] = None
    shared: ClassVar[int] = 0
    pad_token_id: ClassVar[int] = 0
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
    2: ("qwen2_z2_all", "gemma3_z3_padded", "dpo_qwen2_z3_all", "ppo_qwen2_z3_all", "ppo_llava_z2_kept")
    + ("reward_qwen2_5_z3_all", "reward_lora_qwen2_z2", "shared_qwen2_z2_all"),
}


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool, folder: str, names: list[str]) -> dict[str, Any]:
    """folder: of the models of images."""
    shared = sharing_rows(ranks, ranks.world_size)
    return {name: run_case(name, Path(folder), out, shared if name in SHARED else ranks) for name in names}


def rows_of(family: Any) -> list[Any]:
    """Twelve rows: of an image, of a text, of two images in one turn, of images in two turns."""
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
    rows = []
    for row in rows_of(family):
        responses = (answer.input_ids.numpy().astype(np.int32) for answer in answers(family, 2 + row.row_id % 3, 6))
        rows.append(ResponsesRow(row.row_id, row.input_ids, tuple(responses), media=row.media))
    return rows


def marked_of(family: Any) -> list[Any]:
    """The same prompts, each with the first of its responses, every second one good."""
    return [
        MarkedRow(row.row_id, row.prompt_ids, row.response_ids[:1], media=row.media, is_good=row.row_id % 2 == 0)
        for row in pairs_of(family)
    ]


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
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
    loop = loop_of(case, model, ranks, packed, GuestFeatures(), longest, STEPS, media=images)
    folder = out / name
    with MetricsWriter(folder, ranks.is_main) as metrics:
        run = TrainingRun(engine, rows, [], loop, metrics)
        trainer = make_trainer(case, run)
        lacking = counted_lacking(trainer, of_pairs)
        trainer.train()
    keep_weights(engine, model, folder)
    lines = lines_of(folder, ranks)
    return {
        "losses": column(lines, "train/loss"), "norms": column(lines, "train/grad_norm"), "lacking": lacking,
        "said": said,
    }  # fmt: skip


def make_trainer(case: Case, run: Any) -> Any:
    if case.kind == "sft":
        return SftTrainer(run)
    if case.kind == "reward":
        return RewardTrainer(run, LossOptions())
    if case.kind == "kto":
        others = mismatched(run, LONGEST)
        beside = Mismatch(others, known_references(others, None))
        return DpoTrainer(run, known_references(run, None), objectives("kto", BETA), others=beside)
    return DpoTrainer(run, known_references(run, None), objectives("sigmoid", BETA))


def counted_lacking(trainer: Any, of_pairs: bool) -> int:
    """How many micro-batches of this rank have an image that none of their rows has."""
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
    settings = engine_settings(case, STEPS)
    seed_everything(SEED, ranks.rank)
    model = load_under(settings, ranks, lambda dtype: load(case, models, dtype, images))
    wrapped = (ScalarModel if case.kind == "reward" else PolicyModel)(model, sharing=ranks.sharing)
    return TrainingEngine(wrapped, settings, ranks, STEPS), model


def load(case: Case, models: Path, dtype: Any, images: Any) -> Any:
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


# Step 3.

PROMPTS, SAMPLES = 4, 3  # of a rollout, over all ranks
MAX_NEW_TOKENS, LONGEST_PROMPT = 5, 24
ENDS = tuple(range(2, 30))  # a third of the vocabulary, so that lengths differ
CLIP_REWARD = 5.0


def prompts_of(family: Any) -> list[Any]:
    """Of an image, of a text, of two images, of an image at the end."""
    shapes = [(2, "image 0", 3), (5,), (1, "image 1", 2, "image 3", 2), (3, "image 2"), (4,), (1, "image 3", 1)]
    rows = []
    for index in range(ppo_program.ITERATIONS * PROMPTS):
        tokens = sequence(family, *shapes[index % len(shapes)], seed=index)
        flipped = tokens.input_ids.flip(0).numpy().astype("int32")
        rows.append(PromptRow(index, flipped, f"prompt {index}", None, media=tokens.media))
    return rows


def score_of(response: list[int]) -> float:
    return float(sum(response) % 7)


def run_step3(case: Any, family: Any, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    """Report: of each iteration the prompts' rows, responses and scores of this rank, and the figures of learning."""
    trainer = step3_trainer(case, family, models, out, ranks)
    towers = counted_towers(trainer, family)
    told, lacking = [], 0
    for iteration in range(1, ppo_program.ITERATIONS + 1):
        prompts, seeds = trainer.next_prompts(iteration, batch=0)
        rollout = trainer.roll_out(prompts, seeds)
        lacking += lacking_of_rollout(trainer, rollout)
        experience = trainer.experience_of(trainer.score(prompts, rollout), iteration)
        responses = [rollout.response_of(index).tolist() for index in range(len(rollout.response_lengths_B))]
        told.append(
            {
                "pairs": [(prompts.rows[index // SAMPLES].row_id, ids) for index, ids in enumerate(responses)],
                "scores": experience.scored.scores_B.tolist(),
                "apart": float((rollout.sampled_logprobs_BR - experience.old_logprobs_BR).abs().max()),
                "figures": trainer.learn([experience], iteration),
            }
        )
    keep_weights(trainer.roles.actor, trainer.roles.actor_model, out)
    if trainer.roles.critic is not None:
        keep_weights(trainer.roles.critic, trainer.roles.critic_model, out / "critic")
    return {"iterations": told, "lacking": lacking, "towers": len(towers)}


def counted_towers(trainer: Any, family: Any) -> list[int]:
    """Grows by one whenever the tower of a model runs, for a case that keeps features of pictures."""
    kept, ran = trainer.settings.experience.layout.media.kept, []
    if kept is None:
        return ran
    ran += [0] * len(kept)  # those that the check has made
    roles = trainer.roles
    for model in (roles.actor_model, roles.reference.frozen.model, roles.critic_model, roles.reward_model.model):
        if model is not None:
            tower = replace(family, model=model).tower
            tower.register_forward_pre_hook(lambda *given: ran.append(1), with_kwargs=True)
    return ran


def lacking_of_rollout(trainer: Any, rollout: Any) -> int:
    """How many micro-batches of this rank have an image that none of their sequences has."""
    parts = [unpacked_sequences(part) for part in gathered(packed_sequences(rollout.sequences()))]
    sequences = [sequence for part in parts for sequence in part]
    shares = rank_share(sequences, trainer.settings.experience.layout, trainer.ranks.device)
    owned = [(rows, any(sequences[index].media for index in indices)) for indices, rows in shares]
    return sum(rows.media is not None and not own for rows, own in owned)


def step3_trainer(case: Any, family: Any, models: Path, out: Path, ranks: Any) -> Any:
    frozen = {"freeze_vision_tower": case.freeze_vision_tower, "freeze_projector": case.freeze_projector}
    flags = ppo_program.roles_flags(
        models, case.family, f"{case.family}_scalar", case.zero_stage, ppo_program.DECAY, dtype="fp32", **frozen
    )
    rows: list[Any] = prompts_of(family)
    images = row_images(rows, family.pixels, prompt_document)
    tokenizer: Any = Vocabulary()
    seed_everything(SEED, ranks.rank)
    needed = RolesNeeded(critic=case.kind == "ppo", reward_model=case.kind == "ppo")
    total = ppo_program.ITERATIONS * ppo_program.EPOCHS
    roles = load_roles(flags, Tokenizers(tokenizer, tokenizer), ranks, total, needed=needed, media=images)
    said: list[str] = []
    images = with_kept_media(images, case.kept_mb, roles, lambda text, is_main: said.append(text))
    if case.kept_mb:
        [readers] = said
        assert readers.endswith("actor, reference" + ", critic, reward model" * (case.kind == "ppo")), readers
    settings = settings_of(case, rows, images, ranks)
    engine, own = TransformersRollout(), own_forward_of(roles.actor_model)
    assert own is not None and engine.check(roles.whole_actor.lent(), own) == []
    roles = with_guests(roles, GuestFeatures(), path="", total_steps=1, seed=0)
    nobody: Any = SimpleNamespace()
    updates, metrics = Updates(roles, settings), MetricsWriter(out, is_main_rank=False)
    return PpoTrainer(roles, engine, PromptSource(rows, SEED), updates, nobody, settings, metrics)


def settings_of(case: Any, rows: list[Any], images: Any, ranks: Any) -> Any:
    def rule(prompts: Any, responses: Any, **columns: Any) -> list[float]:
        return [score_of([int(word) for word in text.split()]) for text in responses]

    def texts_of(rollout: Any) -> list[str]:
        return [" ".join(map(str, rollout.response_of(row).tolist())) for row in range(len(rollout.ended_B))]

    is_ppo = case.kind == "ppo"
    longest = max(LONGEST_PROMPT, *(len(row.flipped_prompt_ids) for row in rows)) + MAX_NEW_TOKENS
    per_rank = PROMPTS // ranks.world_size
    reward = Reward("model" if is_ppo else "rule", 1.0, None if is_ppo else rule)
    return ppo_program.settings_of(
        ranks, not is_ppo, PlanSettings(ranks.world_size, None, case.micro, case.packed, longest if case.packed else 0),
        Sampling(
            MAX_NEW_TOKENS, 1.0, 0, 1.0, end_token_id=1, pad_token_id=0, bad_words=((90,),), ends=Ends(token_ids=ENDS)
        ),
        prompts=per_rank, samples=SAMPLES, minibatch=per_rank * SAMPLES, seed=SEED, clip_reward=CLIP_REWARD,
        length=LengthSettings(MAX_NEW_TOKENS), reads_old_logprobs=True, media=images,
        rewards=Rewards((reward,), 60.0, texts_of=texts_of),
    )  # fmt: skip
