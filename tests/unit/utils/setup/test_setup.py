"""Step counts, the run's folder, and loading in the right precision."""

from __future__ import annotations

import importlib.metadata
import random
import subprocess

import pytest
import torch
import yaml

import training
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.plan import CheckpointPlan
from training.utils.contracts.token_rows import TokenRows
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.ranks.startup import Ranks
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel
from training.utils.run.run_arguments import RunArguments
from training.utils.setup import setup
from training.utils.setup.setup import (
    commit_of,
    environment_of,
    load_under,
    may_pack,
    start_run,
    whole_steps,
    with_head_chunk,
)


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


def test_rows_that_fill_no_step():
    with pytest.raises(
        ThreestepError,
        match=r"takes 64 sequences \(--per_device_train_batch_size 16 x 2 ranks x --gradient_accumulation_steps 2\) "
        "and 1 epochs of 63 training rows do not fill one",
    ):
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


def packs(family: str, padded: bool, **more) -> tuple[bool, Read, list[tuple[str, bool]]]:
    engine, said = Read(family), []
    answer = may_pack(
        padded,
        engine.model,
        engine,
        engine,
        longest_tokens=30,
        log=lambda text, is_main: said.append((text, is_main)),
        **more,
    )
    return answer, engine, said


def test_a_model_that_can_packs_without_a_word():
    answer, engine, said = packs("llama", padded=False)
    assert answer is True and said == [] and engine.read > 0 and engine.model.training


def test_a_user_who_wants_padding_gets_it_without_a_word():
    """What padded rows give is compared with the model's own forward all the same."""
    answer, engine, said = packs("llama", padded=True)
    assert answer is False and said == [] and engine.read == 1


def test_a_model_that_cannot_is_padded_with_the_reason():
    answer, _, said = packs("bloom", padded=False)
    assert answer is False
    assert said == [
        (
            "warning: BloomForCausalLM trains on padded rows: its attention implementation 'eager' takes no mask of "
            "segments here",
            True,
        )
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_segments_within_a_document_are_checked_padded_or_not(padded):
    needs = {"sharing": False, "needs_segments": "--parallel_thinking"}
    answer, engine, said = packs("llama", padded, **needs)
    assert answer is not padded and said == [] and engine.read > 0
    start = "^--parallel_thinking needs a model that takes a mask of segments, padded or not, and "
    sentence = (
        start + "BloomForCausalLM does not: its attention implementation 'eager' takes no mask of segments here; use "
        "another model or --attn_implementation, or leave --parallel_thinking out$"
    )
    with pytest.raises(ThreestepError, match=sentence):
        packs("bloom", padded, **needs)


def test_a_run_starts_with_its_settings_and_its_seed(tmp_path):
    run = RunArguments(output_dir=str(tmp_path / "out"), seed=7)
    drawn = []
    for rank in (0, 0, 1):
        folder = start_run(run, {"seed": 7, "names": ["a"]}, ranks(2, rank))
        drawn.append((torch.rand(1).item(), random.random()))
    text = (folder.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {"seed": 7, "names": ["a"]} and "2 ranks" in text
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]  # ranks differ in their dropout


def test_loading_gives_the_dtype():
    asked = []
    model = load_under(
        EngineSettings(dtype="bf16"), ranks(), lambda dtype: asked.append(dtype) or tiny_causal_lm("gpt2", dtype)
    )
    assert asked == [torch.bfloat16] and model.dtype is torch.bfloat16


@pytest.mark.needs_plugin("embedded")
@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step3_ppo"])
def test_the_settings_of_a_run_read_back_as_its_configuration(tmp_path, step):
    """`--config OUTPUT_DIR/config.yaml` is the same run again."""
    import importlib

    from training.utils.flags.arguments import parse_arguments, resolved_settings

    groups = importlib.import_module(f"training.{step}.main").STEP.groups
    models = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]
    argv = models if step == "step3_ppo" else ["--model_name_or_path", "m"]
    parsed = parse_arguments(
        groups, [*argv, "--data_path", "embedded", "--output_dir", str(tmp_path), "--offload", "false"], ""
    )
    start_run(parsed[0], resolved_settings(parsed), ranks())
    assert parse_arguments(groups, ["--config", str(tmp_path / "config.yaml")], "") == parsed


def test_chunks_of_the_output_layer_are_given_kept_or_chosen(tmp_path, capsys, monkeypatch):
    """On a GPU by the rank with the least free memory; a resumed run keeps what it began with, wherever it runs."""
    plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder(tmp_path), {"head_chunk_mb": 0}, None)
    folder = tmp_path / "model"
    tiny_causal_lm("llama").config.save_pretrained(folder)

    def decided(device: str = "cpu", given: int = 0, begun: int | None = None) -> int:
        monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: begun)
        here = Ranks(0, 0, 2, torch.device(device))
        return with_head_chunk(plan, ModelSettings(str(folder), head_chunk_mb=given), "fp32", here).settings[
            "head_chunk_mb"
        ]

    assert (decided(), decided(given=3), decided(begun=7)) == (256, 3, 7) and capsys.readouterr().out == ""
    vocabulary = 128_256
    config = tiny_causal_lm("llama").config
    config.vocab_size = vocabulary
    config.save_pretrained(folder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    monkeypatch.setattr(setup, "largest", lambda number, device: max(number, -40 * 10**9))  # the other rank's
    assert decided("cuda") == 512
    assert "computes 512 MiB of logits at a time, 1,046 tokens: chosen by the memory" in capsys.readouterr().out
    assert (decided("cuda", given=3), decided("cuda", begun=7)) == (3, 7) and capsys.readouterr().out == ""


def test_versions_are_those_that_are_installed(monkeypatch):
    found = environment_of("1 rank on cpu")
    assert found["device"] == "1 rank on cpu" and found["versions"]["threestep"] == training.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert environment_of("x")["versions"].keys() == {"threestep", "python"}


def test_the_commit_is_that_of_a_checkout_alone(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", "-C", tmp_path, *words], check=True)

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
