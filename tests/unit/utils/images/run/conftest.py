"""The small models of the rooms that ask them."""

from tests.unit.asking.conftest import asked  # noqa: F401 (a fixture)
