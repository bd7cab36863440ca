"""`threestep inspect | head`: a reader that goes away ends it quietly."""

from tests.unit.threestep.test_command import unread


def test_rows_do(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 20)
    code, printed = unread("inspect", "--data_path", f"jsonl:{tmp_path / 'rows.jsonl'}")
    assert code == 141 and "Traceback" not in printed and "BrokenPipe" not in printed
