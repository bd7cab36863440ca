"""A dozen model folders with one file changed (300 in the long form): each run ends at its start in a sentence, or in a
saved model that opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from tests.invariants.folder_mutations import judged, run_cases, why_unopened


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [12, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_a_changed_folder_is_refused_or_trained_and_opened(count: int) -> None:
    cases = list(run_cases(range(count)))
    wrong = [case for case in cases if case.problem is not None]
    assert not wrong, "\n".join(f"case {case.number} ({case.kind}: {case.said}): {case.problem}" for case in wrong[:3])
    ended = [case.ended for case in cases]
    # Both happen often: a changed folder is neither always refused nor never.
    assert len(cases) == count and min(ended.count("refused"), ended.count("trained")) >= count // 5


@pytest.mark.parametrize(
    ("code", "said", "files", "ended", "problem"),
    [
        (2, "error: expected 1, got 2", {}, "refused", None),
        (2, "", {}, "failed", "code 2"),
        (1, "Traceback (most recent call last)", {}, "failed", "code 1"),
        (2, "error: no", {"metrics.jsonl": '{"train/loss": 1.0}'}, "lost", "refused after training: no"),
        (2, "error: no", {"checkpoints/x": ""}, "lost", "refused after training: no"),
        (2, "error: no", {".saved_7/x": ""}, "refused", "left ['.saved_7']"),
        (0, "", {}, "trained", "no model"),
    ],
)
def test_what_counts_as_wrong(
    tmp_path: Path, code: int, said: str, files: dict, ended: str, problem: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    got = judged(code, "", said, tmp_path)
    assert got[0] == ended and (got[2] is None if problem is None else problem in str(got[2]))


def test_a_folder_that_does_not_open_is_seen(tmp_path: Path) -> None:
    save_start(tmp_path / "model")
    assert why_unopened(tmp_path) is None
    for lost in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / "model" / lost).unlink()
        assert "model does not open" in str(why_unopened(tmp_path))
