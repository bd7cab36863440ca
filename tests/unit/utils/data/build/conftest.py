"""A dataset class of the test's own, registered."""

from __future__ import annotations

import pytest

from tests.support.pair_rows import Own
from training.utils.data.sources.registry import register_dataset


@pytest.fixture
def own(own_registry, flags):
    """Register a subclass of Own with what is given, and return the flags that name it."""

    def make(**members):
        given = {key: members.pop(key) for key in list(members) if key in ("data_split", "eval_fraction")}
        register_dataset("own")(type("Own", (Own,), members))
        return flags(data_path=["own"], **given)

    return make
