"""A matrix of data forms: one small file each, through all three phases, with what carries loss in « ».

`tests/support/data_forms.py` says how rows become lines. A form says what each phase gets as plain text
(human_assistant) and, where it matters, under a chat template; a line that begins with "!" is part of the one sentence
that refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SENTENCES, train_tokenizer
from tests.support.data_forms import TEMPLATE, lines_of, write_jsonl

Lines = Sequence[str] | str
Phases = tuple[Lines, Lines, Lines]


@dataclass(frozen=True)
class Form:
    """rows: of a file; write: what writes them; file: its name; address: of --data_path, {} for the file."""

    name: str
    rows: Sequence[Any]
    plain: Phases | None = None
    chat: Phases | None = None
    file: str = "rows.jsonl"
    write: Callable[[Path, Sequence[Any]], None] = write_jsonl
    address: str = "jsonl:{}"
    flags: dict[str, Any] = field(default_factory=dict)


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return says("user", content, **more)


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return says("assistant", content, **more)


HI, HO, NO = user("Hi"), assistant("Ho"), assistant("No")
# Two turns, of which the first or the last is not to be learnt.
ASKS = "Human: Hi Assistant:"


def two_turns(first: dict[str, Any], last: dict[str, Any]) -> list[dict[str, Any]]:
    """Two questions, and two answers that carry these keys."""
    return [HI, assistant("a", **first), user("So"), assistant("b", **last)]


def weighted(name: str, off: dict[str, Any], on: dict[str, Any]) -> Form:
    """Rows of one spelling of weights: the first turn off, the last off, both off, both on."""
    rows = [{"messages": two_turns(first, last)} for first, last in ((off, on), (on, off), (off, off), (on, on))]
    asks = "Human: Hi Assistant: a Human: So Assistant:"
    chats = ["<user>Hi<assistant>a$<user>So<assistant>«b$»", "<user>Hi<assistant>«a$»<user>So<assistant>b$"]
    chats += ["<user>Hi<assistant>«a$»<user>So<assistant>«b$»", "- no_turn_to_train"]
    return Form(
        f"weights: {name}",
        rows,
        (
            [f"{asks}« b$»"] * 2 + ["- no_turn_to_train"] * 2,
            ["- no_rejected"] * 2 + ["- no_turn_to_train"] * 2,
            [asks] * 4,
        ),
        (chats, ["- no_rejected"] * 2 + ["- no_turn_to_train"] * 2, ["<user>Hi<assistant>a$<user>So<assistant>"] * 4),
    )


WEIGHTS = [
    weighted("OpenAI, Mistral", {"weight": 0}, {"weight": 1}),
    weighted("verl", {"loss_mask": 0}, {"loss_mask": 1}),
    weighted("Axolotl's train", {"train": False}, {"train": True}),
    weighted("Axolotl's training", {"training": False}, {}),
    weighted("ms-swift and XTuner", {"loss": False}, {"loss": None}),
    weighted("LLaMA-Factory", {"loss_weight": 0.0}, {"loss_weight": 1.0}),
    weighted("Slime", {"step_loss_mask": 0}, {"step_loss_mask": 1}),
]

WEIGHTS += [
    Form(
        "weights: ShareGPT with Axolotl's",
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho", "weight": weight}]}
         for weight in (0, 1)],
        ([f"{ASKS}« Ho$»", "- no_turn_to_train"], ["- no_rejected", "- no_turn_to_train"], [ASKS] * 2),
        (["<user>Hi<assistant>«Ho$»", "- no_turn_to_train"], ["- no_rejected", "- no_turn_to_train"],
         ["<user>Hi<assistant>"] * 2),
    ),
    Form(
        "weights: of a pair, the rejected one's says nothing",
        [{"prompt": [HI], "chosen": [HO], "rejected": [{**NO, "weight": 0}]},
         {"prompt": [HI], "chosen": [{**HO, "weight": 0}], "rejected": [NO]}],
        ([f"{ASKS}« Ho$»", "- no_turn_to_train"], [f"{ASKS}| Ho$| No$", "- no_turn_to_train"], [ASKS] * 2),
        (["<user>Hi<assistant>«Ho$»", "- no_turn_to_train"], ["<user>Hi<assistant>|Ho$|No$", "- no_turn_to_train"],
         ["<user>Hi<assistant>"] * 2),
    ),
    Form(
        "weights: 0 on the user's, and the last turn alone",
        [{"messages": [user("Hi", train=False), *two_turns({}, {})[1:]]},
         {"messages": two_turns({}, {"train": False})}],
        chat=(["<user>Hi<assistant>a$<user>So<assistant>«b$»", "- no_turn_to_train"],
              ["- no_rejected", "- no_turn_to_train"], ["<user>Hi<assistant>a$<user>So<assistant>"] * 2),
        flags={"train_turns": "last"},
    ),
]  # fmt: skip
REFUSED_WEIGHTS = [
    ("a half", [HI, assistant("Ho", weight=0.5)], "message 2: 'weight': expected 0 or 1 (false or true), got 0.5", {}),
    ("text", [HI, assistant("Ho", loss="last_round")], "'loss': expected 0 or 1 (false or true), got 'last_round'", {}),
    (
        "Axolotl's spans",
        [HI, assistant("Ho", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])],
        "message 2: the key 'train_detail' is not read, and says what of a message is trained; expected one of",
        {},
    ),
    ("loss_scale", [HI, assistant("Ho", loss_scale=1.0)], "message 2: the key 'loss_scale' is not read", {}),
    ("two differ", [HI, assistant("Ho", weight=0, train=True)], "message 2: 'weight' and 'train' differ", {}),
    ("1 on the user's", [user("Hi", weight=1), HO], "message 1 (user): its weight is 1, and the loss falls on the", {}),
    (
        "0 and loss on all",
        [HI, assistant("Ho", weight=0)],
        "message 2 (assistant): its weight is 0, and --loss_on conversation puts loss on every message",
        {"loss_on": "conversation"},
    ),
]


FORMS = [*WEIGHTS]


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(SENTENCES)
    made.chat_template = TEMPLATE
    return made


CASES = [(form, style) for form in FORMS for style in ("plain", "chat") if getattr(form, style) is not None]


@pytest.mark.parametrize(("form", "style"), CASES, ids=[f"{form.name} [{style}]" for form, style in CASES])
def test_what_each_phase_gets(form: Form, style: str, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    form.write(Path(form.file), form.rows)
    given = {"prompt_style": "chat_template" if style == "chat" else "human_assistant", **form.flags}
    for phase, expected in zip((1, 2, 3), getattr(form, style), strict=True):
        wanted = [expected] if isinstance(expected, str) else list(expected)
        found = lines_of(phase, form.address.format(form.file), tokenizer, "cache", **given)
        if len(found) == len(wanted) == 1 and wanted[0].startswith("!"):
            assert found[0].startswith("!") and wanted[0].removeprefix("!").strip() in found[0], f"phase {phase}"
        else:
            assert found == wanted, f"phase {phase}"


@pytest.mark.parametrize("style", ["human_assistant", "chat_template"])
@pytest.mark.parametrize(("messages", "sentence", "flags"), [case[1:] for case in REFUSED_WEIGHTS])
def test_a_weight_that_cannot_be_honoured_is_refused(style, messages, sentence, flags, tokenizer, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"messages": messages}])
    (line,) = lines_of(1, f"jsonl:{path}", tokenizer, str(tmp_path), prompt_style=style, **flags)
    assert line.startswith("! ") and sentence in line and "rows.jsonl" in line


def test_names_are_used_once() -> None:
    names = [form.name for form in FORMS]
    assert len(set(names)) == len(names)
