"""What the sweep found of every family, a row each: docs/models.md of language models, and families.md of the plugin
`images` of those of images and text."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from typing import Any

from tests.families.answers import REFUSED, RIGHT, TRACEBACK, WRONG

Result = dict[str, Any]
PACKAGES = ("torch", "transformers", "deepspeed", "peft")
_MOST_CHARACTERS = 260  # of a cell
_COLUMNS = ("family", "class", "rows", "reward model", "rollouts", "LoRA", "ZeRO", "routers")

_HEAD = """# Models

Every family of causal language models that transformers has, at its smallest, with random weights: built, loaded, read,
rolled out, trained and saved by Threestep, and compared with plain transformers and plain PyTorch. `{command}` runs
the comparison again and writes this page; this one was made with {versions}.

{summary}

| column | meaning |
| --- | --- |
| rows | *shares*: several documents a row, and a prompt stored once for all its responses. *packs*: several documents a row. *padded*: one sequence a row, and why. *refused*: the run ends before training, and why. A family with a sliding window shares rows where sequences fit the window; longer ones are padded |
| reward model | scores and two optimizer steps of step 2 equal plain PyTorch's; a dash where transformers has no such class |
| rollouts | each token's log-probability and the greedy tokens are the model's own. *batch*: prompts of different lengths in one batch, padded on the left, with a cache; otherwise the slower way that is used |
| LoRA | adapters on all linear layers except those named; the saved model, with the adapters merged, computes what the adapted one did |
| ZeRO | stages 0 and 3 in float32 and bfloat16: log-probabilities under the engine, buffers, the saved model, and at stage 3 the copy used for rollouts are the plain model's. *rounds*: the family keeps some weights in float32, and they are trained in bfloat16, as the log says |
| routers | for mixtures of experts: the coefficient of the load-balancing loss, which equals transformers' own (steps 1 and 2, DPO), or *without* one. A dash where transformers reports no router |

Also checked: that a folder is saved as it was loaded, that two optimizer steps of SFT equal a plain PyTorch loop, that log-probabilities in train mode without dropout are those in eval mode (PPO's first ratio is 1). A family that fails there is marked *WRONG* under "rows".

Tiny models do not show everything: sizes, precision on a GPU and other attention implementations are those of the sweep
(float64 where a family runs in it, float32, bfloat16; SDPA on a CPU), on one rank. Gradients on two ranks, packed and
padded, at every stage are compared for a dozen families by `tests/invariants` (`test_engine_exact.py`,
`test_mixture_exact.py`). A run's own check at the start ([layout.md](layout.md)) tests the real model.

"""  # noqa: E501


_VISION_HEAD = """# Families of models of images and text

Which families of `AutoModelForImageTextToText` train on rows with images, and which on text alone.
`{command}` builds each family at its
smallest, compares it with its own forward, and writes this page.

{summary}

*shares* and *padded* are explained under [language models](../../../docs/models.md). A row with an image that is refused ends the run before a
model loads.

"""  # noqa: E501


def vision_page(results: list[Result], command: str) -> str:
    """The page of models of images and text: families by what works for them."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        found.setdefault(_vision_kind(result), []).append(result["family"])
    head = _VISION_HEAD.format(command=command, summary=_vision_summary(results))
    lines = [head.rstrip(), "", _line(("rows with images", "rows of text", "families")), _line(["---"] * 3)]
    lines += [_line((*kind, ", ".join(names))) for kind, names in sorted(found.items(), reverse=True)]
    return "\n".join(lines) + "\n"


def _vision_kind(result: Result) -> tuple[str, str]:
    """What rows with images are, and rows of text."""
    if result["built"]:
        return ("refused", "not built by transformers here")
    return (result["images"].split(":")[0].split(",")[0], result["verdict"].split(",")[0])


def _vision_summary(results: list[Result]) -> str:
    seen = Counter(result["images"].split(":")[0].split(",")[0] for result in results if "images" in result)
    told = ", ".join(f"{count} {kind}" for kind, count in seen.most_common())
    return f"{_summary(results)} Rows with images: {told}."


def page(results: list[Result], command: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    head = _HEAD.format(command=command, versions=versions, summary=_summary(results))
    lines = [head.rstrip(), "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(result)) for result in results if not result["built"]]
    not_built = [_line((result["family"], _short(result["built"]))) for result in results if result["built"]]
    if not_built:
        why = "Not judged, because plain transformers does not build or load them here:"
        lines += ["", why, "", _line(("family", "because")), _line(("---", "---")), *not_built]
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
        return [result["family"], result["model"], _short(rows), *[""] * (len(_COLUMNS) - 3)]
    rows = _within(rows, answers)
    if answers.get("ratio", {}).get("verdict") == REFUSED:
        rows += "; `--dropout 0` is refused, as it draws at random in train mode all the same"
    lora = _told(answers, "lora", without=r";? ?adapters move [^;]*$")
    cells = [_short(rows), _told(answers, "reward"), _of_rollouts(answers), lora]
    return [result["family"], result["model"], *cells, _of_zero(answers), _of_routers(answers)]


def _within(rows: str, answers: dict[str, Any]) -> str:
    """The verdict, or what holds within the family's sliding window."""
    within = [name for name in ("window.shared", "window.packed") if _right(answers, name)]
    if not within:
        return rows
    return f"{'shares' if within[0] == 'window.shared' else 'packs'} within its sliding window"


def _of_rollouts(answers: dict[str, Any]) -> str:
    told = _told({name: answer for name, answer in answers.items() if name.startswith("rollout")}, "rollout")
    if told != "yes":
        return told
    way = re.search(r"rolls out ([^;]*), which is slower", answers["rollout.sampled"]["said"])
    return way[1] if way else "batch"


def _of_zero(answers: dict[str, Any]) -> str:
    """yes, or each reason why not with the cases that it holds for, and how many weights are rounded."""
    reasons: dict[str, list[str]] = {}
    rounded = ""
    for name, answer in answers.items():
        if name.startswith("zero") and answer["verdict"] != RIGHT:
            stage, dtype = name.removeprefix("zero").split(".")[:2]
            reasons.setdefault(_cleaned(answer["said"]), []).append(f"stage {stage} in {dtype}")
        found = re.search(r"rounds (\d+) weights", answer["said"]) if name.startswith("zero") else None
        rounded = f"rounds {found[1]} weights" if found else rounded
    told = [_short(f"not at {' and '.join(dict.fromkeys(cases))}: {reason}") for reason, cases in reasons.items()]
    return "; ".join([*told, rounded] if rounded else told) or ("yes" if "zero0.fp32.read" in answers else "-")


def _of_routers(answers: dict[str, Any]) -> str:
    if "routers" not in answers:
        return "-"
    coefficient = re.match(r"router loss (\S+)", answers["routers"]["said"])
    return coefficient[1] if coefficient else "without"


def _cleaned(text: str) -> str:
    """Without the temporary folders of the sweep."""
    return re.sub(r"'/\S*/start'", "the folder", text)


def _right(answers: dict[str, Any], name: str) -> bool:
    return name in answers and answers[name]["verdict"] == RIGHT


def _told(answers: dict[str, Any], start: str, without: str = "$^") -> str:
    """yes, with what was said of it but for `without`, a dash if it was not asked, or no with the reason."""
    found = [a for name, a in answers.items() if name.startswith(start)]
    # Rows that are padded instead are no refusal.
    found = [a for a in found if not (a["verdict"] == REFUSED and a["question"].endswith((".packed", ".shared")))]
    for bad in (WRONG, TRACEBACK, REFUSED):
        for answer in found:
            if answer["verdict"] == bad:
                size = "" if answer["difference"] is None else f" by {answer['difference']:.1g}"
                return _short(f"no: {answer['said'] or bad + size}")
    said = [re.sub(without, "", a["said"]) for a in found if start == "lora"]
    return _short("; ".join(["yes", *filter(None, said)])) if found else "-"


def _short(text: str) -> str:
    text = _cleaned(text)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
