"""What ranks do for the tests of step 3 (launched.py): run its parts at several ZeRO stages and report by section."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.invariants import tiny
from tests.support.data_flags import with_flags
from tests.support.guests import balancing
from tests.support.shared_rows import sharing_rows
from tests.support.step3_records import changed, made
from threestep.plugins.mismatch.correction import MismatchCorrection
from threestep.plugins.mismatch.settings import MismatchSettings
from threestep.plugins.parallel_thinking.form import ParallelPaths
from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling
from threestep.plugins.pretraining_loss.learnt_texts import LearntTexts
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageSettings
from training.step3_ppo.contracts.rollouts import PromptSource
from training.step3_ppo.contracts.settings import (
    ExperienceSettings,
    KlSettings,
    LearningSettings,
    LengthSettings,
    PpoSettings,
)
from training.step3_ppo.experience.description import described
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.losses import POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings
from training.step3_ppo.parts.assembly import with_guests
from training.step3_ppo.parts.evaluation import Evaluator, HeldOut
from training.step3_ppo.roles.roles import RolesNeeded, Tokenizers, load_roles
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.seeds import seed_everything
from training.utils.contracts.documents import join
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.training_engine import TrainingEngine
from training.utils.flags.added import added_flags
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import Readout
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import RunFolder

SEED = 11
PROMPTS_PER_ROLLOUT = 8  # over all ranks
ITERATIONS = 2
EPOCHS = 2
MAX_NEW_TOKENS = 14
TEMPERATURE = 0.8
SAMPLES, ENTROPY_COEF = 3, 0.03  # of GRPO
KL_COEF, CLIP_REWARD, CLIP_RANGE, CLIP_RANGE_VALUE, GAMMA, LAM, UNSUP_COEF = 0.2, 0.8, 0.1, 0.2, 0.98, 0.9, 0.7
ACTOR_RATE, CRITIC_RATE, DECAY, CLIP_NORM = 3e-3, 1e-2, 0.05, 2.0
STAGES = (0, 2, 3)
LONGEST = 9 + MAX_NEW_TOKENS  # tokens of the longest sequence there can be; packed, of a row
# How whole iterations are computed: by stage, padded or packed.
LAYOUTS = {**{str(stage): (stage, False) for stage in STAGES}, "0_packed": (0, True), "3_packed": (3, True)}
GRPO_LAYOUTS = {"0_two_epochs": (0, False, 2), "3_packed": (3, True, 1)}  # stage, packed, epochs
PATHS_LAYOUTS = {"0_packed": (0, True), "0_padded": (0, False), "3_packed": (3, True)}
MINIBATCH_LAYOUTS = {"2": (2, False), "0_packed": (0, True)}
FIRST_MINIBATCHES = {"0_fp32": (0, "fp32"), "3_fp32": (3, "fp32"), "0_bf16": (0, "bf16")}
# Stage, packed, GRPO (no critic), the actor's activations recomputed, and whether it learns from what it read.
REUSED = {
    "0_packed": (0, True, False, False, True),
    "1_recomputed": (1, False, False, True, True),
    "2": (2, False, False, False, True),
    "0_grpo": (0, True, True, False, True),
    "1_values": (1, True, False, False, False),
    "3_values": (3, False, False, True, False),
}
ACTORS = ("actor", "absolute")
# Mixtures of experts as actor and critic: stage, packed.
MIXTURE_LAYOUTS = {
    f"{stage}_{'packed' if packed else 'padded'}": (stage, packed) for stage in range(4) for packed in (False, True)
}
EVAL_PROMPTS = 5  # not a multiple of two ranks

# (ranks, those that share a row)
World = tuple[int, int]
ONE, TWO, SHARED, FOUR_SHARED, TWO_GROUPS = (1, 1), (2, 1), (2, 2), (4, 4), (4, 2)
# The cases of a section: of the long form, and of every run.
EVERY: dict[str, dict[World, Collection[str]]] = {
    "iterations": {
        ONE: LAYOUTS, TWO: LAYOUTS, SHARED: LAYOUTS, FOUR_SHARED: ("3_packed", "0"), TWO_GROUPS: ("3_packed",)
    },
    "mixtures": {
        ONE: MIXTURE_LAYOUTS, TWO: MIXTURE_LAYOUTS, SHARED: ("1_padded", "0_packed", "3_packed"),
        FOUR_SHARED: ("3_packed",),
    },
    "first_minibatch": {ONE: FIRST_MINIBATCHES, TWO: FIRST_MINIBATCHES},
    "grpo": {world: GRPO_LAYOUTS for world in (ONE, TWO, SHARED, FOUR_SHARED)} | {TWO_GROUPS: ("3_packed",)},
    "paths": {world: PATHS_LAYOUTS for world in (ONE, TWO, SHARED, FOUR_SHARED)},
    "minibatches": {ONE: MINIBATCH_LAYOUTS, TWO: MINIBATCH_LAYOUTS},
    "reused": {ONE: REUSED, TWO: REUSED},
    "nothing_to_learn": {ONE: ("0", "2", "3"), TWO: ("0", "2", "3")},
    "gathers": {TWO: ("2", "12")},
    "lora": {world: ("0", "3") for world in (ONE, TWO, SHARED, FOUR_SHARED)},
    "layouts_of_prompts": {ONE: ACTORS},
}  # fmt: skip
ORDINARY: dict[str, dict[World, Collection[str]]] = {
    "iterations": {ONE: ("3_packed",), TWO: ("0", "3_packed"), SHARED: ("3_packed",)},
    "mixtures": {ONE: ("0_padded",), TWO: ("3_packed",)},
    "first_minibatch": {ONE: ("0_fp32", "0_bf16"), TWO: ("3_fp32",)},
    "grpo": {ONE: ("0_two_epochs",), TWO: ("3_packed",)},
    "paths": {ONE: ("0_packed",), TWO: ("3_packed",)},
    "minibatches": {ONE: ("0_packed",), TWO: ("0_packed",)},
    "reused": {ONE: ("0_packed", "0_grpo", "1_values"), TWO: ("1_recomputed", "2", "3_values")},
    "nothing_to_learn": {ONE: ("0",), TWO: ("3",)},
    "gathers": EVERY["gathers"],
    "lora": {ONE: ("0",), TWO: ("3",)},
    "layouts_of_prompts": EVERY["layouts_of_prompts"],
}


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool, size: int) -> dict[str, Any]:
    """Run step 3's parts, each row over `size` ranks. Return {section: {...}}, by the cases' names."""
    cases, sharing = EVERY if is_long else ORDINARY, sharing_rows(ranks, size) if size > 1 else ranks
    world = (ranks.world_size, size)
    return {name: act(models, out, sharing, cases[name].get(world, ())) for name, act in SECTIONS.items()}


def make_trainer(
    models: Path,
    out: Path,
    ranks: Any,
    stage: int,
    *,
    lora: dict[str, Any] | None = None,
    decay: float = DECAY,
    epochs: int = EPOCHS,
    micro: int = 3,
    max_tokens: int | None = 45,
    packed: bool = False,
    with_texts: bool = True,
    dtype: str = "fp32",
    actor: str = "actor",
    critic: str = "scalar",
    grpo: bool = False,
    minibatches: int = 1,
    changed: Callable[[Any], Any] = lambda settings: settings,
) -> Any:
    """A PpoTrainer on fresh models, by the same parts as the program's own assembly; the one before is released.
    changed: of the models' flags."""
    ranks.leaving.close()  # DeepSpeed collects garbage at each engine, and would go through all that are left
    flags = roles_flags(models, actor, critic, stage, decay, dtype=dtype)
    roles = load_roles(
        changed(flags),
        Tokenizers(tiny.StandInTokenizer(), tiny.StandInTokenizer()),
        ranks,
        total_steps=ITERATIONS * epochs * minibatches,
        needed=RolesNeeded(critic=not grpo, added=with_flags(added_flags("step3_ppo")(), **(lora or {}))),
    )
    roles = with_guests(roles, balancing(), path="", total_steps=1, seed=0)
    samples, per_rank = SAMPLES if grpo else 1, PROMPTS_PER_ROLLOUT // ranks.world_size
    settings = settings_of(
        ranks, grpo, PlanSettings(ranks.world_size, max_tokens, micro, packed, LONGEST if packed else 0),
        Sampling(MAX_NEW_TOKENS, TEMPERATURE, 0, 1.0, tiny.END, tiny.PAD),
        prompts=per_rank, samples=samples, minibatch=per_rank * samples // minibatches, epochs=epochs, seed=SEED,
        aggregation="seq-mean-token-mean" if grpo else "token-mean", entropy_coef=ENTROPY_COEF if grpo else 0.0,
        correction=MismatchCorrection(MismatchSettings("none")),  # its measures alone
        length=LengthSettings(MAX_NEW_TOKENS, mask_truncated_responses=grpo),
        reads_old_logprobs=not grpo or epochs > 1,
    )  # fmt: skip
    metrics = MetricsWriter(out / "metrics", is_main_rank=False)
    rollout_engine = TransformersRollout()
    evaluator = Evaluator(
        roles=roles,
        rollout_engine=rollout_engine,
        held_out=HeldOut(tiny.prompts(EVAL_PROMPTS, seed=4), prompts_per_batch=2),
        tokenizer=tiny.StandInTokenizer(),
        checker=None,
        settings=settings,
        metrics=metrics,
        folder=RunFolder(out, ranks.is_main),
    )
    beside = [LearntTexts(texts(), UNSUP_COEF, settings.seed)] if with_texts else []
    updates = Updates(roles, settings, *beside)
    return PpoTrainer(roles, rollout_engine, train_prompts(), updates, evaluator, settings, metrics)


def roles_flags(models: Path, actor: str, critic: str, stage: int, decay: float, **more: Any) -> RolesArguments:
    return RolesArguments(
        actor_model_name_or_path=str(models / actor), critic_model_name_or_path=str(models / critic),
        actor_learning_rate=ACTOR_RATE, critic_learning_rate=CRITIC_RATE, actor_weight_decay=decay,
        critic_weight_decay=decay, actor_zero_stage=stage, critic_zero_stage=stage, actor_dropout=None,
        critic_dropout=None, max_grad_norm=CLIP_NORM, **more,
    )  # fmt: skip


def settings_of(
    ranks: Any, grpo: bool, plan: PlanSettings, sampling: Sampling, *, prompts: int, samples: int, minibatch: int,
    seed: int, epochs: int = EPOCHS, aggregation: str = "token-mean", entropy_coef: float = 0.0, **experience: Any,
) -> PpoSettings:  # fmt: skip
    """PPO's settings, or GRPO's. prompts, minibatch: of a rank, in a rollout and in a minibatch. experience:
    fields of its settings, besides those that follow from the others."""
    given = {
        "temperature": sampling.temperature, "score_scale": None, "clip_reward": CLIP_REWARD,
        "samples_per_prompt": samples, "estimator": ESTIMATORS["grpo" if grpo else "gae"],
        "advantage": AdvantageSettings(GAMMA, LAM, norm_by_std=True), "whiten_advantages": not grpo,
        "kl": KlSettings(KlControl(KL_COEF), in_loss=grpo, estimator=KL_ESTIMATORS["k3" if grpo else "k1"]),
        "rank": ranks.rank, "sharing": ranks.sharing.size, "plan": plan, "pad_token_id": sampling.pad_token_id,
    }  # fmt: skip
    learning = LearningSettings(
        policy_loss=POLICY_LOSSES["ppo"], policy=PolicyLossSettings(CLIP_RANGE, CLIP_RANGE), aggregation=aggregation,
        clip_range_value=CLIP_RANGE_VALUE, entropy_coef=entropy_coef,
    )  # fmt: skip
    return made(
        PpoSettings, total_rollouts=ITERATIONS, prompts_per_batch=prompts, generation_batches=1,
        sequences_per_minibatch=minibatch, ppo_epochs=epochs, critic_warmup=0, dynamic_sampling_tries=0,
        eval_interval=0, seed=seed, sampling=sampling, experience=made(ExperienceSettings, **{**given, **experience}),
        learning=learning, evaluates_first=True,
    )  # fmt: skip


def train_prompts() -> Any:
    return PromptSource(tiny.prompts(ITERATIONS * PROMPTS_PER_ROLLOUT, seed=3), SEED)


def texts() -> list:
    return tiny.text_blocks(10, seed=5)


def experienced(trainer: Any, iteration: int) -> Any:
    """Parts 1 to 6 of one iteration."""
    prompts, seeds = trainer.next_prompts(iteration, batch=0)
    rollout = trainer.roll_out(prompts, seeds)
    return trainer.experience_of(trainer.score(prompts, rollout), iteration)


def iterations(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Whole iterations, evaluation before and after."""
    found = {}
    for layout in cases:
        stage, packed = LAYOUTS[layout]
        trainer = make_trainer(models, out, ranks, stage, packed=packed)
        before = trainer.evaluator.evaluate(0).scores
        told = iterated(trainer, out, f"z{layout}")
        found[layout] = {"before": before, "after": trainer.evaluator.evaluate(ITERATIONS).scores, "iterations": told}
    return found


def mixtures(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """The same with mixtures of experts, without evaluation."""
    which: dict[str, Any] = {"actor": "mixture", "critic": "mixture_scalar"}
    found = {}
    for layout in cases:
        stage, packed = MIXTURE_LAYOUTS[layout]
        trainer = make_trainer(models, out, ranks, stage, packed=packed, **which)
        found[layout] = iterated(trainer, out, f"mixture_{layout}")
    return found


def iterated(trainer: Any, out: Path, name: str) -> list[dict[str, Any]]:
    """Run whole iterations; write the weights at the end to actor_NAME.pt and critic_NAME.pt."""
    told = []
    for iteration in range(1, ITERATIONS + 1):
        experience = experienced(trainer, iteration)
        rollout, advantages_BR = experience.rollout, experience.advantages_BR
        inside = advantages_BR[rollout.response_mask_BR].double()
        pairs = [
            (rollout.prompt_of(index).tolist(), rollout.response_of(index).tolist())
            for index in range(len(rollout.response_lengths_B))
        ]
        apart = (rollout.sampled_logprobs_BR - experience.old_logprobs_BR).abs().max()
        everyone = gathered(
            {
                "pairs": pairs,
                "apart": float(apart),
                "scores": experience.scored.scores_B.tolist(),
                "moments": [inside.numel(), float(inside.sum()), float(inside.square().sum())],
                "ended": rollout.ended_B.tolist(),
            }
        )
        told.append({"ranks": everyone, "figures": trainer.learn([experience], iteration)})
    save_weights(trainer, out, name)
    return told


def first_minibatch(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """One update an iteration: its figures are those of the first minibatch of the first epoch."""
    found = {}
    for case in cases:
        stage, dtype = FIRST_MINIBATCHES[case]
        trainer = make_trainer(models, out, ranks, stage, epochs=1, micro=2, with_texts=False, dtype=dtype)
        figures = []
        for iteration in range(1, ITERATIONS + 1):
            experience = experienced(trainer, iteration)
            figures.append(
                {
                    **trainer.learn([experience], iteration),
                    **described([experience], trainer.settings.experience),
                }
            )
        found[case] = figures
    return found


def grpo(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Iterations of GRPO: no critic, samples of a prompt, KL and entropy in the loss, cut responses left out of it.
    With one epoch the old log-probabilities are left out too."""
    found = {}
    for layout in cases:
        stage, packed, epochs = GRPO_LAYOUTS[layout]
        trainer = make_trainer(models, out, ranks, stage, epochs=epochs, packed=packed, with_texts=False, grpo=True)
        told = []
        for iteration in range(1, ITERATIONS + 1):
            experience = experienced(trainer, iteration)
            rollout = experience.rollout
            told.append(
                {
                    "ranks": gathered(
                        {
                            "pairs": [
                                (rollout.prompt_of(index).tolist(), rollout.response_of(index).tolist())
                                for index in range(len(rollout.response_lengths_B))
                            ],
                            "ended": rollout.ended_B.tolist(),
                            "scores": experience.scored.scores_B.tolist(),
                        }
                    ),
                    "read_old": experience.old_logprobs_BR is not None,
                    "figures": trainer.learn([experience], iteration),
                }
            )
        save_weights(trainer, out, layout, "grpo_")
        found[layout] = told
    return found


def paths(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Iterations of GRPO whose responses part into two paths, drawn side by side and learned in their layout."""
    found, tags = {}, ParallelTags(*tiny.TAGS)
    for layout in cases:
        stage, packed = PATHS_LAYOUTS[layout]
        how: dict[str, Any] = {"packed": packed, "with_texts": False, "grpo": True, "actor": "thinker"}
        trainer = make_trainer(models, out, ranks, stage, max_tokens=90, changed=_slower, **how)
        sampling = dataclasses.replace(trainer.settings.drawing.sampling, form=ParallelPaths(PathSampling(tags, 2, 5)))
        plan = dataclasses.replace(trainer.settings.experience.layout.plan, form=tags)
        # Of this seed no number is so near to the border of two tokens that what Adam makes of rounding decides.
        trainer.settings = changed(trainer.settings, sampling=sampling, plan=plan, seed=SEED + 1)
        trainer.updates.settings = trainer.settings
        told = []
        for iteration in range(1, ITERATIONS + 1):
            experience_of_all = experienced(trainer, iteration)
            rollout = experience_of_all.rollout
            read = experience_of_all.old_logprobs_BR, rollout.drawn
            own = {
                "responses": [rollout.response_of(row).tolist() for row in range(len(rollout.ended_B))],
                "with_paths": int(rollout.inserted_BR.any(dim=1).sum()),
                "apart": float((read[0] - read[1].logprobs_BR)[read[1].mask_BR].abs().max()),
            }
            told.append({"ranks": gathered(own), "figures": trainer.learn([experience_of_all], iteration)})
        save_weights(trainer, out, layout, "paths_")
        found[layout] = told
    return found


def _slower(flags: Any) -> Any:
    """At the actor's usual rate, the second iteration opens no block."""
    return dataclasses.replace(flags, actor_learning_rate=ACTOR_RATE / 10)


def save_weights(trainer: Any, out: Path, name: str, prefix: str = "") -> None:
    """Save the actor's and the critic's weights as PREFIXactor_NAME.pt and PREFIXcritic_NAME.pt, or the actor's."""
    roles = trainer.roles
    for role, engine, model in (
        ("actor", roles.actor, roles.actor_model),
        ("critic", roles.critic, roles.critic_model),
    ):
        state = engine.full_state(model) if engine is not None else None
        if state is not None and roles.actor.ranks.is_main:
            torch.save(state, out / f"{prefix}{role}_{name}.pt")


def minibatches(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Several minibatches a rollout: which sequences meet in one, and which rank computes them, changes nothing."""

    found = {}
    for layout in cases:
        stage, packed = MINIBATCH_LAYOUTS[layout]
        trainer = make_trainer(models, out, ranks, stage, packed=packed, minibatches=4)
        found[layout] = [trainer.learn([experienced(trainer, i)], i) for i in range(1, ITERATIONS + 1)]
        save_weights(trainer, out, layout, "minibatches_")
    return found


def nothing_to_learn(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Advantages 0 and returns equal to the values: how far the weights of a fresh actor and critic move.

    One sequence a forward, so that the values of the update are those of the experience to the bit: Adam would blow
    any rounding up to a whole step. `moved_by_advantages` is the same with the advantages and returns as they are.
    """
    found: dict[str, Any] = {}
    for stage in cases:
        for kind in ("moved", "moved_by_advantages"):
            trainer = make_trainer(
                models, out, ranks, int(stage), decay=0.0, micro=1, max_tokens=None, with_texts=False
            )
            experience = experienced(trainer, 1)
            if kind == "moved":
                experience = dataclasses.replace(
                    experience,
                    advantages_BR=torch.zeros_like(experience.advantages_BR),
                    returns_BR=experience.read.values_BR.clone(),
                )
            starts = _weights(trainer)
            trainer.learn([experience], 1)
            ends = _weights(trainer)
            found.setdefault(stage, {})[kind] = [
                max((float((end[name] - start[name]).abs().max()) for name in start), default=0.0)
                for start, end in zip(starts, ends, strict=True)
            ]
    return found


def _weights(trainer: Any) -> list[dict[str, Any]]:
    roles = trainer.roles
    return [roles.actor.full_state(roles.actor_model), roles.critic.full_state(roles.critic_model)]


def reused(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Weights after two iterations, by forwards that read and learn and by forwards of their own: how far apart, as a
    share of the update; and how many forwards actor and critic made."""
    calls: list[Any] = []
    plain = TrainingEngine.__call__
    TrainingEngine.__call__ = lambda self, *given, **named: calls.append(self) or plain(self, *given, **named)
    found: dict[str, Any] = {}
    for name in cases:
        stage, packed, grpo, recomputed, actor_too = REUSED[name]
        ends, figures = {}, {}
        for keeps in (False, True):

            def with_again(flags: Any, again: bool = recomputed) -> Any:
                return dataclasses.replace(flags, actor_gradient_checkpointing=again)

            how: dict[str, Any] = {"packed": packed, "grpo": grpo, "epochs": 1, "micro": 2, "with_texts": False}
            trainer = make_trainer(models, out, ranks, stage, **how, changed=with_again)
            experience = trainer.settings.experience
            if keeps:
                of_actor = {"reuses_forwards": True, "with_entropy": grpo} if actor_too else {}
                experience = changed(experience, learns_values=not grpo, reads_old_logprobs=True, **of_actor)
            trainer.settings = dataclasses.replace(trainer.settings, experience=experience)
            trainer.updates.settings = trainer.settings
            engines = [trainer.roles.actor, *([trainer.roles.critic] if trainer.roles.critic else [])]
            starts = [engine.full_state(engine.module.model) for engine in engines]
            calls.clear()
            figures[keeps] = [trainer.learn([experienced(trainer, i)], i) for i in range(1, ITERATIONS + 1)]
            made = len(calls)
            ends[keeps] = [engine.full_state(engine.module.model) for engine in engines]
            found.setdefault(name, {"forwards": []})["forwards"].append(made)
        found[name]["figures"] = [figures[False], figures[True]]
        found[name]["apart"] = []
        for start, one, two in zip(starts, ends[False], ends[True], strict=True):
            update = torch.cat([(one[key] - start[key]).double().flatten() for key in start] or [torch.ones(1)])
            residual = torch.cat(
                [(one[key].double() - two[key].double()).flatten() for key in start] or [torch.ones(1)]
            )
            found[name]["apart"].append(float(residual.norm() / update.norm()))
    TrainingEngine.__call__ = plain
    return found


def gathers(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Collectives of one rollout of exactly so many tokens, under ZeRO-3."""
    if not cases:
        return {}
    trainer = make_trainer(models, out, ranks, 3, with_texts=False)
    prompts, seeds = trainer.next_prompts(1, batch=0)
    found = {}
    for tokens in map(int, cases):
        trainer.settings = changed(trainer.settings, end_token_id=-1, max_new_tokens=tokens)
        with counted_collectives() as counts:
            rollout = trainer.roll_out(prompts, seeds)
        if rollout.response_lengths_B.tolist() != [tokens] * len(seeds):
            raise AssertionError("the rollout was to have a fixed length")
        found[str(tokens)] = dict(counts)
    return found


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """Counts what goes through torch.distributed, by the profiler's names, and fetches of ZeRO-3 weights."""
    counts: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield counts
    for event in seen.events():
        if event.name.startswith("c10d::"):
            counts[event.name] = counts.get(event.name, 0) + 1


def lora(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """After an update: reference and actor of a LoRA run on one sequence, and rollouts against the training forward."""
    found = {}
    rows = padded_rows([join(torch.tensor(LORA_PROMPT), torch.tensor(LORA_RESPONSE))], 1)
    for stage in cases:
        seed_everything(SEED, ranks.rank)  # as every program does: ranks differ
        trainer = make_trainer(models, out, ranks, int(stage), lora={"actor_lora_dim": 4})
        trainer.learn([experienced(trainer, 1)], 1)
        experience = experienced(trainer, 2)
        apart = experience.rollout.sampled_logprobs_BR - experience.old_logprobs_BR
        with trainer.roles.reading(), torch.no_grad():
            found[stage] = {
                "reference": trainer.roles.reference(rows, Readout(TEMPERATURE)).logprobs_M.tolist(),
                "actor": trainer.roles.actor(rows, Readout(TEMPERATURE)).logprobs_M.tolist(),
                "apart": float(apart.abs().max()),
            }
    return found


LORA_PROMPT, LORA_RESPONSE = [5, 9, 100], [33, 44, 55, 0]


def layouts_of_prompts(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """The same prompts and seeds rolled out in batches of other widths, orders, sizes and pad tokens."""
    return {actor: _layouts(make_trainer(models, out, ranks, 0, with_texts=False, actor=actor)) for actor in cases}


def _layouts(trainer: Any) -> dict[str, Any]:
    prompts, seeds = trainer.next_prompts(1, batch=0)
    ids_BP, mask_BP = prompts.prompt_ids_BP, prompts.prompt_mask_BP
    count, pad = len(seeds), trainer.settings.drawing.sampling.pad_token_id

    def rolled(ids: Any, mask: Any, seeds: list[int], pad_token_id: int = pad) -> list[Any]:
        sampling = dataclasses.replace(trainer.settings.drawing.sampling, pad_token_id=pad_token_id)
        with trainer.roles.whole_actor.lent() as model:
            rollout = trainer.rollout_engine.roll_out(model, RolloutRequest(ids, mask, sampling, seeds))
        return [
            [rollout.response_of(index).tolist(), rollout.sampled_logprobs_BR[index, :length].tolist()]
            for index, length in enumerate(rollout.response_lengths_B.tolist())
        ]

    wider_ids = torch.cat([torch.full((count, 7), pad), ids_BP], dim=1)
    wider_mask = torch.cat([torch.zeros(count, 7, dtype=torch.bool), mask_BP], dim=1)
    alone = []
    for index in range(count):
        own = ids_BP[index][mask_BP[index]].unsqueeze(0)
        alone += rolled(own, torch.ones_like(own, dtype=torch.bool), [seeds[index]])
    experience = experienced(trainer, 1)
    return {
        "plain": rolled(ids_BP, mask_BP, seeds),
        "wider": rolled(wider_ids, wider_mask, seeds),
        "alone": alone,
        "backwards": rolled(ids_BP.flip(0), mask_BP.flip(0), seeds[::-1])[::-1],
        "pad_is_eos": rolled(torch.where(mask_BP, ids_BP, torch.zeros_like(ids_BP)), mask_BP, seeds, 0),
        "apart": float((experience.rollout.sampled_logprobs_BR - experience.old_logprobs_BR).abs().max()),
    }


SECTIONS: dict[str, Callable[[Path, Path, Any, Collection[str]], dict[str, Any]]] = {
    "iterations": iterations,
    "mixtures": mixtures,
    "first_minibatch": first_minibatch,
    "grpo": grpo,
    "paths": paths,
    "minibatches": minibatches,
    "reused": reused,
    "nothing_to_learn": nothing_to_learn,
    "gathers": gathers,
    "lora": lora,
    "layouts_of_prompts": layouts_of_prompts,
}
