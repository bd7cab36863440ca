"""The small models of the rooms that ask them."""

from threestep.plugins.evaluation.tests.conftest import asked, save_model  # noqa: F401 (fixtures)
