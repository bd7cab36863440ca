"""The small models of the rooms that ask them."""

from tests.unit.inference.conftest import asked, save_model  # noqa: F401 (fixtures)
