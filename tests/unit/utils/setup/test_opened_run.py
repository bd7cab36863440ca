"""How a run of any step begins, and what it leaves at its end, in what order."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import random
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import training
from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm
from training.step1_sft import STEP as SFT
from training.step2_dpo import STEP as DPO
from training.step2_reward import STEP as REWARD
from training.step3_ppo import STEP as PPO
from training.utils.base.console import WHOLE_RUN_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import MANIFEST, CheckpointFolder
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.checkpoints.plan import CheckpointPlan, check_settings
from training.utils.data.files.digests import digest_files
from training.utils.engine.ranks import devices
from training.utils.engine.ranks.devices import Backend
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.added import AddedFlags
from training.utils.flags.arguments import parse_arguments, resolved_settings
from training.utils.run.run_arguments import FaultArguments, RunArguments
from training.utils.run.run_folder import EndedRun, RunFolder
from training.utils.setup import opened_run, saving, setup
from training.utils.setup.opened_run import OpenedRun, RunData, commit_of, environment_of, open_run, with_head_chunk


def ranks_of(world_size: int = 1, rank: int = 0, device: str = "cpu") -> Ranks:
    return Ranks(rank, rank, world_size, torch.device(device))


def run_of(
    folder: Path,
    settings: dict[str, Any],
    ranks: Ranks | None = None,
    *,
    begun: Path | None = None,
    step: Any = None,
    flags: Any = None,
    trains: bool = True,
) -> OpenedRun:
    ranks = ranks or ranks_of()
    plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder(folder), settings, begun)
    return OpenedRun(step, flags, ranks, plan, RunFolder(folder, ranks.is_main), trains)


@pytest.fixture
def alone(monkeypatch) -> None:
    """`open_run` starts no ranks and keeps nobody out."""
    monkeypatch.setattr(opened_run, "started_process_group", lambda *given: contextlib.nullcontext(ranks_of()))
    monkeypatch.setattr(opened_run, "only_run_in", lambda *given: contextlib.nullcontext())


class Noted:
    """Engines of a run, its average and its guests: each notes what is asked of it."""

    folder = "model_ema"

    def __init__(self, *engines: str) -> None:
        self.events: list[str] = []
        self.engines: Any = {name: self.engine(name) for name in engines}

    def engine(self, name: str) -> Any:
        def full_state(model: Any) -> str:
            self.events.append(f"weights of {model}")
            return name

        return SimpleNamespace(module=SimpleNamespace(model=f"{name} model"), full_state=full_state)

    def put_in_place(self) -> None:
        self.events.append("average in place")

    def model_writer(self) -> None:
        self.events.append("guests")


def finished(
    noted: Noted, folder: Path, monkeypatch: Any, average: bool = False, trains: bool = True, **tokenizers: str
) -> list[str]:
    """The events of a run's end, with the folders that are written."""

    def save_model(place: Path, model: Any, tensors: Any, tokenizer: Any, write_more: Any) -> None:
        noted.events.append(f"{place.name}: {model}, {tensors}, {tokenizer}")

    def at_end(ended: EndedRun) -> str:
        noted.events.append(f"closed {ended.trains}")
        return "; well"

    monkeypatch.setattr(saving, "save_model", save_model)
    monkeypatch.setattr(opened_run, "hooks", lambda name: [at_end, lambda ended: ""] if name == "at_end" else [])
    whole: Any = noted
    parts = CheckpointParts(noted.engines, ranks_of(), [whole] if average else [], tokenizers)
    run_of(folder, {}, trains=trains).finish(parts, whole, {"summary.json": {"seconds": 1.0}}, "the end")
    return noted.events


def test_the_first_model_has_its_guests_and_the_average_comes_last(tmp_path, monkeypatch, capsys):
    noted = Noted("actor", "critic", "mtp")
    assert finished(noted, tmp_path, monkeypatch, average=True, actor="words", critic="scores") == [
        "weights of actor model", "guests", "model: actor model, actor, words",
        "weights of critic model", "critic: critic model, critic, scores",
        "average in place", "weights of actor model", "model_ema: actor model, actor, words",
        "closed True",
    ]  # fmt: skip
    assert capsys.readouterr().out == "the end; well\n" and (tmp_path / "summary.json").is_file()
    events = finished(Noted("model"), tmp_path, monkeypatch, model="words")  # one alone is called so
    assert events == ["weights of model model", "guests", "model: model model, model, words", "closed True"]
    assert finished(Noted("actor"), tmp_path, monkeypatch, trains=False, actor="words") == ["closed False"]


@pytest.mark.parametrize(
    ("began_with", "given", "settled"),
    [
        (None, None, None),  # a new run
        ({}, None, None),
        ({"eval_interval": 0}, None, 0),  # written when that was the default
        ({"eval_interval": 0}, 3, 3),
        ({"eval_interval": 5}, None, 5),
    ],
)
def test_a_resumed_run_evaluates_as_it_began(tmp_path, monkeypatch, began_with, given, settled):
    settings = {"eval_interval": given, "head_chunk_mb": 0, "program": "p", "ranks": 1}
    begun = tmp_path if began_with is not None else None
    if begun:
        (tmp_path / MANIFEST).write_text(json.dumps({"settings": began_with}))
    (tmp_path / "summary.json").write_text("{}")  # of the run that is resumed, or of one that was killed
    written: list[dict] = []
    monkeypatch.setattr(RunFolder, "write_config", lambda self, settings, *comment: written.append(settings))
    monkeypatch.setattr(opened_run, "added", lambda table, known: {})
    opened = run_of(tmp_path, settings, begun=begun, flags=SimpleNamespace(run=RunArguments()))
    opened.start("chat", "model", predicts_tokens=False)
    assert opened.settings["eval_interval"] == written[0]["eval_interval"] == settled
    assert (tmp_path / "summary.json").exists() == (began_with is not None)


class Flags(NamedTuple):
    """The flags that every run has."""

    run: Any
    checkpoints: CheckpointArguments
    faults: Any
    data: Any
    added: AddedFlags = AddedFlags()


def flags_of(folder: Path, data: Any) -> Flags:
    return Flags(RunArguments(output_dir=str(folder)), CheckpointArguments(), FaultArguments(rank_timeout=1.0), data)


def planned(tmp_path, monkeypatch, step=SFT, began=None, **split):
    """The split of a run that is about to begin, or resumes one that began with `began`."""
    monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: (began or {}).get(name))
    data = data_flags(data_path=["embedded"], **split)
    with open_run(step, flags_of(tmp_path, data), {"data_split": data.split.data_split}) as found:
        assert found.settings["data_split"] == found.flags.data.split.data_split
        return found.flags.data.split.data_split


@pytest.mark.parametrize(("step", "share"), [(SFT, "1,0,0"), (REWARD, "0,1,0"), (DPO, "0,1,0"), (PPO, "0,0,1")])
def test_a_step_alone_takes_every_row_and_steps_of_a_whole_run_share_them(alone, tmp_path, monkeypatch, step, share):
    monkeypatch.delenv(WHOLE_RUN_VARIABLE, raising=False)
    assert planned(tmp_path, monkeypatch, step) == share
    assert planned(tmp_path, monkeypatch, step, data_split="3,3,4") == "3,3,4"
    # A resumed run keeps what it began with; 2,4,4 was the default of every step.
    assert planned(tmp_path, monkeypatch, step, began={"data_split": "2,4,4"}) == "2,4,4"
    assert planned(tmp_path, monkeypatch, step, began={"data_split": "2,4,4"}, data_split="1,0,0") == "1,0,0"
    monkeypatch.setenv(WHOLE_RUN_VARIABLE, "1")
    assert planned(tmp_path, monkeypatch, step) == "2,4,4"
    assert planned(tmp_path, monkeypatch, step, data_split="1,1,0") == "1,1,0"


def test_a_resumed_run_is_refused_another_share():
    begun = {"data_split": "2,4,4", "program": "p", "ranks": 1}
    check_settings(Path("step_1"), {"settings": begun, "defaults": {}}, {**begun, "data_split": "auto"}, {})
    with pytest.raises(ThreestepError, match="--data_split was 2,4,4 and is now 1,0,0"):
        check_settings(Path("step_1"), {"settings": begun, "defaults": {}}, {**begun, "data_split": "1,0,0"}, {})


def test_the_backend_is_decided_with_what_the_run_began_with(alone, monkeypatch, tmp_path):
    """What plugins decide is in the settings of the run and of its checkpoints; a run that resumes none has begun with
    nothing."""

    def decide(settings, device, began_with):
        return Backend(decided={"own": [settings["own"], began_with and began_with("own")]})

    monkeypatch.setattr(devices, "added", lambda table, known: {"own": "decide"} if table == "backends" else {})
    monkeypatch.setattr(devices, "named_object", {"decide": decide}.get)
    monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: {"own": "earlier"}.get(name))
    flags = flags_of(tmp_path, data_flags(data_path=["embedded"]))
    for resumes, began in ((None, None), (tmp_path, "earlier")):
        plan = CheckpointPlan(flags.checkpoints, None, {}, resumes)  # type: ignore[arg-type]
        monkeypatch.setattr(opened_run, "plan_checkpoints", lambda *given, plan=plan, **named: plan)
        with open_run(SFT, flags, {"own": 1}) as found:
            assert found.settings["own"] == [1, began]


def test_the_backend_of_the_ranks_holds_in_the_loop_alone(monkeypatch, tmp_path):
    taken: list[str] = []

    @contextlib.contextmanager
    def noted(name):
        taken.append(f"in {name}")
        yield
        taken.append("out")

    digests: dict[str, Any] = {}

    def checkpointed_run(*given, model_digests, **named):
        digests.update(model_digests)
        return contextlib.nullcontext(("metrics", "checkpoints"))

    monkeypatch.setattr(opened_run, "checkpointed_run", checkpointed_run)
    nothing: Any = None
    flags = flags_of(tmp_path, data_flags(data_output_path=str(tmp_path / "cache")))
    ranks = Ranks(0, 0, 1, torch.device("cpu"), backend=Backend(partial(noted, "own")))
    run = run_of(tmp_path, {"dtype": "fp32"}, ranks, step=SFT, flags=flags, trains=False)
    report: Any = flags.run  # any dataclass
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    with run.recorded(nothing, RunData(report, "rows", 1.0), {"read": str(tmp_path / "start"), "unread": ""}):
        taken.append("the loop")
    assert digests["read"]() != digests["unread"]() == digest_files([], "elsewhere")
    assert taken == ["in own", "the loop", "out"]


def test_the_style_that_rows_have_is_written_to_the_settings(tmp_path):
    run = run_of(tmp_path, {"prompt_style": "human_assistant", "seed": 3})
    run.decide({"prompt_style": "human_assistant"})
    assert not (tmp_path / "config.yaml").exists()
    run.decide({"prompt_style": "as_stored"})
    assert run.settings == {"prompt_style": "as_stored", "seed": 3}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == run.settings


def started(folder: Path, settings: dict, ranks: Ranks, prompt_style: str = "chat", **own: Any) -> OpenedRun:
    flags = SimpleNamespace(run=RunArguments(output_dir=str(folder), **own))
    run = run_of(folder, settings, ranks, step=SFT, flags=flags)
    run.start(prompt_style, "model", predicts_tokens=False)
    return run


def test_a_run_starts_with_its_settings_and_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(opened_run, "added", lambda table, known: {})
    settings = {"seed": 7, "names": ["a"], "eval_interval": 2}
    drawn = []
    for rank in (0, 0, 1):
        started(tmp_path, settings, ranks_of(2, rank), seed=7)
        drawn.append((torch.rand(1).item(), random.random()))
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {**settings, "prompt_style": "chat"} and "2 ranks" in text
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]  # ranks differ in their dropout


@pytest.mark.needs_plugin("embedded")
@pytest.mark.parametrize("step", [SFT, REWARD, PPO], ids=["SFT", "reward", "PPO"])
def test_the_settings_of_a_run_read_back_as_its_configuration(tmp_path, step):
    """`--config OUTPUT_DIR/config.yaml` is the same run again."""
    argv = [word for name in step.inputs for word in (f"--{name}", "m")]
    words = [*argv, "--data_path", "embedded", "--output_dir", str(tmp_path), "--offload", "false"]
    parsed = parse_arguments(step.groups, words, "")
    settings = resolved_settings(parsed)
    started(tmp_path, settings, ranks_of(), settings["prompt_style"])
    assert parse_arguments(step.groups, ["--config", str(tmp_path / "config.yaml")], "") == parsed


def test_chunks_of_the_output_layer_are_given_kept_or_chosen(tmp_path, capsys, monkeypatch):
    """On a GPU by the rank with the least free memory; a resumed run keeps what it began with, wherever it runs."""
    folder = tmp_path / "model"
    tiny_causal_lm("llama").config.save_pretrained(folder)

    def decided(device: str = "cpu", given: int = 0, begun: int | None = None) -> int:
        monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: begun)
        settings = {"head_chunk_mb": given, "dtype": "fp32", "trust_remote_code": False}
        plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder(tmp_path), settings, None)
        return with_head_chunk(plan, str(folder), ranks_of(2, device=device)).settings["head_chunk_mb"]

    assert (decided(), decided(given=3), decided(begun=7)) == (256, 3, 7) and capsys.readouterr().out == ""
    vocabulary = 128_256
    config = tiny_causal_lm("llama").config
    config.vocab_size = vocabulary
    config.save_pretrained(folder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    monkeypatch.setattr(setup, "largest", lambda number, device: max(number, -40 * 10**9))  # the other rank's
    assert decided("cuda") == 512
    assert "computes 512 MiB of logits at a time (1,046 tokens), chosen from the free memory" in capsys.readouterr().out
    assert (decided("cuda", given=3), decided("cuda", begun=7)) == (3, 7) and capsys.readouterr().out == ""


def test_versions_are_those_that_are_installed_and_the_commit_that_of_a_checkout_alone(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", "-C", tmp_path, *words], check=True)

    found = environment_of("1 rank on cpu")
    assert found["device"] == "1 rank on cpu" and found["versions"]["threestep"] == training.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    inside = tmp_path / "site-packages"
    inside.mkdir()
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    commit = commit_of(tmp_path)
    assert commit is not None and len(commit) == 12 and commit_of(inside) is None  # a repository around an installation
    (tmp_path / "file").write_text("ab")
    assert commit_of(tmp_path) == f"{commit}+"
    (tmp_path / ".git" / "HEAD").unlink()
    assert commit_of(tmp_path) is None
