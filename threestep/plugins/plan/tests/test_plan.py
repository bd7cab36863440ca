"""The plan of a run: shapes, choices, the search on a machine that is a formula, failures, costs, the program."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import yaml

from threestep import command
from threestep.plugins.plan.__main__ import FILE, main
from threestep.plugins.plan.choices import Choice, ladders, settings_of, ways_of_drawing
from threestep.plugins.plan.curve import SLOW_NODES, STOPS, bites, limit, points
from threestep.plugins.plan.drawing_flags import DRAWINGS, EngineLoad, WayOfDrawing, drawing_flags
from threestep.plugins.plan.failures import (
    FAILURES_PER_GPU_HOUR,
    SLOWER_BY,
    Losses,
    Reliability,
    WholeRun,
    daly_seconds,
    expected_seconds,
    losses,
    some_node_is_slow,
)
from threestep.plugins.plan.search import best_of, fits, search
from threestep.plugins.plan.shapes import SHAPES, shape_of, write_shape
from threestep.plugins.plan.tests.conftest import SHAPE
from threestep.plugins.plan.text import as_yaml, reasons
from training.utils.base.console import COMMAND_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine
from training.utils.flags.step import known_steps
from training.utils.run import launch

# As the repositories' safetensors have them.
WEIGHTS = {
    "0.5B": 494_032_768, "1.5B": 1_543_714_304, "7B": 7_615_616_512, "8B": 8_030_261_248, "13B": 13_015_864_320,
    "32B": 32_763_876_352, "70B": 70_553_706_496, "405B": 405_853_388_800,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_published(name):
    shape = SHAPES[name]
    keys = shape.width // shape.heads * shape.key_value_heads
    attention = 2 * shape.width**2 + 2 * shape.width * keys
    biases = shape.width + 2 * keys if shape.family == "qwen2" else 0
    layer = attention + biases + 3 * shape.width * shape.inner + 2 * shape.width
    tables = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    assert shape.layers * layer + tables + shape.width == WEIGHTS[name]


def test_names_have_any_case_and_a_folder_is_written_that_transformers_reads(tmp_path):
    write_shape(SHAPES["13B"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["num_attention_heads"]) == ("llama", 40, 40)
    assert shape_of("70b") is SHAPES["70B"]
    assert shape_of("./70B") is shape_of("runs/70B") is None
    with pytest.raises(ThreestepError, match="or one of 0.5B, 1.5B, .*, got '71B'; did you mean '7B'"):
        shape_of("71B")


def test_micro_batches_divide_a_ranks_share_and_one_rank_shards_nothing(wanted):
    """24 sequences on 2 ranks: 12 of each, in 1, 2 or 4."""
    here = list(ladders(wanted(ranks=2, sequences=24)))
    assert {tuple(choice.micro_batch for choice in ladder) for ladder in here} == {(1, 2, 4)}
    assert {(ladder[0].zero_stage, ladder[0].offload, ladder[0].recompute) for ladder in here} == {
        (stage, offload, recompute)
        for stage, offload in ((0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True))
        for recompute in (False, True)
    }
    assert {(ladder[0].zero_stage, ladder[0].offload) for ladder in ladders(wanted(ranks=1))} == {
        (0, False), (1, True), (2, True), (3, True),
    }  # fmt: skip


def test_step_3_draws_as_many_as_it_trains_on(wanted):
    here = replace(wanted(ranks=2), drawn=EngineLoad(100, 1, 16, 1000, heads=14))
    assert [drawing.ranks for drawing in ways_of_drawing(here)] == [1, 2, 1]
    assert [drawing.ranks for drawing in ways_of_drawing(replace(here, ranks=8))] == [1, 2, 1]
    choice = Choice(3, True, True, 4, DRAWINGS[1])
    first, second = settings_of(choice, here)
    assert first["per_device_training_batch_size"] * first["gradient_accumulation_steps"] == 8
    assert (first["per_device_generation_batch_size"], first["generation_batches"]) == (8, 1)
    assert (second["per_device_generation_batch_size"], second["generation_batches"]) == (2, 4)
    assert first["offload_reference_model"] and first["critic_zero_stage"] == 3


DRAWN = EngineLoad(weights=400, cache=10, sequences=16, gpu=1000, heads=4)


def test_flags_of_drawing():
    """400 / 2 + 16 x 10 = 360 of 1,000 bytes: 8 twentieths; in 4 batches 200 + 40: 5 of them."""
    two = WayOfDrawing("", "vllm", 2)
    assert drawing_flags(two, DRAWN, 1)["vllm_memory_share"] == 0.4
    assert drawing_flags(two, DRAWN, 4) == {
        "rollout_engine": "vllm", "per_device_generation_batch_size": 4, "generation_batches": 4,
        "vllm_tensor_parallel_size": 2, "vllm_memory_share": 0.25,
    }  # fmt: skip
    assert drawing_flags(WayOfDrawing("", "vllm", 1), DRAWN._replace(weights=900), 1) is None
    assert drawing_flags(WayOfDrawing("", "hf"), DRAWN, 3) is None
    assert drawing_flags(DRAWINGS[-1], DRAWN, 1) == {
        "rollout_engine": "hf", "per_device_generation_batch_size": 16, "generation_batches": 1,
    }  # fmt: skip


def test_the_fastest_of_all_that_fit_comes_first(wanted, estimates):
    """900 of 1,000 bytes may be used. Four sequences of a rank: whole, 600 bytes with ZeRO-3, one micro-step of 6 + 1
    seconds; on the host with offload 400 bytes, 6 + 5; whole stages hold one sequence, 4 x 3 seconds."""
    best = best_of(search(wanted(), estimates), wanted())
    first = best[0].choice
    assert (first.zero_stage, first.offload, first.recompute, first.micro_batch) == (3, False, False, 4)
    assert best[0].seconds == pytest.approx(7.0)
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    assert best[0].settings["gradient_accumulation_steps"] == 1
    here = wanted(gpu_bytes=500)
    tried = search(here, estimates)
    fitting = [one for one in tried if fits(one.memory, here)]
    assert fitting and best_of(tried, here)[0].seconds == min(sum(one.parts.values()) for one in fitting)
    assert all(one.parts is None for one in tried if not fits(one.memory, here))


def test_more_memory_is_never_slower_and_the_batch_is_the_same(wanted, estimates):
    seconds = []
    for gpu_bytes in range(150, 2000, 50):
        here = wanted(gpu_bytes=gpu_bytes)
        seconds.append(best_of(search(here, estimates), here)[0].seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    for one in search(wanted(ranks=2), estimates):
        settings = one.settings
        assert 2 * settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 16


def test_what_does_not_fit_is_said(wanted, estimates):
    here = wanted(gpu_bytes=200, host_bytes=100)
    with pytest.raises(ThreestepError) as mistake:
        best_of(search(here, estimates), here)
    assert "nothing fits 4 x h100: the closest setting (ZeRO-3, micro-batches of 1, recomputation) needs" in str(
        mistake.value
    )
    assert "GPU memory but a rank has" in str(mistake.value) and "use more --gpus" in str(mistake.value)
    here = wanted(ranks=3)
    with pytest.raises(ThreestepError, match="--sequences_per_step 16 must be a multiple of the 3 ranks"):
        best_of(search(here, estimates), here)
    assert fits(MemoryLine("", 900), wanted()) and not fits(MemoryLine("", 901), wanted())


def test_a_plans_words_and_its_file(wanted, estimates):
    tried = search(wanted(), estimates)
    assert list(reasons(tried[0], tried)) == [
        "with ZeRO-0, micro-batches of 4, recomputation: 2.000 s slower, mainly due to recomputation (+3.000 s)",
        "with offload: 5.000 s slower, mainly due to offload (+5.000 s)",
        "with recomputation: 3.000 s slower, mainly due to recomputation (+3.000 s)",
        "with micro-batches of 2: 3.000 s slower, mainly due to matmuls (+2.000 s)",
    ]
    best = search(wanted(), estimates)[0]
    text = as_yaml(best, "threestep sft --config plan.yaml --num_ranks 4")
    assert yaml.safe_load(text) == best.settings and "#   threestep sft --config plan.yaml" in text


# A failure of a GPU in 1e6 seconds, restarts of 300, a gigabyte a second of each GPU.
SURE = Reliability(1e-6, 300.0, 1e9, 0.0)
RUN = WholeRun(10_000, 10.0, 100, 3e12)  # a failure every 10,000 s; saves of 30 s


def test_failures_saves_and_slow_nodes_by_hand():
    """sqrt(2 x 30 x 10,000) = 774.6; times 1 + sqrt(0.0015) / 3 + 0.0015 / 9, less 30. 13 nodes of 100 GPUs, one in ten
    slow."""
    assert 1 / (16_384 * FAILURES_PER_GPU_HOUR) == pytest.approx(3.09, abs=0.01)
    assert daly_seconds(30.0, 1e4) == pytest.approx(774.597 * (1 + 0.038730 / 3 + 0.0015 / 9) - 30, abs=1e-2)
    assert daly_seconds(3e4, 1e4) == 1e4
    assert some_node_is_slow(100, 0.1) == pytest.approx(1 - 0.9**13) and some_node_is_slow(4, 0.1) == pytest.approx(0.1)
    assert losses(RUN, SURE._replace(slow_nodes=0.1)).slowed == pytest.approx(SLOWER_BY * (1 - 0.9**13))


def test_the_interval_is_the_best_of_all():
    """Every number of steps between checkpoints, by the expectation written as Daly (2006) has it, equation 20."""
    mean, save = 1e4, 30.0

    def seconds(every: int) -> float:
        segments = RUN.steps / every
        return mean * math.exp((300.0 + save) / mean) * (math.exp((every * 10.0 + save) / mean) - 1) * segments

    lost = losses(RUN, SURE)
    assert lost.every == min(range(1, 1000), key=seconds) and lost.save == save and lost.between_failures == mean
    assert lost.stopped == pytest.approx(seconds(lost.every) / 1e5 - 1) and lost.slowed == 0
    assert losses(RUN._replace(steps=50), SURE).every == 50


def test_without_failures_a_run_takes_its_steps_and_saves():
    rare = SURE._replace(failures=1e-15)
    assert expected_seconds(RUN, rare, 100) == pytest.approx(1e5 + 100 * 30.0, rel=1e-6)
    assert losses(RUN, rare).every == RUN.steps
    assert expected_seconds(RUN, SURE._replace(failures=1.0), 100) == math.inf


def nothing(ranks: int, seconds: float) -> Losses:
    """A run without failures."""
    return Losses(1, 1.0, 0.0, 0.0, 0.0)


def test_each_number_of_gpus_has_its_best_or_what_is_missing(wanted, estimates):
    """By hand: one GPU offloads and takes 8 of 16 sequences at a time, 2 x 10 + 5 seconds; four shard weights and take
    4 at once, 4 x (6 + 1) seconds of GPUs; 16 have a sequence each and room for whole weights, 16 x 3."""
    one, four, sixteen, more = points(wanted(), (1, 4, 16, 32), partial(search, estimates=estimates), nothing)
    assert (one.device_seconds, four.device_seconds, sixteen.device_seconds) == (25.0, 28.0, 48.0)
    assert limit(four, four) == "the cheapest"
    assert limit(sixteen, four) == "+71%, mainly due to matmuls"
    assert more.best is None and limit(more, four) == "the batch has only 16 sequences"
    (point,) = points(wanted(gpu_bytes=10), (4,), partial(search, estimates=estimates), nothing)
    assert point.best is None and point.why_none.startswith("nothing fits 4 x h100") and point.device_seconds > 1e9


def test_slow_nodes_and_stops_are_parts_that_begin_to_bite(wanted, estimates):
    """By hand: 28 seconds of four GPUs, 48 of sixteen, of which 16 x 3 are matmuls where four took 24; slow nodes add a
    tenth to sixteen, 4.8, which is more than a twentieth of 28, and stops 0.48, which is not."""

    def lost(ranks: int, seconds: float) -> Losses:
        return Losses(1, 1.0, 0.0, 0.1, 0.01) if ranks == 16 else nothing(ranks, seconds)

    four, sixteen = found = points(wanted(), (4, 16), partial(search, estimates=estimates), lost)
    assert sixteen.best is not None and sixteen.best.parts is not None
    assert abs(sixteen.best.parts[SLOW_NODES] - 0.3) < 1e-9 and abs(sixteen.best.parts[STOPS] - 0.03) < 1e-9
    assert bites(found, four) == {"matmuls": 16, SLOW_NODES: 16} and bites(found, sixteen) == {}


def test_a_plan_of_many_ranks_starts_none(monkeypatch):
    """By the launcher, and by the command."""
    for name in ("RANK", "WORLD_SIZE", "THREESTEP_RANKS", "THREESTEP_HOSTFILE", COMMAND_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    started, ran, words = [], [], "--num_ranks 64 --dry_run true".split()
    monkeypatch.setattr(launch, "run_and_wait", lambda *started_with, **_: started.append(started_with) or 0)
    launch.launch("m", words, 1)
    assert [started_with[1:] for started_with, _ in started] == [["-m", "m", *words]]
    monkeypatch.setattr(command, "_run_here", lambda module, words: ran.append((module, words)))
    command.main(["sft", *words])
    assert ran == [("training.step1_sft.main", words)]


FEW = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32", "--sequences_per_step", "4"]


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_the_file_is_taken_by_the_steps_dry_run(tmp_path, capsys, task):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 3}))
    place = tmp_path / "plan"
    main(["--model", str(tmp_path), "--task", task, "--gpus", "2xh100", "--output_dir", str(place), "--curve", "false",
          "--price_per_hour", "2.5", "--num_samples_per_prompt", "2", *FEW])  # fmt: skip
    said = capsys.readouterr().out
    assert f"{task} of {tmp_path} on 2 x h100, 4 sequences of 64 tokens" in said and "\n3. " in said
    seconds = float(said.split("1. ZeRO")[1].split(" s per ")[0].split()[-1])
    kind = "ppo" if task == "grpo" else task
    program = importlib.import_module(next(step.program for step in known_steps().values() if step.kind == kind))
    program.main(["--config", str(place / FILE), "--dry_run", "true", "--device", "h100", "--num_ranks", "2"])
    said = capsys.readouterr().out
    unit = "rollout" if kind == "ppo" else "step"
    assert float(said.split(f"  one {unit}")[1].split()[0]) == pytest.approx(seconds, abs=1e-3)


def test_nothing_that_fits_is_one_sentence(tmp_path):
    with pytest.raises(ThreestepError, match="nothing fits 1 x rtx4090: the closest .* short.; use more --gpus"):
        main(["--model", "8B", "--gpus", "1xrtx4090", "--output_dir", str(tmp_path), "--curve", "false",
              "--sequences_per_step", "1", "--host_memory_gb", "8"])  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--model_name_or_path expects a folder with a config.json or a size such as 70B, got nothing"),
        (["--model", "8B", "--gpus", "h100"], "--gpus expects NUMBERxNAME, such as 32xh100, got 'h100'"),
        *(
            (["--model", "8B", "--gpus", number + "xh100"], "--gpus expects NUMBERxNAME")
            for number in ("²", "٣", "0", "1" + 30 * "0", 5000 * "9")
        ),
        (["--model", "8B", "--host_memory_gb", "inf"], "--host_memory_gb expects .*, got inf"),
        (["--model", "8B", "--gpus", "8xh10"], "got '8xh10'; valid names are h100, .*; did you mean 'h100'"),
    ],
)
def test_mistakes(words, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        main(words)
