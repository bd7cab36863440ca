"""docs/models.md: what the sweep found of every family, a row each."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

from tests.families.answers import REFUSED, RIGHT, TRACEBACK, WRONG

Result = dict[str, Any]
PACKAGES = ("torch", "transformers", "deepspeed", "peft")
_MOST_CHARACTERS = 240  # of a cell
_COLUMNS = ("family", "class", "rows", "reward model", "rollouts", "LoRA", "ZeRO-3 buffers")

_HEAD = """# Models

Every family of causal language models that transformers has, at its smallest, with random weights: built, loaded, read,
rolled out, trained and saved by Threestep, and compared with plain transformers and plain PyTorch. `{command}` asks
again and writes this page; it holds for {versions}.

{summary}

| column | says |
| --- | --- |
| rows | *shares*: several documents a row, and a prompt stored once for all its responses. *packs*: several documents a row. *padded*: one sequence a row, and why. *refused*: the run ends before training, and why. A family with a sliding window does so for sequences that fit it; longer ones are padded |
| reward model | scores and two optimizer steps of step 2 equal plain PyTorch's; a dash where transformers has no such class |
| rollouts | left-padded prompts, with the family's cache: each token's log-probability and the greedy tokens are the model's own |
| LoRA | adapters on all linear layers: the merged model that is saved is the adapted one |
| ZeRO-3 buffers | buffers (rotary frequencies) as plain transformers has them in float32 and bfloat16, in training and in rollouts |

Tiny models do not show everything: sizes, precision on a GPU and other attention implementations are those of the sweep
(float64 where a family runs in it, float32, bfloat16; SDPA on a CPU). A run's own start-up check looks at the real model.

"""  # noqa: E501


def page(results: list[Result], command: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [_HEAD.format(command=command, versions=versions, summary=_summary(results)).rstrip(), ""]
    lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(result)) for result in results if not result["built"]]
    not_built = [result for result in results if result["built"]]
    if not_built:
        lines += ["", "Not judged, because plain transformers does not build or load them here:", ""]
        lines += [_line(("family", "because")), _line(("---", "---"))]
        lines += [_line((result["family"], result["built"])) for result in not_built]
    return "\n".join(lines) + "\n"


def _summary(results: list[Result]) -> str:
    judged = [result for result in results if not result["built"]]
    kinds = Counter(_kind(result) for result in judged)
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in ("share", "pack", "padded", "refused", "wrong") if kinds[kind])
    return f"{len(results)} families, of which {len(judged)} are judged: {told}."


def _kind(result: Result) -> str:
    found = result["verdict"]
    if found.startswith(("WRONG", "TRACEBACK")):
        return "wrong"
    return {"shares": "share", "packs": "pack"}.get(found, found.split(",")[0])


def _cells(result: Result) -> list[str]:
    answers = {answer["question"]: answer for answer in result["answers"]}
    rows = result["verdict"]
    if _kind(result) in ("refused", "wrong"):
        return [result["family"], result["model"], _short(rows), "", "", "", ""]
    within = [name for name, word in (("window.shared", "shares"), ("window.packed", "packs")) if _right(answers, name)]
    if within:
        rows = f"{'shares' if within[0] == 'window.shared' else 'packs'} within its sliding window"
    return [
        result["family"],
        result["model"],
        rows,
        _told(answers, "reward"),
        _told(answers, "rollout"),
        _told(answers, "lora"),
        _told(answers, "zero3", "buffers"),
    ]


def _right(answers: dict[str, Any], name: str) -> bool:
    return name in answers and answers[name]["verdict"] == RIGHT


def _told(answers: dict[str, Any], start: str, end: str = "") -> str:
    """yes, a dash if it was not asked, or no with the reason."""
    found = [a for name, a in answers.items() if name.startswith(start) and name.endswith(end)]
    # Rows that are padded instead are no refusal.
    found = [a for a in found if not (a["verdict"] == REFUSED and a["question"].endswith((".packed", ".shared")))]
    for bad in (WRONG, TRACEBACK, REFUSED):
        for answer in found:
            if answer["verdict"] == bad:
                size = "" if answer["difference"] is None else f" by {answer['difference']:.1g}"
                return _short(f"no: {answer['said'] or bad + size}")
    return "yes" if found else "-"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
