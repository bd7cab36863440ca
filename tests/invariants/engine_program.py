"""What ranks do for the tests of steps 1 and 2 (launched.py): train cases and report what came out.

Report: {case: {"losses", "norms", "evals", "packed", "said"}}, and more by kind; weights are OUT/CASE/weights.pt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.invariants import tiny
from tests.invariants.plain import Recipe, batches_of
from tests.support.data_flags import data_flags
from tests.support.guests import balancing
from tests.support.lora_settings import lora_settings
from tests.support.objectives import objectives
from threestep.plugins.sft_losses.regularizer import NoiseAndZLoss
from threestep.plugins.speed.arguments import SpeedArguments
from threestep.plugins.speed.compiled import compile_blocks
from threestep.plugins.speed.preparers import preparers
from training.step1_sft.loss import sft_loss
from training.step1_sft.trainer import SftTrainer
from training.step2_dpo.trainer import DpoTrainer, Mismatch
from training.step2_reward.loss import LossOptions
from training.step2_reward.trainer import RewardTrainer
from training.utils.base.seeds import seed_everything
from training.utils.data.rows.documents import sentence_document
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.ranks.collectives import summed_numbers
from training.utils.engine.training_engine import TrainingEngine
from training.utils.flags.added import added_flags
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.preference.batches import mismatched
from training.utils.preference.reference import References, adapter_off_references, known_references, no_reference
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_arguments import RunArguments
from training.utils.run.trackers import LogArguments
from training.utils.setup.guests import GuestFeatures
from training.utils.setup.one_model_run import loop_settings
from training.utils.setup.setup import load_under, may_pack
from training.utils.setup.training_run import TrainingRun

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


def at(stages: Iterable[int], name: str, **how: Any) -> list[Case]:
    """The case at each of these ZeRO stages."""
    return [Case(f"{name}_z{stage}", zero_stage=stage, **how) for stage in stages]


LORA = {"lora_dim": LORA_DIM}
DORA = {**LORA, "dora": True}
REGULARIZED = {"neftune_alpha": NEFTUNE_ALPHA, "z_loss_coef": Z_LOSS_COEF}  # both large enough to matter
REGULARIZED_LORA = {**REGULARIZED, **LORA, "checkpointing": True}
OF_SCORES = {"kind": "ranking", "model": "scalar"}


def cases(world_size: int) -> list[Case]:
    """Every stage with every shape; then one of each other choice. Shapes are per rank, of PER_STEP sequences in all:
    everything at once, equal parts, one at a time, parts that do not come out even, and parts cut by tokens."""
    shapes = {1: [(6, None), (2, None), (1, None), (4, None), (6, 30)], 2: [(3, None), (1, None), (2, None), (3, 24)]}
    marked = [(kind, micro) for kind in MARKED for micro in range(1, 1 + PER_STEP // world_size)]
    found = [
        Case(f"sft_z{stage}_micro{micro}_tokens{tokens}", zero_stage=stage, micro=micro, max_tokens=tokens)
        for stage in range(4)
        for micro, tokens in shapes[world_size]
    ]
    found += at((0, 3), "untied", model="untied") + at((0, 3), "checkpointing", checkpointing=True)
    found += at((0, 2, 3), "lora", **LORA) + at((0, 2, 3), "dora", **DORA)
    found += at((3,), "dpo_dora_off", kind="dpo", micro=2, adapter_off=True, **DORA)
    found += at((1,), "dpo_dora", kind="dpo", micro=1, **DORA)
    found += at((0, 3), "regularized", micro=2, **REGULARIZED) + at((0, 3), "regularized_lora", **REGULARIZED_LORA)
    found += at((1, 2, 3), "offload", offload=True) + at(range(4), "bf16", dtype="bf16")
    found += [
        Case(f"ranking_z{stage}_micro{micro}", **OF_SCORES, zero_stage=stage, micro=micro)
        for stage in (0, 2, 3)
        for micro in (1, 2, 3)
    ]
    found += at((0,), "padded_options", **OF_SCORES, rows="margins", micro=2)
    found += [
        Case("pad_is_eos", pad_token_id=END),
        Case("pad_is_eos_masked", pad_token_id=END, rows="eos_masked"),
        Case("another_pad", pad_token_id=7),
    ]
    found += at((0, 2, 3), "dpo", kind="dpo", micro=2)
    found += [Case(f"{kind}_padded", kind, zero_stage=1, micro=1) for kind in ("smoothed", "ipo")]
    found += [Case(f"{kind}_padded", kind, micro=2) for kind in _NEW]
    found += [Case(f"{kind}_padded_micro{micro}", kind, micro=micro) for kind, micro in marked]
    found += at((0,), "desensitized_lora", kind="desensitized", micro=2, adapter_off=True, **LORA)
    found += at((0, 3), "dpo_lora", kind="dpo", **LORA)
    found += at((0, 3), "dpo_adapter_off", kind="dpo", micro=2, adapter_off=True, **LORA)
    if world_size == 2:  # the second rank is dealt nothing in some steps' micro-batches, or in every step
        found += at((0, 2, 3), "one_a_step", per_step=1) + at((0, 2, 3), "five_a_step", per_step=5, micro=2)
    return found


def packed_cases(world_size: int) -> list[Case]:
    """Packed rows, prompts shared among responses. Every stage, everything at once and in several micro-batches; one of
    every family, those that fall back to padding among them; and a rank that has nothing to do."""
    marked = [(kind, micro) for kind in MARKED for micro in range(1, 1 + PER_STEP // world_size)]
    stage = 0 if world_size == 1 else 3
    found = [
        Case(f"sft_z{stage}_micro{micro}", zero_stage=stage, micro=micro)
        for stage in range(4)
        for micro in ((6, 2) if world_size == 1 else (3, 1))
    ]
    found += [
        Case(f"ranking_z{stage}_micro{micro}", **OF_SCORES, zero_stage=stage, micro=micro)
        for stage in (0, 2, 3)
        for micro in (1, 6)
    ]
    found += at((0, 3), "options", **OF_SCORES, rows="margins", micro=2)
    found += [
        Case(f"dpo_z{stage}_micro{micro}", "dpo", zero_stage=stage, micro=micro)
        for stage, micro in ((0, 1), (1, 6), (2, 1), (3, 1), (3, 6))
    ]
    found += [Case(kind, kind, zero_stage=2) for kind in ("smoothed", "ipo", "hinge")]
    found += [Case(kind, kind, zero_stage=3, micro=world_size) for kind in _NEW]
    found += [Case(f"{kind}_micro{micro}", kind, zero_stage=3, micro=micro) for kind, micro in marked]
    found += [Case("kto_one_a_step", "kto", zero_stage=2, per_step=1)]
    found += [Case(f"dpo_{name}", "dpo", name, zero_stage=stage) for name in ("gpt2", "mamba")]
    for name in tiny.FAMILIES:
        found += at((stage,), name, model=name)
    found += at((0, 3), "regularized", **REGULARIZED) + at((0, 3), "regularized_lora", **REGULARIZED_LORA)
    found += at((0, 2), "dora", **DORA) + at((3,), "dora", checkpointing=True, **DORA)
    found += at(range(4), "tiles_plain", tiles=3) + at(range(4), "tiles_lora", tiles=3, checkpointing=True, **LORA)
    found += [Case("bf16", dtype="bf16"), Case("pad_is_eos", pad_token_id=END)]
    found += at((0, 3), "compiled", compiled=True)
    for kind, model in (("sft", "causal"), ("ranking", "scalar"), ("dpo", "causal")):
        how = {"kind": kind, "model": model, "rows": "conversations", "shared": 4, "micro": 6 // world_size}
        found += at((0, 2, 3), f"shared_{kind}", **how)
    if world_size == 2:
        found += at((0, 3), "one_a_step", per_step=1) + [Case("dpo_one_a_step", "dpo", zero_stage=3, per_step=1)]
    return [replace(case, name=f"packed_{case.name}", packed=True) for case in found]


def wanted(of: list[Any], world_size: int, is_long: bool) -> list[Any]:
    """The cases or spreads that are run."""
    return [case for case in of if is_long or case.name in ORDINARY[world_size]]


def mixture_cases(world_size: int) -> list[Case]:
    """A mixture of experts with its balancing loss. One micro-batch on each rank, and
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


def run(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    found = run_cases(cases(ranks.world_size), ranks, models, out, is_long)
    some = wanted(spreads(ranks.world_size), ranks.world_size, is_long)
    return found | {spread.name: run_spread(spread, models, out, ranks) for spread in some}


def run_packed(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """A launch of its own, so that none takes long; as `run_mixtures` is."""
    return run_cases(packed_cases(ranks.world_size), ranks, models, out, is_long)


def run_mixtures(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    return run_cases(mixture_cases(ranks.world_size), ranks, models, out, is_long)


def run_cases(of: list[Case], ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    return {case.name: run_case(case, models, out, ranks) for case in wanted(of, ranks.world_size, is_long)}


def program_of(case: Case) -> str:
    """What launched.py runs for the case."""
    return f"engine_program.{'run_packed' if case.packed else 'run'}"


def engine_settings(case: Any, steps: int = STEPS) -> EngineSettings:
    recipe = Recipe(total_steps=steps)
    names = ("learning_rate", "weight_decay", "max_grad_norm", "num_warmup_steps")
    own = {name: getattr(recipe, name) for name in names}
    return EngineSettings(dtype=case.dtype, zero_stage=case.zero_stage, offload=case.offload, **own)


def make_engine(case: Case, models: Path, ranks: Any, head_of: Any = None) -> tuple[Any, Any]:
    """(the engine, the transformers model in it). head_of: gives the head that is trained with a model."""
    settings = engine_settings(case)

    def load(dtype: Any) -> Any:
        if case.kind != "ranking":
            return load_causal_lm(model_settings(case, models), dtype, tiny.VOCAB)
        tokenizer = tiny.StandInTokenizer(case.pad_token_id)
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


def loop_of(
    case: Any,
    model: Any,
    ranks: Any,
    packed: bool,
    features: Any,
    longest: int = LONGEST,
    steps: int = STEPS,
    **more: Any,
) -> Any:
    """The settings of a loop, as a program makes them of its flags. more: what is changed of them."""
    engine = EngineArguments(
        per_device_train_batch_size=case.micro,
        per_device_eval_batch_size=2,
        max_tokens_per_micro_batch=case.max_tokens,
        share_beginnings=case.shared,
        report_mfu=False,
    )
    flags: Any = SimpleNamespace(
        run=RunArguments(seed=SEED), engine=engine, data=data_flags(max_seq_len=longest), reporting=LogArguments(),
        guests=features,
    )  # fmt: skip
    loop = loop_settings(flags, (steps, case.per_step), model, packed, ranks=ranks, pad_token_id=case.pad_token_id)
    return replace(loop, eval_interval=0, **more)


def trained(
    case: Any,
    engine: Any,
    model: Any,
    folder: Path,
    ranks: Any,
    features: GuestFeatures,
    path: str = "",
    seed: int = SEED,
) -> tuple[list[dict[str, Any]], Any]:
    """Train SFT on packed or padded rows beside the features' guests; return the metrics' lines, of the first rank, and
    the guests."""
    loop = loop_of(case, model, ranks, case.packed, features)
    [guests] = features.open([(engine, model)], path, STEPS, seed)
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder, ranks.is_main) as metrics:
        SftTrainer(TrainingRun(engine, *rows_of("sft", "plain", PER_STEP), loop, metrics, guests=guests)).train()
    return lines_of(folder, ranks), guests


def lines_of(folder: Path, ranks: Any) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if ranks.is_main else []
    return [json.loads(line) for line in lines]


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines if name in line]


COLUMNS = {
    "losses": "train/loss", "norms": "train/grad_norm", "evals": "eval/loss",
    "train_accuracies": "train/token_accuracy",
    "eval_accuracies": "eval/token_accuracy", "router_losses": "train/router_loss",
    "router_loads": "train/router_load_max", "z_losses": "train/z_loss",
}  # fmt: skip


def run_case(case: Case, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    engine, model = make_engine(case, models, ranks)
    said: list[str] = []

    def read(rows: Any) -> Any:
        return engine(rows) if case.kind == "ranking" else engine(rows).logprobs_M

    packed = may_pack(
        not case.packed, model, engine, read, longest_tokens=LONGEST, log=lambda text, is_main: said.append(text)
    )
    features = balancing(case.router_coef)
    loop = loop_of(case, model, ranks, packed, features)
    [guests] = features.open([(engine, model)], "", STEPS, SEED)
    folder = out / case.name
    with MetricsWriter(folder, ranks.is_main) as metrics:
        rows = rows_of(case.kind, case.rows, case.per_step)
        trainer = make_trainer(case, TrainingRun(engine, *rows, loop, metrics, guests=guests), model)
        trainer.train()
        chosen = trainer.chosen_scores(most_rows=5) if case.kind == "ranking" else None
    keep_weights(engine, model, folder)
    ranks.leaving.close()  # DeepSpeed collects garbage at each engine, and would go through all that are left
    if not ranks.is_main:
        return {}
    lines = lines_of(folder, ranks)
    return {
        **{name: column(lines, figure) for name, figure in COLUMNS.items()},
        "evaluations": [line for line in lines if "eval/loss" in line],
        "chosen": chosen and asdict(chosen),
        "points": column(lines, f"train/point_{case.kind}"),
        "packed": packed,
        "said": said,
    }


def make_trainer(case: Case, run: Any, model: Any) -> Any:
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
    rows, _ = rows_of("sft", "plain", PER_STEP)
    return [tiny.without_targets(row) if row.row_id % 2 else row for row in rows] if how == "no_targets" else rows


def _laid(batch: list, min_width: int = 1, pad: int = PAD) -> Any:
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
    state = engine.full_state(model)
    if engine.ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "weights.pt")
