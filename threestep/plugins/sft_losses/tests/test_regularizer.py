"""The regularizer of step 1's flags: off by default, and what it does not go with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.sft_losses.arguments import RegularizerArguments
from threestep.plugins.sft_losses.regularizer import NoiseAndZLoss, regularizer_of_flags
from training.step1_sft.arguments import check_flags
from training.step1_sft.regularizer import regularizer_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.added import NO_FLAGS, added_flags
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("flag", ["neftune_alpha", "z_loss_coef"])
def test_what_is_added_is_off_and_never_negative(flag):
    assert getattr(RegularizerArguments(), flag) == 0.0
    mistakes = Mistakes()
    note_mistakes(RegularizerArguments(**{flag: -1.0}), mistakes)
    assert mistakes.sentences == [f"--{flag} expects 0 or more, got -1.0"]


def added(alpha: float = 0.0, z_coef: float = 0.0) -> Any:
    kind = added_flags("step1_sft")
    return kind(**{"sft_losses_RegularizerArguments": RegularizerArguments(alpha, z_coef)})


def test_a_run_has_the_regularizer_of_its_flags():
    off = regularizer_of(NO_FLAGS)
    assert not off.draws_noise and not off.losses and not off.why_not_shared
    found = regularizer_of(added(5.0, 1e-4))
    assert isinstance(found, NoiseAndZLoss) and found.draws_noise and found.losses == ("z_loss",)
    assert found.recorded == {"z_loss_coef": 1e-4, "embedding_noise": 5.0}
    assert regularizer_of_flags(added(0.0, 1.0)).why_not_shared == ""


def test_noise_of_each_row_goes_with_no_shared_tokens():
    def flags(shared: int, alpha: float) -> Any:
        return SimpleNamespace(engine=EngineArguments(share_beginnings=shared), added=added(alpha))

    check_flags(flags(0, 5.0))
    check_flags(flags(64, 0.0))
    with pytest.raises(ThreestepError, match="--share_beginnings 64 computes a token once .* --neftune_alpha 5 gives"):
        check_flags(flags(64, 5.0))
