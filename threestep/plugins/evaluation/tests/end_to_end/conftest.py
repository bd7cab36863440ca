"""The folder and the pairs that the core's runs have."""

from __future__ import annotations

from tests.end_to_end.conftest import pairs_file, place

__all__ = ["pairs_file", "place"]
