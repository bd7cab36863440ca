"""Fixtures of the core's unit tests that these use too."""

from tests.unit.utils.data.conftest import flags as flags
from tests.unit.utils.data.conftest import write_rows as write_rows
from threestep.plugins.hub_datasets.tests.test_hub_rows import hub as hub
