"""Fixtures of all tests that run programs."""

from tests.end_to_end.conftest import place

__all__ = ["place"]
