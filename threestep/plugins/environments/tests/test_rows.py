"""The rows that open environments: as step 3 hands them over."""

from __future__ import annotations

import json

import pytest

from tests.support.data_flags import data_flags
from threestep.plugins.environments.rows import rows_of
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def test_a_row_of_the_command_line_gets_the_columns_that_every_row_has():
    (row,) = rows_of('{"prompt": "a", "key": 1}', data_flags(data_path=[]), 4, 1)
    assert row == {"prompt": "a", "key": 1, "messages": [{"role": "user", "content": "a"}], "ground_truth": None}
    assert rows_of(None, data_flags(data_path=[]), 4, 1)[0]["prompt"] == ""
    with pytest.raises(ThreestepError, match="--row expects a JSON object"):
        rows_of("[1]", data_flags(data_path=[]), 4, 1)


def test_rows_of_data_have_their_messages_reference_and_columns(tmp_path):
    rows = [{"prompt": f"q{n}", "ground_truth": f"a{n}", "topic": "sums"} for n in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_flags(data_path=[f"jsonl:{path}"], data_output_path=str(tmp_path / "cache"))
    found = rows_of(None, data, 4, 1)
    assert [row["messages"] for row in found] == [[{"role": "user", "content": f"q{n}"}] for n in range(4)]
    assert [row["ground_truth"] for row in found] == [f"a{n}" for n in range(4)]
    assert found[0]["topic"] == "sums"
