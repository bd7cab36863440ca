"""The help of all programs together, plugins' too: nothing is there that no flag uses."""

from __future__ import annotations

import typing

from tests.unit.utils.flags.test_help_page import PROGRAMS, UNITS, parts_of
from training.utils.flags.flags import TOPICS, UNIT
from training.utils.flags.help_page import entries_of
from training.utils.plugins.registry import topics


def test_every_unit_and_topic_is_used():
    found = [entry for program in PROGRAMS for entry in entries_of(parts_of(program))]
    assert {topic for topic, _, _ in found} == {*TOPICS, *topics()}
    assert typing.cast(set, {field.metadata.get(UNIT) for _, field, _ in found}) >= UNITS
