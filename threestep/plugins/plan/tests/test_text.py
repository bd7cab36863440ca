"""A plan's words."""

from __future__ import annotations

import yaml

from threestep.plugins.plan.search import search
from threestep.plugins.plan.text import as_yaml, reasons


def test_reasons_name_what_each_other_value_would_do(wanted, estimates):
    tried = search(wanted(), estimates)
    assert list(reasons(tried[0], tried)) == [
        "with ZeRO-0, micro-batches of 4, recomputation: 2.000 s slower, most by recomputation (+3.000 s)",
        "with offload: 5.000 s slower, most by offload (+5.000 s)",
        "with recomputation: 3.000 s slower, most by recomputation (+3.000 s)",
        "with micro-batches of 2: 3.000 s slower, most by matmuls (+2.000 s)",
    ]


def test_the_file_holds_the_settings_and_its_command(wanted, estimates):
    best = search(wanted(), estimates)[0]
    text = as_yaml(best, "threestep sft --config plan.yaml --num_ranks 4")
    assert yaml.safe_load(text) == best.settings and "#   threestep sft --config plan.yaml" in text
