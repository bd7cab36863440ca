"""The folder, the pairs and the chain of runs that the core's tests have."""

from __future__ import annotations

from tests.end_to_end.conftest import alone, pairs_file, place, text_file

__all__ = ["alone", "pairs_file", "place", "text_file"]
