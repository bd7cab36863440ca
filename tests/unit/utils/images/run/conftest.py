"""The small models of the rooms that ask them."""

from tests.unit.asking.conftest import asked, save_model  # noqa: F401 (fixtures)
