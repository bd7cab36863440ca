"""Rows with paths are those that older caches hold: their digests, as tests of the core record those of others."""

from __future__ import annotations

import pytest

from tests.support.data_flags import data_flags
from tests.support.data_forms import write_jsonl
from tests.support.pair_rows import all_rows
from tests.unit.utils.data.test_fingerprint_row_versions import PLAIN, byte_tokenizer, content, digest
from training.utils.data.build.build import build_phase

PARALLEL = [
    {
        "prompt": f"Human: {i} + 3? Assistant:",
        "chosen": f" Well. <Parallel><Path> {i} and three</Path><Path> three and {i}</Path></Parallel> {i + 3}.",
        "rejected": " No.",
    }
    for i in range(24)
]
RECORDED = {1: "964ab3b2cfdec318", 2: "ed7f8313572f1574"}


@pytest.mark.parametrize("phase", RECORDED)
def test_rows_of_a_phase(phase, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "rows.jsonl", PARALLEL)
    monkeypatch.chdir(tmp_path)
    data = data_flags(
        data_path=["jsonl:rows.jsonl"],
        data_split={1: "1,0,0", 2: "0,1,0"}[phase],
        eval_fraction=0.0,
        parallel_thinking=True,
        data_output_path="cache",
        **PLAIN,
    )
    built = build_phase(phase, data, byte_tokenizer(), seed=1)
    assert digest(map(content, all_rows(built))) == RECORDED[phase], "rows changed: give ROWS another text"
