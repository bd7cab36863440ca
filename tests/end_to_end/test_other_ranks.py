"""A run goes on on another number of ranks, other ZeRO stages and with rows over other numbers of ranks, as if nothing
had happened, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import run_module
from tests.end_to_end.other_ranks_program import CHAINS, LONG, STEPS, Chain
from training.utils.checkpoints.folder import damage

pytestmark = [pytest.mark.needs_plugin("other_ranks"), pytest.mark.timeout(900)]  # on a busy machine


@pytest.fixture(scope="module")
def runs(place: Path) -> Callable[..., Path]:
    """runs(*names) -> the folder of these chains of LONG, or of CHAINS, each launched once."""

    @cache
    def found(*names: str) -> Path:
        folder = place / "_".join(["other_ranks", *names])
        folder.mkdir()
        done = run_module("tests.end_to_end.other_ranks_program", [folder, *names])
        assert done.code == 0, done.words
        return folder

    return found


EVERY = [*CHAINS, *(pytest.param(chain, marks=pytest.mark.long) for chain in LONG)]


@pytest.mark.parametrize("chain", EVERY, ids=lambda chain: chain.name)
def test_it_goes_on_within_rounding(runs, chain: Chain):
    folder = runs(*([chain.name] if chain in LONG else []))
    unbroken, moved = folder / chain.name, folder / f"{chain.name}_moved"
    mine, other = (figures(folder) for folder in (unbroken, moved))
    assert [line["step"] for line in mine] == [line["step"] for line in other]
    assert max(line["step"] for line in mine) == STEPS
    for one, two in zip(mine, other, strict=True):
        # The norm and what depends on how sequences fall into forwards are told by some places alone.
        # How tokens spread over the ranks (`rank_tokens`) is another matter on another number of them.
        for name in sorted(name for name in one.keys() & two.keys() if "/rank_tokens_" not in name):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), (one["step"], name)
    models = sorted(path.parent.name for path in unbroken.glob("*/model.safetensors"))
    has_critic = chain.program == "ppo" and "grpo" not in chain.more
    assert models == (["critic", "model", "model_ema"] if has_critic else ["model"])
    if chain.name == "drawn":
        names = ("replaced", "kept_equal", "dropped")
        assert min(sum(line.get(f"dynamic_sampling/{name}", 0) for line in mine) for name in names) > 0
    if "--mtp_num_layers" in chain.more:
        models.append("model/mtp")  # the head: of a loss of its own beside PPO, of one loss with SFT
    for model in models:
        first, second = (load_file(folder / model / "model.safetensors") for folder in (unbroken, moved))
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(second[name], first[name], rtol=0, atol=3e-4, msg=f"{model} {name}")
    assert not list((moved / "checkpoints").glob("*.universal"))


def test_damage_in_any_file_of_a_checkpoint_is_seen(runs):
    """Of two ranks, four engines' files and a moving average; tests/unit/utils/run/test_checkpoints.py has every byte
    of a manifest."""
    whole = runs() / "ppo_moved" / "checkpoints" / "step_000001"
    assert damage(whole) is None
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    assert any(name.startswith("critic/") for name in names) and "average_1.safetensors" in names
    for name in names:
        content = (whole / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for changed in (content[:-1], flipped, None):
            (whole / name).unlink() if changed is None else (whole / name).write_bytes(changed)
            problem = damage(whole)
            assert problem is not None and problem.startswith(name), name
        (whole / name).write_bytes(content)
    assert damage(whole) is None


def test_it_says_what_it_does(runs):
    said = (runs() / "sft_1.txt").read_text()
    step = runs() / "sft_moved" / "checkpoints" / "step_000001"
    assert f"{step} was written on 2 ranks, --zero_stage 2; converting it for 1 rank, --zero_stage 3" in said
