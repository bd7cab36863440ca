"""Rows of chat templates judged by transformers: templates of our own in the published structures, and published ones.

The judge is seen failing on planted faults.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests import field_templates
from tests.field_templates import OK, REFUSED, WRONG, FieldTemplate, sweep
from tests.support import field_packages
from tests.support.field_conversations import CONVERSATIONS, FieldConversation
from tests.support.field_judge import TemplateJudge
from tests.support.field_packages import FieldPackage, Unavailable, package_folder
from tests.support.field_tokenizers import BYTES, family_of
from tests.support.own_templates import TEMPLATES

BY_NAME = {each.name: each for each in CONVERSATIONS}
KINDS = [(name, kind) for name, text in TEMPLATES.items() for kind in family_of(text).kinds]
HOURS = 3600  # in seconds


@pytest.mark.end_to_end
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_rows_of_every_structure_are_as_transformers_writes_them(name: str, kind: str, tmp_path: Path) -> None:
    """No row is wrong, plain texts are trained, and a refusal is of something that the template does not write."""
    cells = sweep(FieldTemplate(name, TEMPLATES[name]), kind, tmp_path)
    found = {cell.conversation: cell for cell in cells}
    assert [cell for cell in cells if cell.outcome not in (OK, REFUSED)] == []
    texts = [each.name for each in CONVERSATIONS if each.topic == "text"]
    assert {found[each].outcome for each in texts} == {OK}


@pytest.mark.long
@pytest.mark.timeout(3 * HOURS)
def test_rows_of_published_templates_are_as_transformers_writes_them(tmp_path: Path) -> None:
    try:
        found = field_templates.templates()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert len(found) > 150
    cells = [
        cell
        for template in found
        for kind in family_of(template.text).kinds
        for cell in sweep(template, kind, tmp_path)
    ]
    wrong = [cell for cell in cells if cell.outcome == WRONG]
    assert wrong == [], field_templates.summary(wrong)
    assert sum(cell.outcome == OK for cell in cells) > len(cells) / 2


# The judge.


@pytest.fixture
def judge_of(tmp_path: Path):
    return lambda name: field_templates.judge_of(FieldTemplate(name, TEMPLATES[name]), BYTES, tmp_path / name)


def right_row(judge: TemplateJudge, conversation: FieldConversation) -> tuple[str, list[int], list[bool]]:
    """The text of a row, its ids, and a mask that covers the turns, each with its stop."""
    ((_, body, text),) = judge.forms(conversation.messages, conversation.tools)[:1]
    whole = text + next(iter(judge.next_stops(body, text, conversation.tools)), "")
    encoded = judge.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    turns = judge.turns(body, conversation.tools, whole)
    spans = [(turn.high, turn.end or turn.past or 0) for turn in turns]
    mask = [any(low <= begin and end <= high for low, high in spans) for begin, end in encoded["offset_mapping"]]
    return whole, encoded["input_ids"], mask


def kinds_of(judge: TemplateJudge, conversation: FieldConversation, ids: list[int], mask: list[bool]) -> list[str]:
    return [kind for kind, _ in judge.judge(conversation.messages, conversation.tools, ids, mask).wrong]


@pytest.mark.parametrize("name", ["channels", "next speaker", "quoted", "thoughts"])
def test_the_judge_passes_right_rows_and_finds_shifted_masks(judge_of, name: str) -> None:
    judge = judge_of(name)
    for each in ("one turn", "three turns", "call of numbers", "call of nothing", "calls in a row", "ends in a call"):
        _, ids, mask = right_row(judge, BY_NAME[each])
        assert kinds_of(judge, BY_NAME[each], ids, mask) == []
        begin, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
        header = mask[: begin - 1] + [True] + mask[begin:]
        assert kinds_of(judge, BY_NAME[each], ids, header)[0].startswith("mask: the loss is on")
        unstopped = mask[:last] + [False] + mask[last + 1 :]
        assert kinds_of(judge, BY_NAME[each], ids, unstopped) == ["mask: the loss misses a turn's stop"]
        hollow = mask[:begin] + [False] + mask[begin + 1 :]
        assert kinds_of(judge, BY_NAME[each], ids, hollow)[0].startswith("mask: the loss misses")


def test_the_judge_finds_other_tokens(judge_of) -> None:
    """An id less, a space more, and the text of an answer in other pieces."""
    judge, row = judge_of("thoughts"), BY_NAME["three turns"]
    text, ids, mask = right_row(judge, row)
    assert kinds_of(judge, row, ids[:4] + ids[5:], mask[:4] + mask[5:]) == ["ids differ from apply_chat_template"]
    spaced = judge.ids(text.replace("assistant\n", "assistant\n ", 1))
    assert kinds_of(judge, row, spaced, [False] * len(spaced)) == ["ids differ from apply_chat_template"]
    pieces = [*judge.ids(text.partition("Elbe")[0] + "E"), *judge.ids("lbe" + text.partition("Elbe")[2])]
    assert judge.tokenizer.decode(pieces) == text
    assert kinds_of(judge, row, pieces, [False] * len(pieces)) == ["ids differ from apply_chat_template"]


# Packages for tests: fetched by the registry's client, verified by their hash.

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FieldPackage:
    """A package in a folder that stands for the registry."""
    wheel = tmp_path / "shelf" / "oak-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("oak/leaf.txt", "green")
        archive.writestr("oak-1.0.dist-info/METADATA", METADATA.format(name="oak"))
        archive.writestr("oak-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("oak-1.0.dist-info/RECORD", "")
    package = FieldPackage("oak", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), ("oak/*.txt",))
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": package})
    monkeypatch.setenv("THREESTEP_FIELD_PACKAGES", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return package


def test_another_archive_is_refused(shelf: FieldPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": replace(shelf, sha256="0" * 64)})
    with pytest.raises(ValueError, match=f"oak 1.0: sha256 is {shelf.sha256}, expected 0000"):
        package_folder("oak")
    monkeypatch.setattr(field_packages, "PACKAGES", {"oak": replace(shelf, holds=("oak/*.json",))})
    with pytest.raises(ValueError, match=r"oak 1.0 has no oak/\*.json"):
        package_folder("oak")
