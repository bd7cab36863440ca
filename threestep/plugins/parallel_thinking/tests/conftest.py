"""The small files and flags of the data rooms."""

from tests.unit.utils.data.conftest import flags, write_rows  # noqa: F401 (fixtures)
