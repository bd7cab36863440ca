"""Launched on one or two ranks: trains cases of steps 1 and 2 in one process group and reports what came out.

Arguments: the folder of the models, a folder for the weights, and "long" for every case instead of ORDINARY's. Report:
{case: {"losses", "norms", "evals", "packed", "said"}}; for rankings "evaluations" and "chosen" beside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.lora_settings import lora_settings

SEED = 5
STEPS = 4
PER_STEP = 6
PAD, END = 1, 0
EVAL_ROWS = 5
LONGEST = 20  # tokens of the longest sequence there is; packed, of a row
LORA_DIM, LORA_ALPHA = 4, 8.0
LOSS_OPTIONS = {"margin_scale": 0.7, "label_smoothing": 0.1, "center_coef": 0.05}  # of cases whose rows are "margins"
NEFTUNE_ALPHA, Z_LOSS_COEF = 5.0, 0.05
# loss_type, beta, label_smoothing, sft_coef, and for some ld_alpha
PREFERENCES = {
    "dpo": ("sigmoid", 0.24, 0.0, 0.0),  # gradients about the clip, as in SFT
    "smoothed": ("sigmoid", 0.3, 0.2, 0.4),
    "ipo": ("ipo", 0.4, 0.0, 0.0),
    "hinge": ("hinge", 0.05, 0.0, 0.0),
    "desensitized": ("sigmoid", 0.3, 0.0, 0.0, 0.4),
    "sigmoid_norm": ("sigmoid_norm", 1.5, 0.1, 0.0),
    "robust": ("robust", 0.3, 0.2, 0.0),
    "apo_zero": ("apo_zero", 0.3, 0.0, 0.0),
    "apo_down": ("apo_down", 0.3, 0.0, 0.0),
    "plackett_luce": ("plackett_luce", 0.3, 0.0, 0.0),
    "orpo": ("orpo", 0.5, 0.0, 0.0),
    "simpo": ("simpo", 2.0, 0.1, 0.3),
    "cpo": ("cpo", 0.3, 0.1, 0.0),
}
MARKED = {"kto": (0.3, (1.0, 1.5)), "bco": (0.3, (1.0, 1.0))}  # beta, weights of good and bad responses
_NEW = ("desensitized", "sigmoid_norm", "robust", "apo_zero", "apo_down", "plackett_luce", "orpo", "simpo", "cpo")
_FREE = ("orpo", "simpo", "cpo")  # of a reference


@dataclass(frozen=True)
class Case:
    """One run of a trainer. micro: most sequences (prompts) in one forward of one rank; packed, as many tokens as so
    many of LONGEST."""

    name: str
    kind: str = "sft"  # or "ranking", or one of PREFERENCES or MARKED
    model: str = "causal"
    rows: str = "plain"  # or "eos_masked": as plain, without the end token among the targets; or "margins", of ranking
    # or "conversations", which begin alike: of `shared` tokens on, these are computed once
    shared: int = 0
    zero_stage: int = 0
    dtype: str = "fp32"
    micro: int = 3
    max_tokens: int | None = None
    packed: bool = False
    offload: bool = False
    checkpointing: bool = False
    tiles: int = 1  # of MLPs
    lora_dim: int = 0
    dora: bool = False
    pad_token_id: int = PAD
    per_step: int = PER_STEP
    compiled: bool = False  # traced by torch.compile, with a backend that needs no compiler
    neftune_alpha: float = 0.0
    z_loss_coef: float = 0.0
    adapter_off: bool = False
    router_coef: float | None = None  # --router_aux_loss_coef
    lora_part: str = "all-linear"


# Which run unless it is the long form, by ranks: every kind, choice and shape, among which the stages are shared out.
ORDINARY = {
    1: """
        sft_z0_micro6_tokensNone sft_z3_micro2_tokensNone lora_z0 dora_z3 regularized_lora_z3 offload_z3 bf16_z0
        ranking_z3_micro2 padded_options_z0 pad_is_eos pad_is_eos_masked another_pad dpo_z0 dpo_z3 smoothed_padded
        orpo_padded cpo_padded kto_padded_micro1 packed_bco_micro2 desensitized_padded dpo_lora_z3 dpo_adapter_off_z0
        reversed_z0 wide_z3 packed_sft_z0_micro6 packed_sft_z3_micro2 packed_ranking_z3_micro6 packed_options_z0
        packed_options_z3 packed_dpo_z3_micro6 packed_smoothed packed_hinge packed_apo_zero packed_robust
        packed_dpo_gpt2 packed_shared_dpo_z2 packed_qwen3_z0 packed_opt_z0 packed_bloom_z0 packed_mamba_z0
        packed_regularized_lora_z3 packed_compiled_z0 packed_pad_is_eos mixture_padded_sft_micro6_z0
        mixture_padded_sft_micro2_z3 mixture_packed_sft_micro6_z3 mixture_packed_dpo_micro2_z0
        mixture_padded_dpo_micro2_z3 mixture_packed_ranking_micro6_z3 mixture_padded_ranking_micro6_z0
        mixture_noise_z0 mixture_given_z0 mixture_lora_z3
    """.split(),
    2: """
        sft_z0_micro3_tokensNone sft_z1_micro2_tokensNone sft_z2_micro1_tokensNone sft_z3_micro3_tokens24 untied_z3
        checkpointing_z3 lora_z3 regularized_z3 regularized_lora_z0 offload_z2 bf16_z3 ranking_z0_micro2
        ranking_z3_micro1 padded_options_z0 dpo_z3 ipo_padded apo_down_padded kto_padded_micro3 bco_padded_micro1
        packed_kto_micro2 packed_kto_one_a_step desensitized_lora_z0 dpo_lora_z0 dpo_adapter_off_z3 dora_z2
        dpo_dora_off_z3 one_a_step_z3 five_a_step_z2 first_rank_alone_z3 no_targets_z2 reversed_z3 uneven_z3
        packed_sft_z0_micro3 packed_sft_z2_micro1 packed_sft_z3_micro3 packed_ranking_z0_micro6
        packed_ranking_z3_micro1 packed_options_z0 packed_options_z3 packed_dpo_z1_micro6 packed_dpo_z3_micro1
        packed_ipo packed_orpo packed_plackett_luce packed_simpo packed_desensitized packed_sigmoid_norm
        packed_dpo_mamba packed_shared_sft_z3 packed_gpt2_z3 packed_gemma3_text_z3 packed_bloom_z3
        packed_regularized_z3 packed_regularized_lora_z0 packed_dora_z3 packed_bf16 packed_one_a_step_z3
        packed_tiles_lora_z3 mixture_padded_sft_micro1_z3 mixture_packed_sft_micro1_z0 mixture_packed_sft_micro3_z3
        mixture_packed_dpo_micro3_z3 mixture_packed_ranking_micro1_z0 mixture_wide_z3 mixture_off_z3 mixture_tiles_z3
        mixture_one_a_step_z3
    """.split(),
}


@dataclass(frozen=True)
class Spread:
    """One run of an engine whose sequences are dealt and laid out by hand (SPREADS) instead of by the planner."""

    name: str
    zero_stage: int
    how: str


def cases(world_size: int) -> list[Case]:
    """Every stage with every shape; then one of each other choice. Shapes are per rank, of PER_STEP sequences in all:
    everything at once, equal parts, one at a time, parts that do not come out even, and parts cut by tokens."""
    shapes = {1: [(6, None), (2, None), (1, None), (4, None), (6, 30)], 2: [(3, None), (1, None), (2, None), (3, 24)]}[
        world_size
    ]
    found = [
        Case(f"sft_z{stage}_micro{micro}_tokens{tokens}", zero_stage=stage, micro=micro, max_tokens=tokens)
        for stage in range(4)
        for micro, tokens in shapes
    ]
    found += [Case(f"untied_z{stage}", model="untied", zero_stage=stage) for stage in (0, 3)]
    found += [Case(f"checkpointing_z{stage}", zero_stage=stage, checkpointing=True) for stage in (0, 3)]
    found += [Case(f"lora_z{stage}", zero_stage=stage, lora_dim=LORA_DIM) for stage in (0, 2, 3)]
    found += [Case(f"dora_z{stage}", zero_stage=stage, lora_dim=LORA_DIM, dora=True) for stage in (0, 2, 3)]
    found += [
        Case("dpo_dora_off_z3", "dpo", zero_stage=3, lora_dim=LORA_DIM, dora=True, micro=2, adapter_off=True),
        Case("dpo_dora_z1", "dpo", zero_stage=1, lora_dim=LORA_DIM, dora=True, micro=1),
    ]
    found += [regularized(f"regularized_z{stage}", stage, micro=2) for stage in (0, 3)]
    found += [
        regularized(f"regularized_lora_z{stage}", stage, lora_dim=LORA_DIM, checkpointing=True) for stage in (0, 3)
    ]
    found += [Case(f"offload_z{stage}", zero_stage=stage, offload=True) for stage in (1, 2, 3)]
    found += [Case(f"bf16_z{stage}", zero_stage=stage, dtype="bf16") for stage in range(4)]
    found += [
        Case(f"ranking_z{stage}_micro{micro}", "ranking", "scalar", zero_stage=stage, micro=micro)
        for stage in (0, 2, 3)
        for micro in (1, 2, 3)
    ]
    found += [
        Case("padded_options_z0", "ranking", "scalar", "margins", micro=2),
        Case("pad_is_eos", pad_token_id=END),
        Case("pad_is_eos_masked", pad_token_id=END, rows="eos_masked"),
        Case("another_pad", pad_token_id=7),
    ]
    found += [Case(f"dpo_z{stage}", "dpo", zero_stage=stage, micro=2) for stage in (0, 2, 3)]
    found += [Case(f"{kind}_padded", kind, zero_stage=1, micro=1) for kind in ("smoothed", "ipo")]
    found += [Case(f"{kind}_padded", kind, zero_stage=0, micro=2) for kind in _NEW]
    found += [
        Case(f"{kind}_padded_micro{micro}", kind, zero_stage=0, micro=micro)
        for kind in MARKED
        for micro in range(1, 1 + PER_STEP // world_size)
    ]
    found += [Case("desensitized_lora_z0", "desensitized", lora_dim=LORA_DIM, micro=2, adapter_off=True)]
    found += [Case(f"dpo_lora_z{stage}", "dpo", zero_stage=stage, lora_dim=LORA_DIM) for stage in (0, 3)]
    found += [
        Case(f"dpo_adapter_off_z{stage}", "dpo", zero_stage=stage, lora_dim=LORA_DIM, micro=2, adapter_off=True)
        for stage in (0, 3)
    ]
    if world_size == 2:  # the second rank is dealt nothing in some steps' micro-batches, or in every step
        found += [Case(f"one_a_step_z{stage}", zero_stage=stage, per_step=1) for stage in (0, 2, 3)]
        found += [Case(f"five_a_step_z{stage}", zero_stage=stage, per_step=5, micro=2) for stage in (0, 2, 3)]
    return found


def regularized(name: str, stage: int, **changes: Any) -> Case:
    """With NEFTune's noise and a z-loss, both large enough to matter."""
    return Case(name, zero_stage=stage, neftune_alpha=NEFTUNE_ALPHA, z_loss_coef=Z_LOSS_COEF, **changes)


def packed_cases(world_size: int) -> list[Case]:
    """What packed_program runs: packed rows, prompts shared among responses. Every stage, everything at once and in
    several micro-batches; one of every family, those that fall back to padding among them; and a rank that has
    nothing to do."""
    found = [
        Case(f"packed_sft_z{stage}_micro{micro}", zero_stage=stage, micro=micro, packed=True)
        for stage in range(4)
        for micro in ((6, 2) if world_size == 1 else (3, 1))
    ]
    found += [
        Case(f"packed_ranking_z{stage}_micro{micro}", "ranking", "scalar", zero_stage=stage, micro=micro, packed=True)
        for stage in (0, 2, 3)
        for micro in (1, 6)
    ]
    found += [
        Case(f"packed_options_z{stage}", "ranking", "scalar", "margins", zero_stage=stage, micro=2, packed=True)
        for stage in (0, 3)
    ]
    found += [
        Case(f"packed_dpo_z{stage}_micro{micro}", "dpo", zero_stage=stage, micro=micro, packed=True)
        for stage, micro in ((0, 1), (1, 6), (2, 1), (3, 1), (3, 6))
    ]
    found += [Case(f"packed_{kind}", kind, zero_stage=2, packed=True) for kind in ("smoothed", "ipo", "hinge")]
    found += [Case(f"packed_{kind}", kind, zero_stage=3, micro=world_size, packed=True) for kind in _NEW]
    found += [
        Case(f"packed_{kind}_micro{micro}", kind, zero_stage=3, micro=micro, packed=True)
        for kind in MARKED
        for micro in range(1, 1 + PER_STEP // world_size)
    ]
    found += [Case("packed_kto_one_a_step", "kto", zero_stage=2, per_step=1, packed=True)]
    stage = 0 if world_size == 1 else 3
    found += [Case(f"packed_dpo_{name}", "dpo", name, zero_stage=stage, packed=True) for name in ("gpt2", "mamba")]
    families = ("qwen3", "gpt2", "opt", "gemma3_text", "bloom", "mamba")
    found += [Case(f"packed_{name}_z{stage}", model=name, zero_stage=stage, packed=True) for name in families]
    found += [regularized(f"packed_regularized_z{stage}", stage, packed=True) for stage in (0, 3)]
    found += [
        regularized(f"packed_regularized_lora_z{stage}", stage, lora_dim=LORA_DIM, checkpointing=True, packed=True)
        for stage in (0, 3)
    ]
    found += [
        Case(
            f"packed_dora_z{stage}",
            zero_stage=stage,
            lora_dim=LORA_DIM,
            dora=True,
            checkpointing=stage == 3,
            packed=True,
        )
        for stage in (0, 2, 3)
    ]
    found += [
        Case(f"packed_tiles_{name}_z{stage}", zero_stage=stage, tiles=3, packed=True, **changes)
        for stage in range(4)
        for name, changes in (("plain", {}), ("lora", {"lora_dim": LORA_DIM, "checkpointing": True}))
    ]
    found += [Case("packed_bf16", dtype="bf16", packed=True), Case("packed_pad_is_eos", pad_token_id=END, packed=True)]
    found += [Case(f"packed_compiled_z{stage}", zero_stage=stage, compiled=True, packed=True) for stage in (0, 3)]
    kinds = {"sft": "causal", "ranking": "scalar", "dpo": "causal"}
    found += [
        Case(
            f"packed_shared_{kind}_z{stage}", kind, model, "conversations", 4, stage, micro=6 // world_size, packed=True
        )
        for kind, model in kinds.items()
        for stage in (0, 2, 3)
    ]
    if world_size == 2:
        found += [Case(f"packed_one_a_step_z{stage}", zero_stage=stage, per_step=1, packed=True) for stage in (0, 3)]
        found += [Case("packed_dpo_one_a_step", "dpo", zero_stage=3, per_step=1, packed=True)]
    return found


def wanted(of: list[Any], world_size: int, is_long: bool) -> list[Any]:
    """The cases or spreads that are run."""
    return [case for case in of if is_long or case.name in ORDINARY[world_size]]


def mixture_cases(world_size: int) -> list[Case]:
    """What mixture_program runs: a mixture of experts with its balancing loss. One micro-batch on each rank, and
    several; padded, packed, with shared prompts; a router that ZeRO-3 shards; and what else touches a forward. All of
    them at each ZeRO stage, and compiled."""
    kinds = {"sft": "mixture", "dpo": "mixture", "ranking": "mixture_scalar"}
    shapes = [(packed, micro) for packed in (False, True) for micro in ((6, 2) if world_size == 1 else (3, 1))]
    found = [
        Case(f"{'packed' if packed else 'padded'}_{kind}_micro{micro}", kind, model, micro=micro, packed=packed)
        for kind, model in kinds.items()
        for packed, micro in shapes
    ]
    packed = Case("", model="mixture", packed=True, micro=2)
    found += [
        replace(packed, name="wide", model="mixture_wide"),
        replace(packed, name="noise", neftune_alpha=NEFTUNE_ALPHA),
        replace(packed, name="lora", lora_dim=LORA_DIM, lora_part="self_attn", checkpointing=True),
        replace(packed, name="given", router_coef=0.2, checkpointing=True),
        replace(packed, name="off", router_coef=0.0),
        replace(packed, name="tiles", router_coef=0.0, tiles=3),
    ]
    found += [replace(packed, name="one_a_step", per_step=1)] if world_size == 2 else []
    found = [
        replace(case, name=f"mixture_{case.name}_z{stage}", zero_stage=stage) for case in found for stage in range(4)
    ]
    return found + ([replace(packed, name="mixture_compiled", compiled=True)] if world_size == 1 else [])


def spreads(world_size: int) -> list[Spread]:
    hows = {1: ("reversed", "wide"), 2: ("first_rank_alone", "no_targets", "reversed", "wide", "uneven")}[world_size]
    return [Spread(f"{how}_z{stage}", stage, how) for how in hows for stage in (0, 2, 3)]


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    results = {}
    with started_process_group() as ranks:
        for case in wanted(cases(ranks.world_size), ranks.world_size, is_long):
            results[case.name] = run_case(case, models, out, ranks)
        for spread in wanted(spreads(ranks.world_size), ranks.world_size, is_long):
            results[spread.name] = run_spread(spread, models, out, ranks)
    report(results)


def make_engine(case: Case, models: Path, ranks: Any, head_of: Any = None) -> tuple[Any, Any]:
    """(the engine, the transformers model in it). head_of: gives the head that is trained with a model."""
    from tests.invariants.plain import Recipe
    from tests.invariants.tiny import VOCAB, StandInTokenizer
    from threestep.plugins.speed.compiled import compile_blocks
    from training.utils.base.seeds import seed_everything
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.loading.models import load_causal_lm, load_scalar_model
    from training.utils.models.token_model import PolicyModel, ScalarModel
    from training.utils.setup.setup import load_under

    recipe = Recipe()
    settings = EngineSettings(
        dtype=case.dtype,
        zero_stage=case.zero_stage,
        offload=case.offload,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        num_warmup_steps=recipe.num_warmup_steps,
    )

    def load(dtype: Any) -> Any:
        if case.kind != "ranking":
            return load_causal_lm(model_settings(case, models), dtype, VOCAB)
        tokenizer = StandInTokenizer(case.pad_token_id)
        return load_scalar_model(model_settings(case, models), dtype, tokenizer, must_have_head=True)

    seed_everything(SEED, ranks.rank)  # as every program does: ranks differ
    model = load_under(settings, ranks, load)
    if case.compiled:
        model.set_attn_implementation("sdpa")  # as --torch_compile leaves it: runs in turn would be compiled row by row
        compile_blocks(model, backend="eager")
    if case.kind == "ranking":
        return TrainingEngine(ScalarModel(model, sharing=ranks.sharing), settings, ranks, STEPS), model
    policy = PolicyModel(model, beside=head_of and head_of(model), sharing=ranks.sharing)
    return TrainingEngine(policy, settings, ranks, STEPS), model


def model_settings(case: Case, models: Path) -> Any:
    from threestep.plugins.speed.arguments import SpeedArguments
    from threestep.plugins.speed.preparers import preparers
    from training.utils.flags.added import added_flags

    added = added_flags("step1_sft")()
    added.of(SpeedArguments).mlp_tiles = case.tiles
    return lora_settings(
        str(models / case.model),
        gradient_checkpointing=case.checkpointing,
        preparers=tuple(preparers(added, "")),
        lora_dim=case.lora_dim,
        lora_alpha=LORA_ALPHA,
        lora_module_name=case.lora_part,
        use_dora=case.dora,
    )


def rows_of(kind: str, rows: str, per_step: int) -> tuple[list, list]:
    """(training rows, evaluation rows)."""
    from tests.invariants import tiny

    if kind in MARKED:
        return tiny.marked(STEPS * per_step, seed=1), tiny.marked(EVAL_ROWS, seed=2, first_id=1000)
    if kind != "sft":
        train, evaluation = tiny.ranked(STEPS * per_step, seed=1), tiny.ranked(EVAL_ROWS, seed=2)
        train = tiny.ranked_conversations(STEPS * per_step, seed=1) if rows == "conversations" else train
        return (tiny.with_margins(train), evaluation) if rows == "margins" else (train, evaluation)
    train, evaluation = tiny.sentences(STEPS * per_step, seed=1), tiny.sentences(EVAL_ROWS, seed=2)
    if rows == "conversations":
        train = tiny.conversations(STEPS * per_step, seed=1)
    if rows == "eos_masked":
        train = [tiny.without_end(row) for row in train]
    return train, evaluation


def run_case(case: Case, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    from tests.support.data_flags import data_flags
    from tests.support.guests import balancing
    from training.utils.engine.config.arguments import EngineArguments
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_arguments import RunArguments
    from training.utils.run.trackers import LogArguments
    from training.utils.setup.one_model_run import loop_settings
    from training.utils.setup.setup import may_pack
    from training.utils.setup.training_run import TrainingRun

    engine, model = make_engine(case, models, ranks)
    train_rows, eval_rows = rows_of(case.kind, case.rows, case.per_step)
    said: list[str] = []

    def read(rows: Any) -> Any:
        return engine(rows) if case.kind == "ranking" else engine(rows).logprobs_M

    packed = may_pack(
        not case.packed, model, engine, read, longest_tokens=LONGEST, log=lambda text, is_main: said.append(text)
    )
    engine_flags = EngineArguments(
        per_device_train_batch_size=case.micro,
        per_device_eval_batch_size=2,
        max_tokens_per_micro_batch=case.max_tokens,
        share_beginnings=case.shared,
        report_mfu=False,
    )
    steps = (STEPS, case.per_step)
    data, reporting = data_flags(max_seq_len=LONGEST), LogArguments()
    settings, run = balancing(case.router_coef), RunArguments(seed=SEED)
    flags: Any = SimpleNamespace(run=run, engine=engine_flags, data=data, reporting=reporting, guests=settings)
    loop = loop_settings(flags, steps, model, packed, ranks=ranks, pad_token_id=case.pad_token_id)
    loop = replace(loop, eval_interval=0)
    [guests] = settings.open([(engine, model)], "", STEPS, SEED)
    folder = out / case.name
    with MetricsWriter(folder, ranks.is_main) as metrics:
        run = TrainingRun(engine, train_rows, eval_rows, loop, metrics, guests=guests)
        trainer = make_trainer(case, run, model)
        trainer.train()
        chosen = trainer.chosen_scores(most_rows=5) if case.kind == "ranking" else None
    keep_weights(engine, model, folder)
    ranks.leaving.close()  # DeepSpeed collects garbage at each engine, and would go through all that are left
    if not ranks.is_main:
        return {}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["train/loss"] for line in lines if "train/loss" in line],
        "norms": [line["train/grad_norm"] for line in lines if "train/grad_norm" in line],
        "evals": [line["eval/loss"] for line in lines if "eval/loss" in line],
        "evaluations": [line for line in lines if "eval/loss" in line],
        "chosen": chosen and asdict(chosen),
        "train_accuracies": [line["train/token_accuracy"] for line in lines if "train/token_accuracy" in line],
        "eval_accuracies": [line["eval/token_accuracy"] for line in lines if "eval/token_accuracy" in line],
        "router_losses": [line["train/router_loss"] for line in lines if "train/router_loss" in line],
        "router_loads": [line["train/router_load_max"] for line in lines if "train/router_load_max" in line],
        "z_losses": [line["train/z_loss"] for line in lines if "train/z_loss" in line],
        "points": [line[f"train/point_{case.kind}"] for line in lines if f"train/point_{case.kind}" in line],
        "packed": packed,
        "said": said,
    }


def make_trainer(case: Case, run: Any, model: Any) -> Any:
    from tests.support.objectives import objectives
    from threestep.plugins.sft_losses.regularizer import NoiseAndZLoss
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer, Mismatch
    from training.step2_reward.loss import LossOptions
    from training.step2_reward.trainer import RewardTrainer
    from training.utils.preference.batches import mismatched
    from training.utils.preference.reference import References, adapter_off_references, known_references, no_reference

    if case.kind in PREFERENCES:
        loss_type, beta, smoothing, sft_coef, *ld_alpha = PREFERENCES[case.kind]
        weight = (ld_alpha or [1.0])[0]
        references = References(no_reference, no_reference)
        if case.kind not in _FREE:
            off = case.adapter_off
            references = (
                adapter_off_references(run.engine, model, weight) if off else known_references(run, None, weight)
            )
        own = {"label_smoothing": smoothing} if smoothing else {}
        return DpoTrainer(run, references, objectives(loss_type, beta, sft_coef, ld_alpha=weight, **own))
    if case.kind in MARKED:
        beta, (good, bad) = MARKED[case.kind]
        own = {"desirable_weight": good, "undesirable_weight": bad} if case.kind == "kto" else {}
        others = Mismatch(mismatched(run, LONGEST), known_references(mismatched(run, LONGEST), None))
        references = known_references(run, None)
        return DpoTrainer(run, references, objectives(case.kind, beta, **own), others=others)
    if case.kind == "sft":
        return SftTrainer(run, regularizer=NoiseAndZLoss(case.neftune_alpha, case.z_loss_coef))
    return RewardTrainer(run, LossOptions(**LOSS_OPTIONS) if case.rows == "margins" else LossOptions())


def run_spread(spread: Spread, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    from tests.invariants.plain import batches_of
    from training.step1_sft.loss import sft_loss
    from training.utils.engine.ranks.collectives import summed_numbers

    engine, model = make_engine(Case(spread.name, zero_stage=spread.zero_stage), models, ranks)
    losses = []
    for batch in batches_of(spread_rows(spread.how), PER_STEP, SEED):
        targets = float(sum(int(row.loss_mask.sum()) for row in batch))
        own = 0.0
        engine.train()
        for rows in SPREADS[spread.how](batch, ranks):
            loss = sft_loss(engine(rows).logprobs_M, targets)
            engine.backward(loss)
            own += float(loss.detach())
        engine.step()
        losses.append(summed_numbers({"loss": own}, ranks.device)["loss"])
    keep_weights(engine, model, out / spread.name)
    ranks.leaving.close()
    return {"losses": losses}


def spread_rows(how: str) -> list:
    """The rows of the case; for `no_targets` every second row of a batch carries no loss."""
    from tests.invariants import tiny

    rows, _ = rows_of("sft", "plain", PER_STEP)
    return [tiny.without_targets(row) if row.row_id % 2 else row for row in rows] if how == "no_targets" else rows


def _laid(batch: list, min_width: int = 1, pad: int = PAD) -> Any:
    from training.utils.data.rows.documents import sentence_document
    from training.utils.layout.rows import packed_rows

    return packed_rows([[sentence_document(row)] for row in batch], pad, min_width)


def _first_rank_alone(batch: list, ranks: Any) -> list:
    return [_laid(batch if ranks.is_main else [])]


def _no_targets(batch: list, ranks: Any) -> list:
    """All targets on the first rank; the second has sequences, and nothing to predict in them."""
    mine = [row for row in batch if bool(row.loss_mask.any()) == ranks.is_main]
    return [_laid(mine)]


def _reversed(batch: list, ranks: Any) -> list:
    mine = list(reversed(batch))[ranks.rank :: ranks.world_size]
    return [_laid(mine[:1]), _laid(mine[1:])]


def _wide(batch: list, ranks: Any) -> list:
    return [_laid(batch[ranks.rank :: ranks.world_size], min_width=37, pad=3)]


def _uneven(batch: list, ranks: Any) -> list:
    """The longest sequence alone on one rank, the five others together on the other."""
    longest = max(range(len(batch)), key=lambda index: len(batch[index].input_ids))
    mine = [row for index, row in enumerate(batch) if (index == longest) == ranks.is_main]
    return [_laid(mine)]


SPREADS: dict[str, Callable[[list, Any], list]] = {
    "first_rank_alone": _first_rank_alone,
    "no_targets": _no_targets,
    "reversed": _reversed,
    "wide": _wide,
    "uneven": _uneven,
}


def keep_weights(engine: Any, model: Any, folder: Path) -> None:
    import torch

    state = engine.full_state(model)
    if engine.ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
