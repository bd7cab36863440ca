"""Training by the engine equals plain PyTorch in float64: losses, gradient norms, weights after four steps.

Adam hides a gradient's scale, so the norm is compared too; DeepSpeed keeps none in float32 at stage 0, where the clip
shows the scale: it holds in some steps and not in others. Beside the tolerance, residuals are to look like rounding:
of mean zero, and without a part along the update, where a wrong rate, decay or bias correction would lie.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants import engine_program, plain, tiny
from tests.invariants.engine_program import PER_STEP, SEED, Case, Spread
from training.utils.preference.batches import MismatchedRows

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def marked(world_size: int, case: Case | Spread) -> Any:
    """A parameter set of a test, marked `long` unless the ordinary form runs it."""
    is_ordinary = case.name in engine_program.ORDINARY[world_size]
    marks = [] if is_ordinary else [pytest.mark.long]
    return pytest.param(world_size, case, id=f"{world_size}-{case.name}", marks=marks)


EVERY = [
    marked(size, case) for size in (1, 2) for case in (*engine_program.cases(size), *engine_program.packed_cases(size))
]
OFFLOAD = [each for each in EVERY if each.values[1].offload]
SPREADS = [marked(size, spread) for size in (1, 2) for spread in engine_program.spreads(size)]


@cache
def start_of(folder: Path, kind: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto_class = AutoModelForSequenceClassification if kind == "ranking" else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float32).to(dtype).eval()
    model.set_experts_implementation("eager")  # of mixtures: the others compute in no float64
    return model


@cache
def trained_plainly(folder: Path, kind: str, rows: str, per_step: int, dtype: str) -> tuple[plain.Trained, list[float]]:
    """What plain PyTorch makes of the case, and its losses on the evaluation rows before and after."""
    train_rows, eval_rows = (
        engine_program.rows_of(kind, rows, per_step)
        if rows in ("plain", "eos_masked", "margins", "conversations")
        else (engine_program.spread_rows(rows), [])
    )
    loss_of = eval_loss_of = loss_of_kind(kind, folder, [train_rows, eval_rows])
    if rows == "margins":  # evaluation stays the plain loss
        loss_of = partial(plain.ranking_loss, **engine_program.LOSS_OPTIONS)
    batches = plain.batches_of(train_rows, per_step, SEED)
    model = copy.deepcopy(start_of(folder, kind, torch.float32 if dtype == "bf16" else torch.float64))

    def evaluated() -> float:
        with torch.no_grad():
            return float(eval_loss_of(model, eval_rows)) if eval_rows else math.nan

    before = evaluated()
    train = plain.train_mixed if dtype == "bf16" else plain.train
    return train(model, batches, loss_of, plain.Recipe()), [before, evaluated()]


def loss_of_kind(
    kind: str, folder: Path, splits: Sequence[list] = ()
) -> Callable[[torch.nn.Module, list], torch.Tensor]:
    if kind in engine_program.MARKED:
        pairs = [(rows, MismatchedRows(rows, engine_program.LONGEST)) for rows in splits]
        others = {
            row.row_id: other.response_ids[0] for rows, them in pairs for row, other in zip(rows, them, strict=True)
        }
        return plain.marked_loss(start_of(folder, kind), others, kind, *engine_program.MARKED[kind])
    if kind in engine_program.PREFERENCES:
        return plain.preference_loss(start_of(folder, kind), *engine_program.PREFERENCES[kind])
    return plain.sft_loss if kind == "sft" else plain.ranking_loss


def rounding_of(kind: str) -> float:
    """Of a loss in float32. A preference loss compares sums over whole responses, here of ten tokens."""
    return 2e-5 if kind in {**engine_program.PREFERENCES, **engine_program.MARKED} else 3e-6


def flat(weights: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    return torch.cat([_compared(name, weights[name].double()).flatten() for name in names])


def _compared(name: str, weight: torch.Tensor) -> torch.Tensor:
    """`weight` without the biases of keys: attention does not change with them, so their gradient is the rounding of
    a zero, which Adam blows up to whole steps."""
    if name.endswith("k_proj.bias"):  # OPT
        return weight[:0]
    if name.endswith("c_attn.bias"):  # GPT-2: queries, keys, values
        query, _, value = weight.chunk(3)
        return torch.cat([query, value])
    if name.endswith("query_key_value.bias"):  # Bloom: the same for each of four heads
        return weight.view(4, 3, -1)[:, [0, 2]]
    return weight


def assert_weights_equal(got: dict, want: dict, start: torch.nn.Module, tolerance: float, along: float) -> None:
    """`tolerance`: of the residual's size, as a share of the update's. `along`: of its part along the update."""
    names = list(want)
    first = flat(dict(start.named_parameters()), names).detach()
    update = flat(want, names) - first
    residual = flat(got, names) - flat(want, names)
    assert float(residual.norm() / update.norm()) < tolerance
    assert abs(float(residual @ update / (update @ update))) < along
    # The mean of n independent residuals of spread s strays by s / sqrt(n): 2.4 times that is the most seen here.
    if float(residual.std()) > 0:
        assert abs(float(residual.mean() / residual.std())) * math.sqrt(residual.numel()) < 6.0


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("world_size, case", EVERY)
def test_a_trainer_equals_plain_pytorch(launched, models, world_size: int, case: Case):
    out, reports = launched(engine_program.program_of(case), world_size)
    check(case, models, out, reports[0][case.name])


def check(case: Case, models: Path, out: Path, got: dict[str, Any]) -> None:
    """Compare what a run of a trainer left behind with plain PyTorch.

    Of adapters the model that is read back is W + B A alpha / rank under the plain names, with DoRA scaled to the
    magnitudes; DPO's reference is the model without them, whether it was read before training or is read with the
    adapters off. Noise on the embeddings is the same in any layout and on any rank, and log^2 Z is in the loss;
    evaluations have neither."""
    assert got["packed"] is (case.packed and case.model not in tiny.PADDED_FAMILIES)
    half = case.dtype == "bf16"
    # Such rows have larger losses and gradients, and a reference point is a sum over whole responses, as a loss is.
    more = 2 if case.shared or case.kind in engine_program.MARKED else 1
    rounding = more * rounding_of(case.kind)
    want, want_evals = trained_plainly(models / case.model, case.kind, case.rows, case.per_step, case.dtype)
    start = start_of(models / case.model, case.kind)
    losses, weights, norms_off = got["losses"], want.weights, 2e-2 if half else more * 2e-6
    tolerance, along = (0.08, 5e-3) if half else (1e-4, 1e-5) if case.model == "mixture" else (1e-5, 1e-6)
    if case.z_loss_coef:
        want = trained_with_noise(start)
        weights, rounding, norms_off = want.weights, 5e-6, 5e-6
        losses = [nll + case.z_loss_coef * z for nll, z in zip(losses, got["z_losses"], strict=True)]
    if case.lora_dim:
        # Adam divides by the adapters' first gradients, which are small: the rounding of DPO's sums is seen there.
        scale = 1.0 if case.kind == "sft" else 4.0
        want, weights = lora_trained_plainly(models, case.kind, bool(case.z_loss_coef), case.dora)
        rounding, tolerance, along = scale * rounding, scale * 1e-4, scale * 1e-5
        assert loaded(out / case.name).keys() == dict(start.named_parameters()).keys()
    assert losses == pytest.approx(want.losses, abs=3e-2 if half else rounding)
    if case.z_loss_coef or case.lora_dim:  # later evaluations are of other weights than plain training's without both
        assert got["evals"][0] == pytest.approx(want_evals[0], rel=3e-6)
    else:
        assert got["evals"] == pytest.approx(want_evals, rel=5e-3 if half else rounding)
    if (case.zero_stage > 0 or half) and not (case.lora_dim and not case.z_loss_coef):
        assert got["norms"] == pytest.approx(want.norms, rel=norms_off)
    if case.kind in engine_program.MARKED and case.per_step == PER_STEP:
        assert abs(got["points"][0]) < 1e-5 and abs(got["points"][-1]) > 0.5  # the policy has moved
    assert_weights_equal(loaded(out / case.name), weights, start, tolerance, along)
    if (case.kind, case.model, case.rows, case.per_step, half) == ("sft", "causal", "plain", PER_STEP, False):
        if not case.z_loss_coef and not case.lora_dim:
            want_train, want_eval = accuracies(models / "causal")
            assert len(set(want_train)) > 1 and max(want_eval) > 0
            assert got["train_accuracies"] == pytest.approx(want_train, abs=1e-9)
            assert got["eval_accuracies"] == pytest.approx(want_eval, abs=1e-9)


@pytest.mark.parametrize("name", ["padded_options_z0", "packed_options_z0", "packed_options_z3"])
def test_an_evaluation_does_not_depend_on_the_ranks(launched, name: str):
    """Every figure of both evaluations and the scores of chosen responses, on one rank and on two."""
    program = "run_packed" if name.startswith("packed") else "run"
    alone, together = (launched(f"engine_program.{program}", size)[1][0][name] for size in (1, 2))
    assert len(alone["evaluations"]) == 2
    for one, two in zip(alone["evaluations"], together["evaluations"], strict=True):
        figures = {key: value for key, value in one.items() if key != "seconds"}
        assert {"eval/ties", "eval/accuracy_shorter", "eval/calibration_error", "eval/rejected_p95"} <= figures.keys()
        assert figures == pytest.approx({key: value for key, value in two.items() if key != "seconds"}, abs=2e-5)
    assert alone["chosen"]["count"] == together["chosen"]["count"] == 5
    assert alone["chosen"]["mean"] == pytest.approx(together["chosen"]["mean"], abs=2e-5)
    assert alone["chosen"]["std"] == pytest.approx(together["chosen"]["std"], abs=2e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_chosen_responses_score_as_the_trained_weights_say(launched, models, world_size: int):
    out, reports = launched("engine_program.run_packed", world_size)
    train_rows, _ = engine_program.rows_of("ranking", "margins", PER_STEP)
    (drawn,) = plain.batches_of(train_rows, len(train_rows), SEED)
    model = copy.deepcopy(start_of(models / "scalar", "ranking"))
    model.load_state_dict({name: w.double() for name, w in loaded(out / "packed_options_z0").items()})
    with torch.no_grad():
        scores = [float(plain.score(model, [*row.prompt_ids, *row.response_ids[0]])) for row in drawn[:5]]
    mean = sum(scores) / 5
    chosen = reports[0]["packed_options_z0"]["chosen"]
    assert chosen["mean"] == pytest.approx(mean, abs=1e-5)
    assert chosen["std"] == pytest.approx(math.sqrt(sum((score - mean) ** 2 for score in scores) / 5), abs=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_falls_back_to_padding_says_so_and_nobody_else(launched, world_size: int):
    _, reports = launched("engine_program.run_packed", world_size)
    cases = [case for case in engine_program.packed_cases(world_size) if case.name in reports[0]]
    told = {case.model: reports[0][case.name]["said"] for case in cases}
    assert set(tiny.PADDED_FAMILIES) < set(told)
    for model, said in told.items():
        assert len(said) == (model in tiny.PADDED_FAMILIES)
    for model, name in (("bloom", "BloomForCausalLM"), ("mamba", "MambaForCausalLM")):
        assert told[model][0].startswith(f"warning: {name} trains on padded rows: ")


def trained_with_noise(start: torch.nn.Module) -> plain.Trained:
    train_rows, _ = engine_program.rows_of("sft", "plain", PER_STEP)
    batches = plain.batches_of(train_rows, PER_STEP, SEED)
    loss_of = noisy_sft_loss(engine_program.Z_LOSS_COEF)
    return plain.train(copy.deepcopy(start), batches, loss_of, plain.Recipe())


def noisy_sft_loss(z_loss_coef: float = 0.0) -> Callable[[torch.nn.Module, list], torch.Tensor]:
    """Plain PyTorch with noise whose seeds are those of the sequences' places in the run."""
    from training.utils.base.seeds import derived_seed

    places = itertools.count()

    def loss_of(model: torch.nn.Module, batch: list) -> torch.Tensor:
        seeds = [derived_seed(SEED, "neftune", next(places)) for _ in batch]
        return plain.sft_loss(model, batch, seeds, engine_program.NEFTUNE_ALPHA, z_loss_coef)

    return loss_of


@cache
def accuracies(folder: Path) -> tuple[list[float], list[float]]:
    import copy

    train_rows, eval_rows = engine_program.rows_of("sft", "plain", PER_STEP)
    model = copy.deepcopy(start_of(folder, "sft"))
    in_training = []
    on_evaluation = [plain.token_accuracy(model, eval_rows)]

    def loss_of(model: torch.nn.Module, batch: list) -> torch.Tensor:
        in_training.append(plain.token_accuracy(model, batch))
        return plain.sft_loss(model, batch)

    plain.train(model, plain.batches_of(train_rows, PER_STEP, SEED), loss_of, plain.Recipe())
    return in_training, [*on_evaluation, plain.token_accuracy(model, eval_rows)]


@cache
def lora_trained_plainly(
    models: Path, kind: str, regularized: bool, dora: bool = False
) -> tuple[plain.Trained, dict[str, torch.Tensor]]:
    from training.utils.base.seeds import seed_everything
    from training.utils.loading.models import load_causal_lm

    case = Case("lora", lora_dim=engine_program.LORA_DIM, dora=dora)
    seed_everything(SEED, rank=0)
    model = load_causal_lm(engine_program.model_settings(case, models), torch.float32, engine_program.PAD + 1).double()
    train_rows, _ = engine_program.rows_of(kind, "plain", PER_STEP)
    loss_of = loss_of_kind(kind, models / "causal")
    if regularized:
        trained = trained_with_noise(model)
    else:
        trained = plain.train(model, plain.batches_of(train_rows, PER_STEP, SEED), loss_of, plain.Recipe())
    return trained, merged(start_of(models / "causal", "sft"), trained.weights)


def merged(start: torch.nn.Module, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `start`, with trained adapters merged."""
    assert all(".lora_" in name for name in adapters) and adapters
    weights = {name: weight.detach().clone() for name, weight in start.named_parameters()}
    for name in weights:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapters:
            down, up = (adapters[f"{layer}.lora_{side}.default.weight"] for side in "AB")
            weights[name] += up @ down * engine_program.LORA_ALPHA / engine_program.LORA_DIM
        if (magnitudes := adapters.get(f"{layer}.lora_magnitude_vector.default.weight")) is not None:
            weights[name] *= (magnitudes / weights[name].square().sum(dim=1).sqrt())[:, None]
    return weights


@pytest.mark.parametrize("world_size, spread", SPREADS)
def test_who_computes_what_in_which_width_changes_nothing(launched, models, world_size: int, spread: Spread):
    out, reports = launched("engine_program.run", world_size)
    rows = "no_targets" if spread.how == "no_targets" else "plain"
    want, _ = trained_plainly(models / "causal", "sft", rows, PER_STEP, "fp32")
    assert reports[0][spread.name]["losses"] == pytest.approx(want.losses, abs=3e-6)
    start = start_of(models / "causal", "sft")
    assert_weights_equal(loaded(out / spread.name), want.weights, start, tolerance=1e-5, along=1e-6)


@pytest.mark.parametrize("world_size, case", OFFLOAD)
def test_offload_equals_none(launched, world_size: int, case: Case):
    out, _ = launched("engine_program.run", world_size)
    without = loaded(out / f"sft_z{case.zero_stage}_micro{1 if world_size == 2 else 2}_tokensNone")
    for name, tensor in loaded(out / case.name).items():
        torch.testing.assert_close(tensor, without[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_end_token_has_its_gradient_where_it_also_pads(launched, world_size: int):
    """The same as with a pad token of its own, and far from what a mask of `ids != pad` would give."""
    out, _ = launched("engine_program.run", world_size)
    eos_pads = loaded(out / "pad_is_eos")
    own_pad = loaded(out / "another_pad")
    masked = loaded(out / "pad_is_eos_masked")
    names = list(own_pad)
    torch.testing.assert_close(flat(eos_pads, names), flat(own_pad, names), rtol=0, atol=1e-6)
    embedding = "model.embed_tokens.weight"
    assert float((eos_pads[embedding][0] - masked[embedding][0]).abs().max()) > 1e-3
