"""What the reference of a preference loss can be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from training.utils.models.arguments import ModelArguments
from training.utils.preference.arguments import check_reference
from training.utils.run.errors import ThreestepError


def flags(reference: str, **model) -> SimpleNamespace:
    return SimpleNamespace(own=SimpleNamespace(reference=reference), model=ModelArguments(**model))


@pytest.mark.parametrize("model", [{}, {"lora_dim": 4, "only_optimize_lora": False}])
def test_adapter_off_needs_adapters_that_train_alone(model):
    with pytest.raises(ThreestepError, match="--reference adapter_off needs --lora_dim above 0 and --only_optimize"):
        check_reference(flags("adapter_off", **model))
    check_reference(flags("cached", **model))
    check_reference(flags("adapter_off", lora_dim=4))
