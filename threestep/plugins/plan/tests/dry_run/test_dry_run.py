"""A dry run: its device and table, models on the meta device, steps with one model, and every recipe."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml

from tests.support.lora_settings import lora_settings
from tests.support.recipes import ARCHITECTURES, RECIPES, TRAINING, flags_for, gpus_of, hub_name
from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.dry_run import cpu_rates, in_a_model
from threestep.plugins.plan.dry_run.clock import clock_device
from threestep.plugins.plan.dry_run.device import check_fits, planned_device, verdict
from threestep.plugins.plan.dry_run.estimate import Estimate, ModelCounts, kept_counts
from threestep.plugins.plan.dry_run.meta import model_on_meta
from threestep.plugins.plan.dry_run.plan import rows_at_most
from threestep.plugins.plan.dry_run.steps import estimated
from threestep.plugins.plan.dry_run.table import most_at_once, print_memory, print_plan, ranks_of_dry_run
from training.step1_sft.main import main
from training.step2_dpo.main import main as step2_dpo
from training.utils.base import user_files
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
from training.utils.data import registry
from training.utils.flags.arguments import parse_arguments
from training.utils.generation.table import ENGINES
from training.utils.layout.planner import forward_plan
from training.utils.models.row_sharing import RowSharing
from training.utils.models.settings import ModelSettings
from training.utils.run.run_arguments import RunArguments


def test_ranks_are_those_asked_for_or_the_launchers_or_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_of_dry_run(None) == 1 and ranks_of_dry_run(8) == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_of_dry_run(None) == 4 and ranks_of_dry_run(8) == 8


def test_the_parts_add_up_to_the_totals():
    held = [MemoryLine("weights", 5, 1), MemoryLine("optimizer", 0, 7)]
    moments = [Moment("in a backward", (MemoryLine("a", 1), MemoryLine("b", 2, 4))), Moment("resting", ())]
    reached = most_at_once(held, moments)
    assert reached[0] == MemoryLine("most at once, in a backward", 8, 12)
    assert reached[1] == MemoryLine("most at once, resting", 5, 8)


def test_what_is_printed_adds_up_and_only_the_first_rank_speaks(capsys, monkeypatch):
    gib = 2**30
    held = [MemoryLine("weights", 2 * gib, gib), MemoryLine("optimizer", 3 * gib)]
    print_memory(held, [Moment("x", (MemoryLine("a", gib),)), Moment("y", ())], lambda most: f"judged {most}")
    said = capsys.readouterr().out
    figures = {
        line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in said.splitlines()[2:-1] if "--" not in line
    }
    assert figures["total held throughout"] == ["5.000", "1.000"] == figures["most at once, y"]
    assert figures["most at once, x"] == ["6.000", "1.000"] == figures["most at once"]
    assert said.endswith(f"judged {6 * gib}\n")
    monkeypatch.setenv("RANK", "1")
    print_plan("a.program", 2, {"seed": 1}, ["a sentence"])
    print_memory([MemoryLine("weights", 1)], [Moment("at work", ())], str)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num_ranks", "8"], "--num_ranks 8 is the number of ranks that `threestep` and scripts"),
        (["--dry_run", "true", "--ranks", "0"], "--num_ranks expects 1 or more, got 0"),
        (["--device", "cuda"], "--device cuda describes a device to plan for and needs --dry_run"),
        (
            ["--dry_run", "--device_memory_gb", "80", "--device", "cpu"],
            "--device_memory_gb 80.0 applies to GPUs, but --dev",
        ),
        (["--dry_run", "--device", "gpu"], "--device expects one of cpu, cuda, h100, "),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        parse_arguments((RunArguments, DryRunArguments), flags, "")


@pytest.mark.parametrize(
    ("kind", "gigabytes", "expected"),
    [
        (None, None, PlannedDevice(False)),
        ("cpu", None, PlannedDevice(False)),
        ("cuda", None, PlannedDevice(True)),
        ("cuda", 80.0, PlannedDevice(True, 80_000_000_000)),
        (None, 24.0, PlannedDevice(True, 24_000_000_000)),
        ("rtx4090", None, PlannedDevice(True, int(DEVICES["rtx4090"].memory_gb * 1e9))),
        ("h100", 96.0, PlannedDevice(True, 96_000_000_000)),
    ],
)
def test_without_a_gpu_the_flags_say_what_is_planned(monkeypatch, kind, gigabytes, expected):
    """And the table of devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device(DryRunArguments(True, kind, gigabytes)) == expected


@pytest.mark.parametrize(("most", "words"), [(50, "this fits a GPU"), (95, "this barely fits a GPU")])
def test_the_verdict_leaves_a_tenth_to_cuda(most, words):
    sentence = verdict(PlannedDevice(True, 100 * 10**9), most * 10**9)
    assert sentence.startswith(words) and "100 GB (93.1 GiB)" in sentence and f"{most}% of it" in sentence


def test_what_does_not_fit_is_an_error_with_the_flags_that_help():
    settings = {"gradient_checkpointing": False, "zero_stage": 0, "lora_dim": 0, "offload": True}
    with pytest.raises(ThreestepError) as refused:
        check_fits(PlannedDevice(True, 100 * 10**9), 101 * 10**9, settings, 2)
    assert str(refused.value) == (
        "this does not fit on a GPU of 100 GB (93.1 GiB): 101% of it; try --gradient_checkpointing true, "
        "--zero_stage 3, --max_tokens_per_micro_batch 2048, --lora_dim 16, --num_ranks above 2"
    )


def test_nothing_is_said_of_a_memory_that_is_unknown():
    assert verdict(PlannedDevice(False), 10**15) is None


def test_a_packed_forward_and_rows_of_padded_responses():
    assert rows_at_most(4, 100, True, None, shared_by=2) == 4
    assert forward_plan(4, 100, 64, packed=True, ranks=2).max_tokens_per_micro_batch == 4 * 100
    assert rows_at_most(4, 100, False, None, shared_by=2) == 8
    assert forward_plan(4, 100, 64, packed=False, ranks=2).max_tokens_per_micro_batch is None


@pytest.mark.parametrize(("bound", "rows"), [(250, 3), (50, 1)])
def test_a_bound_in_tokens_is_kept_to_the_row_and_one_sequence_always_fits(bound, rows):
    for packed in (True, False):
        assert rows_at_most(4, 100, packed, bound) == rows
        plan = forward_plan(4, 100, 64, packed=packed, ranks=2, max_tokens_per_micro_batch=bound)
        assert plan.max_tokens_per_micro_batch == bound


SHAPE = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=64)  # fmt: skip


def settings(tmp_path, config: dict, **loading) -> ModelSettings:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return lora_settings(str(tmp_path), **loading)


def test_adapters_and_a_scalar_head_train_and_nothing_has_memory(tmp_path):
    loading = settings(tmp_path, SHAPE, lora_dim=2, lora_module_name="q_proj")
    model = model_on_meta(loading, torch.bfloat16, scores=True)
    assert {part.device.type for part in model.parameters()} == {"meta"}
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
    # the head of one label, and in each of two layers A and B of rank 2 at a matrix of 32 x 32
    assert sum(part.numel() for part in model.parameters() if part.requires_grad) == 32 + 2 * 2 * (2 * 32)


def test_a_models_dropout_is_set_and_what_is_no_model_is_refused(tmp_path):
    loading = settings(tmp_path, SHAPE, dropout=0.25, gradient_checkpointing=True)
    model = model_on_meta(loading, torch.float32)
    assert model.config.attention_dropout == 0.25 and not model.is_gradient_checkpointing and model.training
    with pytest.raises(ThreestepError, match="Unrecognized configuration class"):
        model_on_meta(settings(tmp_path, {"model_type": "vit"}), torch.float32)


def test_the_most_is_of_one_moment_and_any_can_be_left_out():
    moments = [Moment("rolling out", (MemoryLine("", 7),)), Moment("in a backward", (MemoryLine("", 5, 2),))]
    found = Estimate([], [MemoryLine("", 100, 10)], moments, PlannedDevice(True), lambda: None, None)
    assert (found.most().device_bytes, found.most().host_bytes) == (107, 12)
    assert found.most(without="rolling out").device_bytes == 105


def test_kept_counts_estimate_the_same_and_build_a_model_once(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    kept, settings = kept_counts(), ModelSettings(str(tmp_path))
    recomputing = replace(settings, gradient_checkpointing=True)
    assert kept.model(settings, torch.bfloat16) is kept.model(recomputing, torch.bfloat16)
    words = ["--data_path", "embedded", "--model_name_or_path", str(tmp_path), "--max_seq_len", "64"]
    words += ["--dry_run", "true", "--device", "h100", "--gradient_checkpointing"]
    for recomputes in ("false", "true", "false"):
        anew, again = (estimated(main.checked([*words, recomputes]), counts) for counts in (ModelCounts(), kept))
        assert anew.most() == again.most() and anew.parts() == again.parts()
    assert "GiB" not in capsys.readouterr().out


@pytest.mark.parametrize(("gigabytes", "sequences"), [("80", 48), ("0.02", 16), ("0.0001", 1)])
def test_as_many_sequences_as_fit(dry_run, gigabytes, sequences):
    """`auto`: the most sequences of a step whose forward fits, the step as large as ever."""
    flags = f"--device cuda --device_memory_gb {gigabytes} --gradient_accumulation_steps 3 --max_seq_len 128"
    text = dry_run(main, *flags.split(), "--per_device_train_batch_size", "auto", fits=sequences > 1)
    assert f"auto: --per_device_train_batch_size {sequences} (of 48 in a step; a forward may need" in text
    assert f"an optimizer step uses 48 sequences ({sequences} x 1 rank x {48 // sequences})" in text
    needed, free = re.search(r"may need ([\d.e+-]+) GB of ([\d.e+-]+) GB free", text).groups()
    assert (float(needed) <= 0.9 * float(free)) == (sequences > 1)


@pytest.mark.parametrize(("kind", "tokens"), [("cpu", "2,048"), ("cuda", "3,840")])
def test_forwards_on_a_cpu_are_counted_small(dry_run, kind, tokens):
    """30 sequences of 128 tokens are 3,840; 16 of them are 2,048."""
    text = dry_run(main, "--max_seq_len", "128", "--per_device_train_batch_size", "30", "--device", kind)
    assert f"a forward on one rank holds at most {tokens} tokens in packed rows" in text


@pytest.fixture
def said(dry_run):
    return lambda *flags: dry_run(main, "--max_seq_len", "64", *flags, layers=3)


def test_a_name_gives_seconds_hours_and_money(said):
    text = said("--device", "h100", "--num_ranks", "64", "--price_per_hour", "2.5", "--max_train_steps", "1000")
    assert "seconds of one step on 64 x h100" in text and "kernel launches by the host" in text and "traffic" in text
    assert "1,000 steps: " in text and "at 2.5 per hour and rank" in text and "accuracy: " in text
    assert "this fits a GPU of 80 GB" in text
    assert "seconds of one step" not in said("--device", "cuda")  # a kind alone


def test_pairs_are_two_sequences(dry_run):
    """Of the same length and number, pairs take twice the forwards, as a step of DPO does; the optimizer steps once."""
    flags = ("--device", "h100", "--gradient_accumulation_steps", "4", "--max_seq_len", "64")
    text, pairs = (dry_run(step, *flags, layers=3) for step in (main, step2_dpo))

    def seconds(table: str, name: str) -> float:
        return float(re.findall(rf"^  {name} +([\d.]+)$", table, re.M)[-1])

    assert seconds(pairs, "kernel launches by the host") == pytest.approx(
        2 * seconds(text, "kernel launches by the host"), abs=2e-4
    )
    assert seconds(pairs, "optimizer") == seconds(text, "optimizer")


def test_seconds_are_not_known_for_shared_rows_and_a_price_needs_a_device(capsys, said):
    assert clock_device("h100", "bf16", sharing=RowSharing(2, flag="--ranks_of_a_row")) is None
    assert "not yet available with --ranks_of_a_row 2" in capsys.readouterr().out
    with pytest.raises(ThreestepError, match=r"--price_per_hour 2.5 needs a --device of known speed.*, got cuda"):
        said("--device", "cuda", "--price_per_hour", "2.5")


@pytest.fixture
def quick(monkeypatch):
    """Rates from a try of next to no time."""
    monkeypatch.setattr(cpu_rates, "_PRODUCTS", {8: (8, 16), 16: (16,)})
    monkeypatch.setattr(cpu_rates, "_NUMBERS", (1000, 8000))
    monkeypatch.setattr(in_a_model, "_TRIES", 1)
    monkeypatch.setattr(cpu_rates, "seconds_of", partial(cpu_rates.seconds_of, tries=1, least=1e-4))


def test_this_cpu_is_measured(said, quick):
    assert "seconds of one step on 1 x this CPU" in said("--device", "cpu")
    device = clock_device("cpu", "fp32")
    assert device is not None and device.measured is not None and device.single > 0 and device.memory_rate > 0
    assert device.measured.optimizer_rate(1e6) > 0 and device.measured.launch_seconds(1e5) > 0 and not device.is_cuda
    assert clock_device("cuda", "fp32") is clock_device(None, "fp32") is None


def test_ranks_share_the_threads(monkeypatch):
    """As a run of two ranks would; the process has its own again afterwards."""
    seen = []
    monkeypatch.setattr(cpu_rates, "_measured", lambda dtype: seen.append(torch.get_num_threads()))
    monkeypatch.setattr("training.utils.engine.ranks.devices.cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    for ranks in (1, 2, 64):
        clock_device("cpu", "fp32", ranks=ranks)
        assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    cpu_rates.measured_cpu(ranks=3)
    assert seen == [before, 3, 1, before]


def test_a_device_is_read_from_a_file(said, tmp_path):
    (tmp_path / "mine.json").write_text(DEVICES["l40s"].as_json())
    assert clock_device(str(tmp_path / "mine.json"), "bf16") == DEVICES["l40s"]
    assert f"seconds of one step on 1 x {tmp_path / 'mine.json'}" in said("--device", str(tmp_path / "mine.json"))
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(ThreestepError, match=rf"--device \S*{name} expects a file written by .*; measure again"):
            clock_device(str(tmp_path / name), "bf16")
    with pytest.raises(ThreestepError, match="--device expects one of cpu, .* got 'h10'; did you mean 'h100'"):
        said("--device", "h10")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a recipe's --dataset_module registers is forgotten after it."""
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(user_files, "_loaded", {})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_recipe_resolves_and_fits_the_gpus_it_names(recipe, tmp_path, capsys, monkeypatch):
    engine = yaml.safe_load(recipe.read_text()).get("rollout_engine", "hf")
    if engine not in ENGINES:
        pytest.skip(f"the rollout engine {engine} is of a plugin, which is not there")
    monkeypatch.chdir(TRAINING.parent)  # where a recipe names files of the project
    ranks, gigabytes = gpus_of(recipe)
    weights, config = ARCHITECTURES[hub_name(recipe)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    main = importlib.import_module(f"training.{recipe.parent.parent.name}.main").main

    flags = [*flags_for(recipe, tmp_path), "--output_dir", str(tmp_path / "run")]
    flags += ["--device", "cuda", "--device_memory_gb", str(gigabytes)]
    assert main(["--config", str(recipe), *flags, "--dry_run", "true", "--num_ranks", str(ranks)]) is None

    said = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    if recipe.parent.parent.name != "step2_reward" and "lora" not in recipe.stem:
        assert f"{weights:,} weights" in said
    peaks = [float(found.replace(",", "")) for found in re.findall(r"most at once\S*.*?([\d,.]+) +\S+\n", said)]
    assert peaks and max(peaks) * 2**30 < 0.9 * gigabytes * 1e9  # a tenth for CUDA itself and torch's fragmentation
    assert max(peaks) * 2**30 > 0.02 * gigabytes * 1e9
