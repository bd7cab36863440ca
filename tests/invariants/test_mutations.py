"""1,000 damaged dataset files and configurations (20,000 in the long form): a result or a ThreestepError each, and no
row lost or made up."""

from __future__ import annotations

import pytest

from tests.invariants import mutations
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.files.json_rows import JsonLines


@pytest.mark.parametrize("count", [1000, pytest.param(20000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_damaged_files_end_in_a_result_or_a_sentence(count: int) -> None:
    tokenizer = train_tokenizer(SENTENCES)
    tokenizer.chat_template = mutations.CHAT_TEMPLATE
    cases = list(mutations.run_cases(range(count), tokenizer))
    failed = [case for case in cases if case.problem is not None]
    assert not failed, "\n".join(f"case {case.number} ({case.kind}): {case.problem}" for case in failed[:3])
    ended = {how: sum(case.ended == how for case in cases) for how in ("result", "mistake")}
    # Both happen often: what is damaged is neither always refused nor never.
    assert len(cases) == count and ended["result"] > count // 8 and ended["mistake"] > count // 4, ended


def hang() -> None:
    while True:
        pass


def fail(problem: BaseException) -> None:
    raise problem


@pytest.mark.parametrize(
    ("wrong", "ended", "problem"),
    [
        (list, "result", None),
        (lambda: fail(ThreestepError("expected 1, got 2")), "mistake", None),
        (lambda: fail(ThreestepError(" ")), "mistake", "an empty sentence"),
        (lambda: fail(IndexError("of a list")), "failed", "IndexError: of a list"),
        (lambda: fail(SystemExit(0)), "failed", "SystemExit: 0"),
        (hang, "failed", "TooLong: took more than 0.2 seconds"),
    ],
)
def test_what_counts_as_failed(monkeypatch: pytest.MonkeyPatch, wrong, ended: str, problem: str | None) -> None:
    monkeypatch.setattr(mutations, "LIMIT_SECONDS", 0.2)
    monkeypatch.setitem(mutations.KINDS, "planted", lambda dice, tokenizer: wrong())
    case = mutations.run_case(1, "planted", None)
    assert case.ended == ended
    assert case.problem is None if problem is None else problem in str(case.problem)


def test_a_wrong_count_is_found(tmp_path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer) -> None:
    """A reader that loses its last row."""
    monkeypatch.chdir(tmp_path)
    path = mutations.Path("rows.jsonl")
    path.write_bytes(mutations.write_jsonl([mutations.pair_row(index) for index in range(4)]))
    mutations.build_and_count(1, "jsonl", path, tiny_tokenizer, {})
    honest = JsonLines.__len__
    monkeypatch.setattr(JsonLines, "__len__", lambda rows: honest(rows) - 1)
    with pytest.raises(AssertionError):
        mutations.build_and_count(1, "jsonl", path, tiny_tokenizer, {})
