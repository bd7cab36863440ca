"""Step 3 with tiny models of images and text, for `images_program`: prompts with images and without, a reference of its
own, two epochs on each rollout. GRPO has a rule as its reward, PPO a reward model and a critic that start as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.invariants.ppo_program import CLIP_NORM, CLIP_RANGE_VALUE, DECAY, GAMMA, LAM

ITERATIONS, EPOCHS = 2, 2
PROMPTS, SAMPLES = 4, 3  # of a rollout, over all ranks
MAX_NEW_TOKENS, LONGEST_PROMPT = 5, 24
ENDS = tuple(range(2, 30))  # a third of the vocabulary, so that lengths differ
KL_COEF, CLIP_RANGE, CLIP_REWARD, ACTOR_RATE, CRITIC_RATE = 0.2, 0.1, 5.0, 3e-3, 1e-2


@dataclass(frozen=True)
class StandInTokenizer:
    """All that is asked of one: how many tokens it has, and which one pads."""

    pad_token_id: int = 0

    def __len__(self) -> int:
        return 96


def prompts_of(family: Any) -> list[Any]:
    """Of an image, of a text, of two images, of an image at the end."""
    from tests.support.vision_models import sequence
    from training.utils.contracts.rows import PromptRow

    shapes = [(2, "image 0", 3), (5,), (1, "image 1", 2, "image 3", 2), (3, "image 2"), (4,), (1, "image 3", 1)]
    rows = []
    for index in range(ITERATIONS * PROMPTS):
        tokens = sequence(family, *shapes[index % len(shapes)], seed=index)
        flipped = tokens.input_ids.flip(0).numpy().astype("int32")
        rows.append(PromptRow(index, flipped, f"prompt {index}", None, media=tokens.media))
    return rows


def score_of(response: list[int]) -> float:
    return float(sum(response) % 7)


def run_step3(case: Any, family: Any, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    """Report: of each iteration the prompts' rows, responses and scores of this rank, and the figures of learning."""
    from tests.invariants.engine_program import keep_weights

    trainer = make_trainer(case, family, models, out, ranks)
    towers = counted_towers(trainer, family)
    told, lacking = [], 0
    for iteration in range(1, ITERATIONS + 1):
        prompts, seeds = trainer.next_prompts(iteration, batch=0)
        rollout = trainer.roll_out(prompts, seeds)
        lacking += counted_lacking(trainer, rollout)
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
    from dataclasses import replace

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


def counted_lacking(trainer: Any, rollout: Any) -> int:
    """How many micro-batches of this rank have an image that none of their sequences has."""
    from training.step3_ppo.experience.sequences import packed_sequences, unpacked_sequences
    from training.utils.engine.ranks.collectives import gathered
    from training.utils.layout.trie import rank_share

    parts = [unpacked_sequences(part) for part in gathered(packed_sequences(rollout.sequences()))]
    sequences = [sequence for part in parts for sequence in part]
    shares = rank_share(sequences, trainer.settings.experience.layout, trainer.ranks.device)
    owned = [(rows, any(sequences[index].media for index in indices)) for indices, rows in shares]
    return sum(rows.media is not None and not own for rows, own in owned)


def make_trainer(case: Any, family: Any, models: Path, out: Path, ranks: Any) -> Any:
    from tests.invariants.images_program import SEED
    from threestep.plugins.images.run.row_images import row_images
    from training.step3_ppo.contracts.rollouts import PromptSource
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.step3_ppo.learning.learning import Updates
    from training.step3_ppo.parts.assembly import with_guests
    from training.step3_ppo.parts.settings import with_kept_media
    from training.step3_ppo.roles.roles import RolesNeeded, Tokenizers, load_roles
    from training.step3_ppo.trainer import PpoTrainer
    from training.utils.base.seeds import seed_everything
    from training.utils.data.rows.documents import prompt_document
    from training.utils.generation.decoding.hf import TransformersRollout
    from training.utils.models.own_forward import own_forward_of
    from training.utils.run.metrics import MetricsWriter
    from training.utils.setup.guests import GuestFeatures

    flags = RolesArguments(
        actor_model_name_or_path=str(models / case.family),
        critic_model_name_or_path=str(models / f"{case.family}_scalar"),
        actor_learning_rate=ACTOR_RATE,
        critic_learning_rate=CRITIC_RATE,
        actor_weight_decay=DECAY,
        critic_weight_decay=DECAY,
        actor_zero_stage=case.zero_stage,
        critic_zero_stage=case.zero_stage,
        actor_dropout=None,
        critic_dropout=None,
        dtype="fp32",
        max_grad_norm=CLIP_NORM,
        freeze_vision_tower=case.freeze_vision_tower,
        freeze_projector=case.freeze_projector,
    )
    rows: list[Any] = prompts_of(family)
    images = row_images(rows, family.pixels, prompt_document)
    tokenizer: Any = StandInTokenizer()
    seed_everything(SEED, ranks.rank)
    needed = RolesNeeded(critic=case.kind == "ppo", reward_model=case.kind == "ppo")
    total = ITERATIONS * EPOCHS
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
    from tests.invariants.images_program import SEED
    from tests.support.step3_records import made
    from training.step3_ppo.advantages import ESTIMATORS
    from training.step3_ppo.advantages.inputs import AdvantageSettings
    from training.step3_ppo.contracts.settings import (
        ExperienceSettings,
        KlSettings,
        LearningSettings,
        LengthSettings,
        PpoSettings,
    )  # fmt: skip
    from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
    from training.step3_ppo.losses import POLICY_LOSSES
    from training.step3_ppo.losses.losses import PolicyLossSettings
    from training.utils.contracts.rollout_engine import Ends, Sampling
    from training.utils.layout.planner import PlanSettings
    from training.utils.rewards.weighted import Reward, Rewards

    def rule(prompts: Any, responses: Any, **columns: Any) -> list[float]:
        return [score_of([int(word) for word in text.split()]) for text in responses]

    def texts_of(rollout: Any) -> list[str]:
        return [" ".join(map(str, rollout.response_of(row).tolist())) for row in range(len(rollout.ended_B))]

    is_ppo = case.kind == "ppo"
    longest = max(LONGEST_PROMPT, *(len(row.flipped_prompt_ids) for row in rows)) + MAX_NEW_TOKENS
    experience = made(
        ExperienceSettings,
        temperature=1.0,
        score_scale=None,
        clip_reward=CLIP_REWARD,
        samples_per_prompt=SAMPLES,
        estimator=ESTIMATORS["gae" if is_ppo else "grpo"],
        advantage=AdvantageSettings(GAMMA, LAM, norm_by_std=True),
        whiten_advantages=is_ppo,
        kl=KlSettings(KlControl(KL_COEF), in_loss=not is_ppo, estimator=KL_ESTIMATORS["k1" if is_ppo else "k3"]),
        length=LengthSettings(MAX_NEW_TOKENS),
        reads_old_logprobs=True,
        rank=ranks.rank,
        sharing=ranks.sharing.size,
        plan=PlanSettings(ranks.world_size, None, case.micro, case.packed, longest if case.packed else 0),
        pad_token_id=0,
        rewards=Rewards(
            (Reward("model" if is_ppo else "rule", 1.0, None if is_ppo else rule),), 60.0, texts_of=texts_of
        ),
        media=images,
    )
    learning = LearningSettings(
        policy_loss=POLICY_LOSSES["ppo"],
        policy=PolicyLossSettings(CLIP_RANGE, CLIP_RANGE),
        aggregation="token-mean",
        clip_range_value=CLIP_RANGE_VALUE,
        entropy_coef=0.0,
    )
    return made(
        PpoSettings,
        total_rollouts=ITERATIONS,
        prompts_per_batch=PROMPTS // ranks.world_size,
        generation_batches=1,
        sequences_per_minibatch=PROMPTS * SAMPLES // ranks.world_size,
        ppo_epochs=EPOCHS,
        critic_warmup=0,
        dynamic_sampling_tries=0,
        eval_interval=0,
        seed=SEED,
        sampling=Sampling(
            MAX_NEW_TOKENS, 1.0, 0, 1.0, end_token_id=1, pad_token_id=0, bad_words=((90,),), ends=Ends(token_ids=ENDS)
        ),
        experience=experience,
        learning=learning,
        evaluates_first=False,
    )
