"""Launched on one or two ranks: runs step 3's parts at several ZeRO stages in one process group and reports.

Arguments: the folder of the models, a folder for the weights, and "long" for all of EVERY, not ORDINARY alone. Report:
{section: {...}}, one section a function of SECTIONS, by the case's name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
# Sequences with equal beginnings: stage, packed, from how many tokens on these are shared.
TRIES = {"0_padded": (0, False, 0), **{f"{stage}_shared": (stage, True, 2) for stage in STAGES}}
EVAL_PROMPTS = 5  # not a multiple of two ranks

# The cases of a section, by ranks: of the long form, and of every run.
EVERY: dict[str, dict[int, Collection[str]]] = {
    "iterations": {1: LAYOUTS, 2: LAYOUTS},
    "mixtures": {1: MIXTURE_LAYOUTS, 2: MIXTURE_LAYOUTS},
    "first_minibatch": {1: FIRST_MINIBATCHES, 2: FIRST_MINIBATCHES},
    "grpo": {1: GRPO_LAYOUTS, 2: GRPO_LAYOUTS},
    "paths": {1: PATHS_LAYOUTS, 2: PATHS_LAYOUTS},
    "minibatches": {1: MINIBATCH_LAYOUTS, 2: MINIBATCH_LAYOUTS},
    "reused": {1: REUSED, 2: REUSED},
    "nothing_to_learn": {1: ("0", "2", "3"), 2: ("0", "2", "3")},
    "gathers": {1: (), 2: ("2", "12")},
    "lora": {1: ("0", "3"), 2: ("0", "3")},
    "tries": {1: TRIES, 2: TRIES},
    "layouts_of_prompts": {1: ACTORS, 2: ()},
}
ORDINARY: dict[str, dict[int, Collection[str]]] = {
    **EVERY,
    "iterations": {1: ("3_packed",), 2: ("0", "3_packed")},
    "mixtures": {1: ("0_padded",), 2: ("3_packed",)},
    "first_minibatch": {1: ("0_fp32", "0_bf16"), 2: ("3_fp32",)},
    "grpo": {1: ("0_two_epochs",), 2: ("3_packed",)},
    "paths": {1: ("0_packed",), 2: ("3_packed",)},
    "minibatches": {1: ("0_packed",), 2: ("0_packed",)},
    "reused": {1: ("0_packed", "0_grpo", "1_values"), 2: ("1_recomputed", "2", "3_values")},
    "nothing_to_learn": {1: ("0",), 2: ("3",)},
    "tries": {1: ("0_padded", "2_shared"), 2: ()},
    "lora": {1: ("0",), 2: ("3",)},
}


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    cases = EVERY if is_long else ORDINARY
    with started_process_group() as ranks:
        report({name: section(models, out, ranks, cases[name][ranks.world_size]) for name, section in SECTIONS.items()})


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
    from tests.invariants import tiny
    from tests.support.data_flags import with_flags
    from tests.support.guests import balancing
    from tests.support.step3_records import made
    from threestep.plugins.mismatch.correction import MismatchCorrection
    from threestep.plugins.mismatch.settings import MismatchSettings
    from threestep.plugins.pretraining_loss.learnt_texts import LearntTexts
    from training.step3_ppo.advantages import ESTIMATORS
    from training.step3_ppo.advantages.inputs import AdvantageSettings
    from training.step3_ppo.contracts.settings import (
        ExperienceSettings,
        KlSettings,
        LearningSettings,
        LengthSettings,
        PpoSettings,
    )  # fmt: skip
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
    from training.step3_ppo.learning.learning import Updates
    from training.step3_ppo.losses import POLICY_LOSSES
    from training.step3_ppo.losses.losses import PolicyLossSettings
    from training.step3_ppo.parts.assembly import with_guests
    from training.step3_ppo.parts.evaluation import Evaluator, HeldOut
    from training.step3_ppo.roles.roles import RolesNeeded, Tokenizers, load_roles
    from training.step3_ppo.trainer import PpoTrainer
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.flags.added import added_flags
    from training.utils.generation.decoding.hf import TransformersRollout
    from training.utils.layout.planner import PlanSettings
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_folder import RunFolder

    ranks.leaving.close()  # DeepSpeed collects garbage at each engine, and would go through all that are left
    flags = RolesArguments(
        actor_model_name_or_path=str(models / actor),
        critic_model_name_or_path=str(models / critic),
        actor_learning_rate=ACTOR_RATE,
        critic_learning_rate=CRITIC_RATE,
        actor_weight_decay=decay,
        critic_weight_decay=decay,
        actor_zero_stage=stage,
        critic_zero_stage=stage,
        actor_dropout=None,
        critic_dropout=None,
        dtype=dtype,
        max_grad_norm=CLIP_NORM,
    )
    roles = load_roles(
        changed(flags),
        Tokenizers(tiny.StandInTokenizer(), tiny.StandInTokenizer()),
        ranks,
        total_steps=ITERATIONS * epochs * minibatches,
        needed=RolesNeeded(critic=not grpo, added=with_flags(added_flags("step3_ppo")(), **(lora or {}))),
    )
    roles = with_guests(roles, balancing(), path="", total_steps=1, seed=0)
    sampling = Sampling(MAX_NEW_TOKENS, TEMPERATURE, 0, 1.0, tiny.END, tiny.PAD)
    experience = made(
        ExperienceSettings,
        temperature=TEMPERATURE,
        score_scale=None,
        clip_reward=CLIP_REWARD,
        samples_per_prompt=SAMPLES if grpo else 1,
        estimator=ESTIMATORS["grpo" if grpo else "gae"],
        advantage=AdvantageSettings(GAMMA, LAM, norm_by_std=True),
        whiten_advantages=not grpo,
        correction=MismatchCorrection(MismatchSettings("none")),  # its measures alone
        kl=KlSettings(KlControl(KL_COEF), in_loss=grpo, estimator=KL_ESTIMATORS["k3" if grpo else "k1"]),
        length=LengthSettings(MAX_NEW_TOKENS, mask_truncated_responses=grpo),
        reads_old_logprobs=not grpo or epochs > 1,
        rank=ranks.rank,
        sharing=ranks.sharing.size,
        plan=PlanSettings(ranks.world_size, max_tokens, micro, packed, LONGEST if packed else 0),
        pad_token_id=tiny.PAD,
    )
    per_rank = PROMPTS_PER_ROLLOUT // ranks.world_size
    learning = LearningSettings(
        policy_loss=POLICY_LOSSES["ppo"],
        policy=PolicyLossSettings(CLIP_RANGE, CLIP_RANGE),
        aggregation="seq-mean-token-mean" if grpo else "token-mean",
        clip_range_value=CLIP_RANGE_VALUE,
        entropy_coef=ENTROPY_COEF if grpo else 0.0,
    )
    settings = made(
        PpoSettings,
        total_rollouts=ITERATIONS,
        prompts_per_batch=per_rank,
        generation_batches=1,
        sequences_per_minibatch=per_rank * experience.samples_per_prompt // minibatches,
        ppo_epochs=epochs,
        critic_warmup=0,
        dynamic_sampling_tries=0,
        eval_interval=0,
        seed=SEED,
        sampling=sampling,
        experience=experience,
        learning=learning,
        evaluates_first=True,
    )
    folder = RunFolder(out, ranks.is_main)
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
        folder=folder,
    )
    beside = [LearntTexts(texts(), UNSUP_COEF, settings.seed)] if with_texts else []
    updates = Updates(roles, settings, *beside)
    return PpoTrainer(roles, rollout_engine, train_prompts(), updates, evaluator, settings, metrics)


def train_prompts() -> Any:
    from tests.invariants import tiny
    from training.step3_ppo.contracts.rollouts import PromptSource

    return PromptSource(tiny.prompts(ITERATIONS * PROMPTS_PER_ROLLOUT, seed=3), SEED)


def texts() -> list:
    from tests.invariants import tiny

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
    import torch

    from training.utils.engine.ranks.collectives import gathered

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
    for role, engine, model in (
        ("actor", trainer.roles.actor, trainer.roles.actor_model),
        ("critic", trainer.roles.critic, trainer.roles.critic_model),
    ):
        state = engine.full_state(model)
        if engine.ranks.is_main:
            torch.save(state, out / f"{role}_{name}.pt")
    return told


def first_minibatch(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """One update an iteration: its figures are those of the first minibatch of the first epoch."""
    from training.step3_ppo.experience.description import described

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
    import torch

    from training.utils.engine.ranks.collectives import gathered

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
        state = trainer.roles.actor.full_state(trainer.roles.actor_model)
        if ranks.is_main:
            torch.save(state, out / f"grpo_{layout}.pt")
        found[layout] = told
    return found


def paths(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Iterations of GRPO whose responses part into two paths, drawn side by side and learned in their layout."""
    import torch

    from tests.invariants import tiny
    from tests.support.step3_records import changed
    from threestep.plugins.parallel_thinking.form import ParallelPaths
    from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling
    from training.utils.engine.ranks.collectives import gathered

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
        state = trainer.roles.actor.full_state(trainer.roles.actor_model)
        if ranks.is_main:
            torch.save(state, out / f"paths_{layout}.pt")
        found[layout] = told
    return found


def _slower(flags: Any) -> Any:
    """At the actor's usual rate, the second iteration opens no block."""
    return dataclasses.replace(flags, actor_learning_rate=ACTOR_RATE / 10)


def save_weights(trainer: Any, out: Path, name: str, layout: str) -> None:
    """Save the actor's and the critic's weights as NAME_actor_LAYOUT.pt and NAME_critic_LAYOUT.pt."""
    import torch

    roles = trainer.roles
    models = {"actor": (roles.actor, roles.actor_model), "critic": (roles.critic, roles.critic_model)}
    for role, (engine, model) in models.items():
        state = engine.full_state(model)
        if roles.actor.ranks.is_main:
            torch.save(state, out / f"{name}_{role}_{layout}.pt")


def minibatches(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Several minibatches a rollout: which sequences meet in one, and which rank computes them, changes nothing."""

    found = {}
    for layout in cases:
        stage, packed = MINIBATCH_LAYOUTS[layout]
        trainer = make_trainer(models, out, ranks, stage, packed=packed, minibatches=4)
        found[layout] = [trainer.learn([experienced(trainer, i)], i) for i in range(1, ITERATIONS + 1)]
        save_weights(trainer, out, "minibatches", layout)
    return found


def tries(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Two steps of PPO on sequences with equal beginnings, and conversations in parts, whose old log-probabilities,
    advantages, values and returns are drawn: those of a token differ among the sequences that share it."""
    import torch

    from tests.support.step3_records import changed
    from tests.support.tries import forked_conversations, forked_sequences
    from training.step3_ppo.experience.sequences import TrainingSequence
    from training.step3_ppo.learning.learning import Learner

    drawn = [each for seed in (0, 3) for each in forked_sequences(seed, 24, most_tokens=40) if each.is_target.any()]
    drawn += [each.tokens for each in forked_conversations(4, 24) if max(map(len, each.tokens.parts)) <= 40]
    generator = torch.Generator().manual_seed(SEED)
    sequences = []
    for number, each in enumerate(drawn):
        advantages_r, old_r, values_r, returns_r = torch.randn(4, int(each.is_target.sum()), generator=generator)
        fields = (advantages_r, old_r - 5.0, None, values_r, returns_r, None)
        sequences.append(TrainingSequence(number, each, number % 5 > 0, *fields))
    found = {}
    for layout in cases:
        stage, packed, least = TRIES[layout]
        trainer = make_trainer(models, out, ranks, stage, packed=packed, max_tokens=200, with_texts=False)
        experience = trainer.settings.experience
        plan = dataclasses.replace(
            experience.layout.plan, max_row_tokens=200 if packed else 0, least_shared_tokens=least
        )
        experience = changed(experience, plan=plan)
        learner = Learner(trainer.roles, experience, trainer.settings.updates.learning, kl_coef=0.0)
        forwards = learner.forwards(sequences)
        found[layout] = {
            "figures": [learner.learn(sequences, SEED, forwards) for _ in range(2)],
            "tokens": sum(int((each.rows.segment_ids_NT >= 0).sum()) for each in forwards),
        }
        save_weights(trainer, out, "tries", layout)
    return found


def nothing_to_learn(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """Advantages 0 and returns equal to the values: how far the weights of a fresh actor and critic move.

    One sequence a forward, so that the values of the update are those of the experience to the bit: Adam would blow
    any rounding up to a whole step. `moved_by_advantages` is the same with the advantages and returns as they are.
    """
    import torch

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
    import torch

    from tests.support.step3_records import changed
    from training.utils.engine.training_engine import TrainingEngine

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
    from tests.support.step3_records import changed

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
    from torch.profiler import ProfilerActivity, profile

    counts: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield counts
    for event in seen.events():
        if event.name.startswith("c10d::"):
            counts[event.name] = counts.get(event.name, 0) + 1


def lora(models: Path, out: Path, ranks: Any, cases: Collection[str]) -> dict[str, Any]:
    """After an update: reference and actor of a LoRA run on one sequence, and rollouts against the training forward."""
    import torch

    from training.utils.base.seeds import seed_everything
    from training.utils.contracts.documents import join
    from training.utils.layout.rows import padded_rows
    from training.utils.models.token_model import Readout

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
    import torch

    from training.utils.contracts.rollout_engine import RolloutRequest

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
    "tries": tries,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
