"""No key of this machine's, and no proxy, in the tests of asking."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("THREESTEP_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
