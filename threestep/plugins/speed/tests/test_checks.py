"""Flags that do not go together, and what steps make of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.plan.dry_run.meta import as_counted
from threestep.plugins.plan.dry_run.plan import inputs_on_host
from threestep.plugins.speed.arguments import CompilingArguments, PpoSpeedArguments, SpeedArguments
from threestep.plugins.speed.checks import check, step_needs
from threestep.plugins.speed.preparers import FusedKernels, LeanParts
from threestep.plugins.speed.tests.fast_settings import fast
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.models.settings import ModelSettings


def mistakes_of(compiles: bool = False, *, settings: Any = None, **given: Any) -> list[str]:
    mistakes, own = Mistakes(), SpeedArguments(**given)
    note_mistakes(own, mistakes)
    groups = {SpeedArguments: own, CompilingArguments: CompilingArguments(compiles)}
    check(SimpleNamespace(added=SimpleNamespace(of=groups.get), settings=settings or {}), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mlp_tiles": 0}, "--mlp_tiles expects 1 or more, got 0"),
        (
            {"mlp_tiles": 4, "compiles": True},
            "--mlp_tiles 4 and --torch_compile change one forward in two ways that were never compared; leave one of "
            "them out",
        ),
        (
            {"use_liger_kernel": True, "compiles": True},
            "--use_liger_kernel and --torch_compile fuse the same operations in two ways; leave one of them out",
        ),
        (
            {"activation_offload": True},
            "--activation_offload keeps on the host what recomputation keeps of a layer; give --gradient_checkpointing "
            "(in step 3 --actor_gradient_checkpointing or --critic_gradient_checkpointing), or leave it out",
        ),
        (
            {"compiles": True, "settings": {"load_in_8bit": True}},
            "--load_in_8bit cannot go with --torch_compile, which compiles the layers that it replaces; leave one of "
            "the two out",
        ),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(**given) == [sentence]


def test_what_goes_together():
    assert mistakes_of() == mistakes_of(True) == []
    assert mistakes_of(activation_offload=True, settings={"critic_gradient_checkpointing": True}, mlp_tiles=2) == []


def test_compiled_models_read_whole_rows():
    for compiles in (False, True):
        flags = SimpleNamespace(added=SimpleNamespace(of={CompilingArguments: CompilingArguments(compiles)}.get))
        assert step_needs(flags).whole_rows == {"--torch_compile": compiles}


def test_replayed_routers_are_those_of_whole_rows():
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    with pytest.raises(
        ThreestepError, match="--mlp_tiles 2 computes routers tile by tile, and --replay_routers follow"
    ):
        checked_components(ppo_flags(**names, replay_routers="follow", mlp_tiles=2))


@pytest.mark.parametrize(("given", "fuses"), [(None, False), (False, False), (True, True)])
def test_kernels_are_fused_in_all_four_models_of_step_3_where_they_are_asked_for(given, fuses):
    flags = ppo_flags(actor_model_name_or_path="a", critic_model_name_or_path="c", use_liger_kernel=given)
    assert isinstance(flags.added.of(SpeedArguments), PpoSpeedArguments)
    for model in (flags.model("actor"), flags.model("critic")):
        assert model.preparers == model.as_it_is().preparers == (FusedKernels(fuses), LeanParts())


def test_models_without_flags_keep_less_and_fuse_where_they_can():
    assert ModelSettings("a").preparers == (FusedKernels(None), LeanParts()) == fast("a").preparers
    every = fast("a", mlp_tiles=2, activation_offload=True, torch_compile=True, gradient_checkpointing=True)
    assert every.compiles and inputs_on_host(every) and len(every.preparers) == 5
    assert every.as_it_is() == fast("a", mlp_tiles=2)
    assert as_counted(every).preparers == (LeanParts(),)
