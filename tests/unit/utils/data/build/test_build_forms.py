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

from tests.support.data_forms import lines_of, write_csv, write_jsonl
from tests.support.said import assistant, user

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
        "message 2: the key 'train_detail' looks like a loss weight but is not read; expected one of",
        {},
    ),
    (
        "loss_scale",
        [HI, assistant("Ho", loss_scale=1.0)],
        "message 2: the key 'loss_scale' looks like a loss weight but is",
        {},
    ),
    ("two differ", [HI, assistant("Ho", weight=0, train=True)], "message 2: 'weight' and 'train' differ", {}),
    ("1 on the user's", [user("Hi", weight=1), HO], "message 1 (user): its weight is 1, but only the assistant's", {}),
    (
        "0 and loss on all",
        [HI, assistant("Ho", weight=0)],
        "message 2 (assistant): its weight is 0, but --loss_on conversation puts loss on every message",
        {"loss_on": "conversation"},
    ),
]


# --- responses that are marked one by one


def marked(name: str, good: dict[str, Any], bad: dict[str, Any], **more: Any) -> Form:
    """A good row, a bad one, and the two again: each phase counts what it leaves out."""
    plain = ([f"{ASKS}« Ho$»"] * 2 + ["- marked_bad"] * 2, ["- unpaired"] * 4, [ASKS] * 4)
    chat_asks = ["<user>Hi<assistant>"] * 4
    chat = (["<user>Hi<assistant>«Ho$»"] * 2 + ["- marked_bad"] * 2, ["- unpaired"] * 4, chat_asks)
    return Form(f"marks: {name}", [good, bad] * 2, plain, chat, **more)


TEXT = {"prompt": ASKS, "completion": " Ho"}
TRL_KTO = {"prompt": [HI], "completion": [HO]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
ALPACA = {"instruction": "Hi", "input": "", "output": "Ho"}
BAD_LATER = {"messages": two_turns({}, {}), "label": False}
MARKS = [
    marked("TRL's label beside texts", {**TEXT, "label": True}, {**TEXT, "label": False}),
    marked("TRL's label beside messages", {**TRL_KTO, "label": True}, {**TRL_KTO, "label": False}),
    marked("OpenRLHF's 1 and 0", {**TEXT, "label": 1}, {**TEXT, "label": 0}),
    marked("1 and -1", {**TEXT, "label": 1.0}, {**TEXT, "label": -1.0}),
    marked("words", {**TEXT, "label": "desirable"}, {**TEXT, "label": "Undesirable"}),
    marked("response and label", {"prompt": ASKS, "response": " Ho", "label": "good"},
           {"prompt": ASKS, "response": " Ho", "label": "bad"}),
    marked("True and False in CSV", {**TEXT, "label": "True"}, {**TEXT, "label": "False"}, file="rows.csv",
           write=write_csv, address="csv:{}"),
    marked("messages and label", {"messages": [HI, HO], "label": True}, {"messages": [HI, HO], "label": False}),
    marked("LLaMA-Factory's kto_tag, ShareGPT", {**SHAREGPT, "kto_tag": True}, {**SHAREGPT, "kto_tag": False}),
    marked("LLaMA-Factory's kto_tag, Alpaca", {**ALPACA, "kto_tag": True}, {**ALPACA, "kto_tag": False}),
    marked("a question and its answer", {"question": "Hi", "answer": "Ho", "label": 1},
           {"question": "Hi", "answer": "Ho", "label": 0}),
    marked("a column of the user's", {**TEXT, "verdict": "yes"}, {**TEXT, "verdict": "no"},
           flags={"label_column": "verdict"}),
    Form(
        "marks: earlier turns of a bad conversation are not learnt, and no mark is no pair",
        [BAD_LATER, {"messages": [HI, HO], "label": None}],
        ([f"{ASKS}« Ho$»", "- marked_bad"], ["- no_rejected", "- unpaired"],
         ["Human: Hi Assistant: a Human: So Assistant:", ASKS]),
        (["<user>Hi<assistant>«Ho$»", "- marked_bad"], ["- no_rejected", "- unpaired"],
         ["<user>Hi<assistant>a$<user>So<assistant>", "<user>Hi<assistant>"]),
    ),
    Form(
        "marks: a label that is no mark is refused",
        [{**TEXT, "label": "sports"}],
        ("! rows.jsonl, line 1: column 'label': expected a label for the response, such as true or false, 1 or 0, "
         "desirable or undesirable, got 'sports'; name the label column with --label_column (none: no labels)",
         ) * 3,
    ),
    Form(
        "marks: none is a column of marks",
        [{**TEXT, "label": "sports"}],
        ([f"{ASKS}« Ho$»"], ["- no_rejected"], [ASKS]),
        flags={"label_column": "none"},
    ),
    Form(
        "marks: a column that is missing",
        [TEXT],
        ("! no column 'good'; the columns are 'completion', 'prompt'; name the right one with --label_column",
         ["- no_rejected"], [ASKS]),
        flags={"label_column": "good"},
    ),
    Form(
        "marks: the label of a plain text is its class, that of a prompt alone goes to step 3",
        [{"text": "Hi", "label": 0}],
        (["H«i$»"], "! step 2 needs prompts, but this is plain text", "! step 3 needs prompts, but this is plain text"),
    ),
]  # fmt: skip

# --- images, audio and video


def media(name: str, row: dict[str, Any], sentence: str) -> Form:
    """A row that every phase refuses in one sentence."""
    return Form(f"media: {name}", [row], (f"! {sentence}",) * 3, (f"! {sentence}",) * 3)


def beside(column: str, value: Any) -> dict[str, Any]:
    return {"prompt": [user("<image>Hi")], "chosen": [HO], "rejected": [NO], column: value}


IMAGE_URL = {"type": "image_url", "image_url": {"url": "a.png"}}
SEE = [f"<user><image>Hi<assistant>{answer}" for answer in ("«Ho$»", "|Ho$|No$", "")]
MEDIA = [
    media("images (verl, TRL, LLaMA-Factory)", beside("images", [{"bytes": "x", "path": "a.png"}]),
          "rows.jsonl, line 1: column 'images' holds images, but only text is trained on; leave such rows out"),
    media("videos", beside("videos", ["a.mp4"]), "line 1: column 'videos' holds video, but only text is trained on"),
    media("audios", beside("audios", ["a.wav"]), "line 1: column 'audios' holds audio, but only text is trained on"),
    media("a placeholder beside a column of another name", beside("image_path", "a.png"),
          "line 1: column 'image_path' holds images"),
    media("OpenAI's parts", {"prompt": [user([{"type": "text", "text": "Hi"}, IMAGE_URL])], "chosen": [HO]},
          "line 1, message 1: a content part has the type 'image_url', but only text is trained on"),
    media("a part for audio", {"prompt": [user([{"type": "input_audio"}])], "chosen": [HO], "rejected": [NO]},
          "a content part has the type 'input_audio', but "),
    media("a message's own images", {"prompt": [user("Hi", images=["a"])], "chosen": [HO], "rejected": [NO]},
          "message 1: 'images': expected text, got images; only text is trained on"),
    Form(
        "media: a literal <image> is text, also beside an empty column and a caption's path",
        [beside("images", []), beside("source", "a.png")],
        chat=([SEE[0]] * 2, [SEE[1]] * 2, [SEE[2]] * 2),
    ),
    Form(
        "media: such rows are dropped on demand",
        [beside("images", ["a.png"]), beside("images", None)],
        chat=([SEE[0], "- bad_conversation"], [SEE[1], "- bad_conversation"], [SEE[2], "- bad_conversation"]),
        flags={"bad_conversations": "drop"},
    ),
    Form(
        "OpenAI's parts of text are joined",
        [{"prompt": [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}])],
          "chosen": [assistant([{"type": "text", "text": "Ho"}])], "rejected": [assistant([{"text": "No"}])]}],
        ([f"{ASKS}« Ho$»"], [f"{ASKS}| Ho$| No$"], [ASKS]),
        (["<user>Hi<assistant>«Ho$»"], ["<user>Hi<assistant>|Ho$|No$"], ["<user>Hi<assistant>"]),
    ),
]  # fmt: skip

# --- columns and formats, of which the others are in tests/unit/utils/data/formats

CHAT_ASKS = "<user>Hi<assistant>"
PAIR = {"prompt": ASKS, "chosen": " Ho", "rejected": " No"}
MESSAGES_PAIR = {"prompt": [HI], "chosen": [HO], "rejected": [NO]}


def taught(before: str = "", pair: bool = False, chat_before: str = "") -> tuple[Phases, Phases]:
    """One row whose prompt is "Hi" behind what is given, plain and under the template."""
    plain, chat = f"{before}{ASKS}", f"{chat_before}{CHAT_ASKS}"
    return (
        ([f"{plain}« Ho$»"], [f"{plain}| Ho$| No$"] if pair else ["- no_rejected"], [plain]),
        ([f"{chat}«Ho$»"], [f"{chat}|Ho$|No$"] if pair else ["- no_rejected"], [chat]),
    )


NO_RESPONSES = "! needs responses, but the columns are"
TWO_TURNS_ASKED = ("Human: Hi Assistant: a Human: So Assistant:", "<user>Hi<assistant>a$<user>So<assistant>")
COLUMNS = [
    Form("a pair of messages", [MESSAGES_PAIR], *taught(pair=True)),
    Form("a pair of conversations", [{"chosen": [HI, HO], "rejected": [HI, NO]}], *taught(pair=True)),
    Form("a pair of texts", [PAIR], *taught(pair=True)),
    Form("texts that begin alike", [{"chosen": f"{ASKS} Ho", "rejected": f"{ASKS} No"}], *taught(pair=True)),
    Form("a completion", [TEXT], *taught()),
    Form("a question", [{"question": "Hi", "answer": "Ho"}], *taught()),
    Form(
        "a row without its response",
        [{"prompt": ASKS, "completion": None}, TEXT],
        ([f"{ASKS}« Ho$»", "- no_chosen"], ["- no_chosen", "- no_rejected"], [ASKS] * 2),
    ),
    Form("a prompt", [{"prompt": ASKS}], (NO_RESPONSES,) * 2 + ([ASKS],), (NO_RESPONSES,) * 2 + ([CHAT_ASKS],)),
    Form(
        "OpenAI's messages",
        [{"messages": two_turns({}, {})}],
        ([f"{TWO_TURNS_ASKED[0]}« b$»"], ["- no_rejected"], [TWO_TURNS_ASKED[0]]),
        (["<user>Hi<assistant>«a$»<user>So<assistant>«b$»"], ["- no_rejected"], [TWO_TURNS_ASKED[1]]),
    ),
    Form(
        "messages that end with the user",
        [{"messages": [HI, HO, user("So")]}, {"messages": [HI, HO]}],
        ([f"{ASKS}« Ho$»"] * 2, ["- no_chosen", "- no_rejected"], [f"{ASKS} Ho Human: So Assistant:", ASKS]),
        (
            [f"{CHAT_ASKS}«Ho$»<user>So", f"{CHAT_ASKS}«Ho$»"],
            ["- no_chosen", "- no_rejected"],
            [f"{CHAT_ASKS}Ho$<user>So<assistant>", CHAT_ASKS],
        ),
    ),
    Form(
        "ranked responses",
        [{"prompt": ASKS, "responses": [" a", " b", " c"]}],
        ([f"{ASKS}« a$»"], [f"{ASKS}| a$| b$| c$"], [ASKS]),
        flags={"responses_column": "responses"},
    ),
    Form("plain text", [{"text": "So"}], (["S«o$»"], "! step 2 needs prompts", "! step 3 needs prompts")),
    Form("system beside a pair of texts", [{**PAIR, "system": "S"}], *taught("System: S ", True, "<system>S")),
    Form("system beside messages", [{**MESSAGES_PAIR, "system": "S"}], *taught("System: S ", True, "<system>S")),
    Form(
        "system beside a completion",
        [{**TEXT, "system": "S"}, {**TEXT, "system": None}],
        ([f"System: S {ASKS}« Ho$»", f"{ASKS}« Ho$»"], ["- no_rejected"] * 2, [f"System: S {ASKS}", ASKS]),
    ),
    Form("an instruction beside a question", [{"instruction": "Do", "question": "Hi", "answer": "Ho"}],
         (["Human: Do\nHi Assistant:« Ho$»"], ["- no_rejected"], ["Human: Do\nHi Assistant:"])),
]  # fmt: skip


def node(name: str, parent: str | None, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, "lang": "en", **more}


TREE = [
    node("1", None, "prompter", "Hi"),
    node("2", "1", "assistant", "a"),
    node("3", "1", "assistant", "Ho", rank=1),
    node("4", "2", "prompter", "So"),
    node("5", "4", "assistant", "b"),
    node("6", "4", "assistant", "c", deleted=True),
    node("7", "6", "prompter", "Why"),
    node("8", "7", "assistant", "d"),
    node("9", None, "prompter", "Unanswered"),
]
TREES = [
    Form(
        "OASST's trees: each answer is learnt once",
        TREE,
        (
            [f"{ASKS}« a$»", f"{ASKS}« Ho$»", f"{TWO_TURNS_ASKED[0]}« b$»"],
            ["- no_rejected"] * 3,
            [ASKS, ASKS, TWO_TURNS_ASKED[0]],
        ),
        (
            ["<user>Hi<assistant>«a$»", "<user>Hi<assistant>«Ho$»", f"{TWO_TURNS_ASKED[1]}«b$»"],
            ["- no_rejected"] * 3,
            ["<user>Hi<assistant>"] * 2 + [TWO_TURNS_ASKED[1]],
        ),
    ),
    Form("a tree without its root", TREE[1:3], (
        "! rows.jsonl, line 1: column 'parent_id': expected the id of a message in the same files, got '1'; include "
        "all messages of a tree, or none",) * 3),
    Form("a tree with an id twice", [*TREE[:2], TREE[1]], (
        "! line 3: column 'message_id': expected a unique id, got '2' a second time",) * 3),
    Form("a tree that bites its tail", [node("1", "2", "prompter", "Hi"), node("2", "1", "assistant", "Ho")], (
        "! line 2: the message is its own ancestor through 'parent_id'",) * 3),
    Form("a tree with a role that is no text", [{**TREE[0], "role": ["prompter"]}, TREE[1]], (
        "! rows.jsonl, line 1: column 'role': expected text, got a list",) * 3),
    Form("a tree with another's role", [node("1", None, "moderator", "Hi"), node("2", "1", "assistant", "Ho")], (
        "! a message's role: expected one of system, user, assistant, tool, got 'moderator'",) * 3),
]  # fmt: skip

FORMS = [*WEIGHTS, *MARKS, *MEDIA, *COLUMNS, *TREES]


CASES = [(form, style) for form in FORMS for style in ("plain", "chat") if getattr(form, style) is not None]


@pytest.mark.parametrize(("form", "style"), CASES, ids=[f"{form.name} [{style}]" for form, style in CASES])
def test_what_each_phase_gets(form: Form, style: str, form_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    form.write(Path(form.file), form.rows)
    given = {"prompt_style": "chat_template" if style == "chat" else "human_assistant", **form.flags}
    for phase, expected in zip((1, 2, 3), getattr(form, style), strict=True):
        wanted = [expected] if isinstance(expected, str) else list(expected)
        found = lines_of(phase, form.address.format(form.file), form_tokenizer, "cache", **given)
        if len(found) == len(wanted) == 1 and wanted[0].startswith("!"):
            assert found[0].startswith("!") and wanted[0].removeprefix("!").strip() in found[0], f"phase {phase}"
        else:
            assert found == wanted, f"phase {phase}"


@pytest.mark.parametrize("style", ["human_assistant", "chat_template"])
@pytest.mark.parametrize(("messages", "sentence", "flags"), [case[1:] for case in REFUSED_WEIGHTS])
def test_a_weight_that_cannot_be_honoured_is_refused(
    style, messages, sentence, flags, form_tokenizer, tmp_path
) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"messages": messages}])
    (line,) = lines_of(1, f"jsonl:{path}", form_tokenizer, str(tmp_path), prompt_style=style, **flags)
    assert line.startswith("! ") and sentence in line and "rows.jsonl" in line
