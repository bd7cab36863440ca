"""Fixtures of the core's unit tests that these use too."""

from tests.unit.utils.conftest import save_folder as save_folder
