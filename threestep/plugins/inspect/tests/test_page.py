"""The page by its structure: every mark stands on a text that carries loss, nothing comes from data or a network."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from threestep.plugins.inspect.page import page

pytestmark = pytest.mark.unit

VOID = {"meta", "br"}
ROWS = [
    {"question": f"<script>alert({i})</script> & {i}?", "answer": f"<b>{i}</b>\n  y", "rejected": f"No {i}", "id<i>": i}
    for i in range(12)
]


class Parsed(HTMLParser):
    """fed: of each text of a row, its pieces as (text, is marked). The tags must be balanced."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.fed: list[list[tuple[str, bool]]] = []
        self.text = ""
        self._fed_depth = 0
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "action", "data")]
        self.anchors.add(given.get("id"))
        if tag not in VOID:
            self.open.append(tag)
        if "fed" in (given.get("class") or "").split():
            self.fed.append([])
            self._fed_depth = len(self.open)

    def handle_endtag(self, tag):
        if len(self.open) == self._fed_depth:
            self._fed_depth = 0
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self._fed_depth:
            self.fed[-1].append((data, "mark" in self.open))


def joined(runs: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours of one kind as one; without empty ones."""
    found: list[tuple[str, bool]] = []
    for text, marked in runs:
        if found and found[-1][1] == marked:
            found[-1] = (found[-1][0] + text, marked)
        elif text:
            found.append((text, marked))
    return found


@pytest.mark.parametrize("data_split", ["1,0,0", "0,1,0", "0,0,1"])
def test_marks_stand_on_the_very_texts_that_carry_loss(look, data_split):
    phase = data_split.split(",").index("1") + 1
    account = look(ROWS, [phase], data_split=data_split, eval_fraction=0.0)
    parsed = Parsed(page(account))
    texts = [runs for row in account.phases[0].rows for _, runs in row.texts]
    assert [joined(runs) for runs in parsed.fed] == [joined(runs) for runs in texts]
    assert len(texts) == (36 if phase == 2 else 12)


def test_it_holds_no_script_no_request_and_nothing_of_the_data_but_text(look):
    source = page(look(ROWS))
    parsed = Parsed(source)
    assert parsed.tags <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "nav", "a", "main",
        "section", "div", "table", "tr", "th", "td", "mark", "i", "b", "u", "span", "ul", "li", "footer",
    }  # fmt: skip
    assert {address[1:] for address in parsed.addresses} <= parsed.anchors
    assert "<script>alert" in parsed.text and "url(" not in source and "default-src 'none'" in source
