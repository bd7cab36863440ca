"""What older transformers does otherwise, for tests of families by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version


def since(version: str, reason: str, *values: Any) -> Any:
    """A parameter set that is skipped before this transformers. reason: what the older one does."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.param(*values, marks=pytest.mark.skipif(is_older, reason=f"transformers before {version} {reason}"))


def needs_transformers(version: str, reason: str) -> None:
    """Skip the test, or what is left of it, before this transformers."""
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers before {version} {reason}")
