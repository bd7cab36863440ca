"""Step counts, packing, and loading in the right precision; the settings of a loop are the flags (whole runs are opened
and finished in tests/end_to_end); media without the plugin that reads them; what takes the place of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2VLConfig

from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.console import LogPace
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.contracts.guests import GuestFeature
from training.utils.contracts.run import EvaluationObserver
from training.utils.contracts.token_rows import TokenRows
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.ranks.devices import Backend
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags import added as added_flags
from training.utils.flags.flags import AutoChoice
from training.utils.layout.planner import PlanSettings, forward_overhead_tokens
from training.utils.models.flops import model_shape
from training.utils.models.token_model import PolicyModel
from training.utils.plugins.plugin import InPlaceOfRun
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import RunFolder
from training.utils.run.trackers import LogArguments
from training.utils.setup import flags as setup_flags
from training.utils.setup import media, setup
from training.utils.setup.flags import CheckedStep, chosen_by_plugin
from training.utils.setup.guests import GuestFeatures
from training.utils.setup.one_model_run import loop_settings
from training.utils.setup.setup import (
    load_under,
    may_pack,
    whole_steps,
)
from training.utils.setup.step_program import StepProgram
from training.utils.setup.training_run import LoopSettings, TrainingRun


def ranks(world_size: int = 1, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "world_size", "rows", "expected"),
    [
        ({}, 1, 100, (6, 16)),
        ({}, 2, 100, (3, 32)),
        ({"gradient_accumulation_steps": 3}, 2, 100, (1, 96)),
        ({"num_train_epochs": 3.0}, 1, 100, (18, 16)),
        ({"max_train_steps": 4}, 1, 100, (4, 16)),
        ({"max_train_steps": 40}, 1, 100, (6, 16)),
    ],
)
def test_whole_steps(given, world_size, rows, expected):
    assert whole_steps(EngineArguments(**given), rows, ranks(world_size)) == expected
    words = r"needs 64 sequences \(--per_device_train_batch_size 16 x 2 ranks x --gradient_accumulation_steps 2\), but "
    with pytest.raises(ThreestepError, match=words + "1 epoch of 63 training rows cannot fill it"):
        whole_steps(EngineArguments(gradient_accumulation_steps=2), 63, ranks(2))


class Read:
    """An engine in all that `may_pack` asks of one: a policy, read in eval mode."""

    def __init__(self, family: str) -> None:
        self.model = tiny_causal_lm(family).train()
        self.ranks, self.policy, self.read = ranks(), PolicyModel(self.model), 0

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def eval(self) -> None:
        self.model.eval()

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        assert not self.model.training
        self.read += 1
        return self.policy(rows).logprobs_M


def packs(family: str, padded: bool, **more) -> tuple[bool, int, list[tuple[str, bool]]]:
    """The answer, how often the model was read, what was said."""
    engine, said = Read(family), []

    def say(text: str, is_main: bool) -> None:
        said.append((text, is_main))

    answer = may_pack(padded, engine.model, engine, engine, longest_tokens=30, log=say, **more)
    assert engine.model.training
    return answer, engine.read, said


def test_who_packs():
    """What padded rows give is compared with the model's own forward all the same."""
    answer, read, said = packs("llama", padded=False)
    assert answer is True and said == [] and read > 0
    assert packs("llama", padded=True) == (False, 1, [])
    reason = "its attention implementation 'eager' accepts no mask of segments here"
    answer, _, said = packs("bloom", padded=False)
    assert (answer, said) == (False, [(f"warning: BloomForCausalLM trains on padded rows: {reason}", True)])


@pytest.mark.parametrize("padded", [False, True])
def test_segments_within_a_document_are_checked_padded_or_not(padded):
    needs = {"sharing": False, "needs_segments": "--parallel_thinking"}
    answer, read, said = packs("llama", padded, **needs)
    assert answer is not padded and said == [] and read > 0
    start = "^--parallel_thinking needs a model that accepts a segment mask, padded or not, but "
    sentence = (
        start + "BloomForCausalLM does not: its attention implementation 'eager' accepts no mask of segments here; use "
        "another model or --attn_implementation, or remove --parallel_thinking$"
    )
    with pytest.raises(ThreestepError, match=sentence):
        packs("bloom", padded, **needs)


def test_loading_gives_the_dtype():
    asked = []
    model = load_under(
        EngineSettings(dtype="bf16"), ranks(), lambda dtype: asked.append(dtype) or tiny_causal_lm("gpt2", dtype)
    )
    assert asked == [torch.bfloat16] and model.dtype is torch.bfloat16


def test_the_peak_is_measured_as_the_run_multiplies(monkeypatch):
    held = []

    @contextlib.contextmanager
    def inside():
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(setup, "peak_of_all_ranks", lambda dtype, device: 5.0 * len(held))
    meter = setup.compute_meter(tiny_causal_lm("gpt2"), replace(ranks(), backend=Backend(inside)))
    assert meter.peak_flops_per_second == 5.0 and not held


@pytest.fixture
def folders(tmp_path):
    LlamaConfig().save_pretrained(tmp_path / "text")
    Qwen2VLConfig().save_pretrained(tmp_path / "more")
    return tmp_path


@pytest.fixture
def plugins(monkeypatch):
    """The entries of the table of media, as plugins add them."""
    entries: dict[str, str] = {}
    monkeypatch.setattr(media, "added", lambda table, known: entries)
    media.media_kind.cache_clear()
    yield entries
    media.media_kind.cache_clear()


@pytest.mark.parametrize("name", ["text", "more"])
def test_without_a_plugin_nothing_is_read_and_a_row_says_so(name, folders, plugins, monkeypatch):
    monkeypatch.setattr(media, "missing_plugin", lambda kind, name: f"no plugin for {name} in {kind}")
    path = str(folders / name)
    assert media.why_unread(path) == "no plugin for images in media"
    assert media.reader_of_model(path, False, None) is None and media.reader_of_folder(path, None) is None
    assert media.planned_media(path, False, 1, 1) is None and media.run_media([], None, id) is None
    with pytest.raises(ThreestepError, match="^images: no plugin for images in media$"):
        media.media_kind()


def test_a_model_of_text_asks_no_plugin(folders, plugins):
    plugins["images"] = "a.module.that.is:not_there"
    path = str(folders / "text")
    assert media.why_unread(path) == ONLY_TEXT
    assert media.reader_of_model(path, False, None) is None and media.planned_media(path, False, 1, 1) is None
    assert "a.module.that.is" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        media.reader_of_model(str(folders / "more"), False, None)


def test_two_plugins_are_one_too_many(plugins):
    plugins |= {"images": "a:b", "video": "c:d"}
    with pytest.raises(ThreestepError, match=r"several plugins read media \(images, video\).*; uninstall the others"):
        media.media_kind()


@pytest.mark.parametrize("packed", [False, True])
def test_the_loop_is_the_flags(packed, capsys):
    engine = EngineArguments(
        per_device_train_batch_size=5, per_device_eval_batch_size=7, max_tokens_per_micro_batch=999, eval_interval=4,
        report_mfu=False, share_beginnings=32,
    )  # fmt: skip
    run = RunArguments(seed=2)
    log_flags = LogArguments(logging_seconds=2.0)
    data = data_flags(max_seq_len=200)
    flags = SimpleNamespace(run=run, engine=engine, data=data, reporting=log_flags, guests=GuestFeatures())
    model = tiny_causal_lm("llama")  # of hidden size 32
    loop = loop_settings(flags, (10, 15), model, packed, ranks=ranks(3), pad_token_id=1)
    said = capsys.readouterr().out
    assert said == ("" if packed else "--share_beginnings has no effect on padded rows, which have one sequence each\n")
    each = forward_overhead_tokens(model.num_parameters(), on_gpu=False)
    train = PlanSettings(
        3, 999, 5, packed, max_row_tokens=200, quadratic_tokens=192.0, forward_tokens=each, least_shared_tokens=32
    )
    evaluation = PlanSettings(3, 999, 7, packed, max_row_tokens=200, quadratic_tokens=192.0, forward_tokens=each)
    rest = {"eval_interval": 4, "pad_token_id": 1, "seed": 2, "log_pace": LogPace(2.0)}
    assert loop == LoopSettings(10, 15, train, evaluation, **rest)
    run.shuffle = False
    unshuffled = loop_settings(flags, (10, 15), model, packed, ranks=ranks(3), pad_token_id=1)
    assert unshuffled == replace(loop, shuffle=False)


def test_forwards_on_a_cpu_are_small_where_none_is_read_twice():
    """30 x 200 tokens are above 2,048."""

    class Twice(GuestFeature):
        def reads_twice(self, model: Any) -> bool:
            return True

    engine = EngineArguments(per_device_train_batch_size=30, report_mfu=False)
    groups = {"run": RunArguments(), "engine": engine, "reporting": LogArguments()}
    model = tiny_causal_lm("llama")
    for guests, bound in ((GuestFeatures(), 2048), (GuestFeatures([GuestFeature(), Twice()]), 6000)):
        flags = SimpleNamespace(**groups, data=data_flags(max_seq_len=200), guests=guests)
        loop = loop_settings(flags, (1, 30), model, True, ranks=ranks(), pad_token_id=1)
        assert loop.train_plan.max_tokens_per_micro_batch == bound
    assert not GuestFeatures().keep_forwards_small(model, on_cpu=False, sharing=1)
    assert not GuestFeatures().keep_forwards_small(model, on_cpu=True, sharing=2)


def test_the_meter_knows_the_model_and_the_rate_of_this_machine(capsys):
    model = tiny_causal_lm("llama")
    groups = {"run": RunArguments(seed=2), "engine": EngineArguments(), "reporting": LogArguments()}
    flags = SimpleNamespace(**groups, data=data_flags(max_seq_len=20), guests=GuestFeatures())
    loop = loop_settings(flags, (1, 16), model, True, ranks=ranks(), pad_token_id=1)
    assert loop.meter is not None and loop.meter.shape == model_shape(model)
    rate = loop.meter.peak_flops_per_second
    assert 1e8 < rate < 1e15
    assert capsys.readouterr().out == (
        f"mfu: matmuls in float32 reach {rate / 1e12:.3g} TFLOP/s here; train/mfu is relative to this rate\n"
    )


DONE: list[Any] = []


def shown(step: CheckedStep) -> None:
    DONE.append(("shown", step))


def seven(step: CheckedStep, device: PlannedDevice) -> AutoChoice:
    return AutoChoice("sequences", 7, f"{step.scores} {device.is_cuda}")


@pytest.mark.parametrize(("settings", "does"), [({"show": True}, "shown"), ({"show": False}, "run"), ({}, "run")])
def test_a_switch_of_a_plugin_takes_the_place_of_the_run(monkeypatch, settings, does):
    tables = {"in_place_of_run": {"show": InPlaceOfRun(f"{__name__}:shown", "shows", "")}}
    monkeypatch.setattr(added_flags, "added", lambda table, known: tables[table])
    monkeypatch.setattr(__name__ + ".DONE", [])
    step, given = CheckedStep(SimpleNamespace(settings=settings)), list[Any]()
    program = StepProgram(lambda argv: given.append(argv) or step, lambda step: DONE.append(("run", step)))
    program(["--show"])
    assert given == [["--show"]] and DONE == [(does, step)]


def test_a_plugin_chooses_what_auto_stands_for(monkeypatch):
    tables = {"auto_choices": {"sequences": f"{__name__}:seven"}}
    monkeypatch.setattr(setup_flags, "added", lambda table, known: tables[table])
    step, device = CheckedStep(None, scores=True), PlannedDevice(False)
    assert chosen_by_plugin("sequences", step, device) == AutoChoice("sequences", 7, "True False")
    assert chosen_by_plugin("rows", step, device) is None


def test_the_main_rank_writes_lines_with_their_step_and_trackers_hear_of_them(tmp_path):
    heard: list = []

    class Tracker:
        def samples(self, step, samples):
            heard.append((step, list(samples)))

        def close(self, ended_well):
            pass

    class Observer(EvaluationObserver):
        def scored(self, scores):
            return [{"prompt": name} for name in scores.values()]

        def samples(self, step, samples):
            heard.append((step, list(samples)))

    nothing: Any = SimpleNamespace()
    settings: Any = SimpleNamespace(evaluation_observer=Observer())
    for is_main in (True, False):
        with MetricsWriter(tmp_path, is_main, trackers=[Tracker()] if is_main else []) as metrics:
            run = TrainingRun(nothing, [], [], settings, metrics, folder=RunFolder(tmp_path, is_main))
            run.write_samples(3, {0: "a", 1: "ü"})
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 3, "prompt": "a"}, {"step": 3, "prompt": "ü"}]
    assert heard == [(3, lines)] * 3  # the tracker of the main rank, and the observer of each
