"""The model card, README.md, of a run's model folder and of exported ones: base model, data, settings and figures.
Made from the run's files; no path of this machine is in it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from threestep.plugins.report.figures.overview import given_text
from training.utils.base.console import log
from training.utils.base.credentials import redacted_value
from training.utils.base.storage import parse_yaml, read_json_object, replace_file
from training.utils.data.chat.style import KEY, SavedStyle
from training.utils.data.formats.messages import FRAME
from training.utils.flags.arguments import defaults_of
from training.utils.flags.flags import chosen_in
from training.utils.flags.step import Step, step_of

if TYPE_CHECKING:
    from training.utils.plugins.plugin import ExportedModel

CARD = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Of the run and its machine, not of the model; and tags, whose default is a list that `defaults_of` does not give.
_LEFT_OUT = frozenset(
    {
        "output_dir", "data_output_path", "data_path", "run_name", "resume", "report", "report_to", "report_samples",
        "logging_steps", "logging_seconds", "num_workers", "push_to_hub", "hub_model_id", "hub_private_repo",
        "parallel_tags", "overwrite", "record_steps", "record_values", "explain_steps", "digests",
    }
)  # fmt: skip

# How a language model is asked, by the prompt style of its training.
_ASKED = {
    "human_assistant": "Prompt it with `{}`, as in its training.",
    "as_stored": "Send one bare prompt at a time, as in its training data, without turns or a template.",
    "chat_template": "Prompt it with its chat template, as in its training.",
}


def model_card(
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
    versions: Mapping[str, str],
    base: str | None,
    *,
    exported: tuple[str, str] | None = None,
    frame: tuple[str, str] = FRAME,
    chosen: Collection[str] = (),
) -> str:
    """Return the card in Markdown, with the hub's fields at its top. summary: the closing figures. base: the hub name
    of the model that training began with, if it is known. exported: the part and the name of a checkpoint that the
    model was made of, whose figures nobody knows; summary is empty then. frame: of the prompts (see `SavedStyle`).
    chosen: names of the settings that the program chose."""
    step = step_of(settings)
    names = [str(name) for name in settings.get("data_path") or []]
    hub_names = [hub_name for name in names if (hub_name := _dataset_of(name))]
    fields: dict[str, Any] = {"library_name": "transformers"}
    if base:
        fields["base_model"] = base
    if hub_names:
        fields["datasets"] = hub_names
    scores = step.kind == "reward" or (exported is not None and exported[0] == "critic")
    fields["pipeline_tag"] = "text-classification" if scores else "text-generation"
    method = step.label_of(settings)
    fields["tags"] = [
        "threestep",
        step.kind if method == step.label else re.sub(r"\W+", "-", method.lower()).strip("-"),
    ]
    start = next((settings[flag] for flag in step.inputs if settings.get(flag)), "")
    lines = ["---", yaml.safe_dump(fields, sort_keys=False).rstrip(), "---", ""]
    lines += [f"# {step.title_of(settings)}", ""]
    data = ", ".join(given_text(name) or f"`{_plain(name)}`" for name in names)
    model = given_text(str(start)) or f"`{base or _start_name(start)}`"
    lines += [f"Trained with Threestep from {model} on {data}."]
    if not scores and (asked := _ASKED.get(str(settings.get("prompt_style")))):
        text = "Human: QUESTION".join(frame)
        lines += ["", asked.format(text if frame == FRAME else repr(text))]
    if exported is not None:
        lines += ["", f"Exported from checkpoint {exported[1]}: the {exported[0]}."]
    figures = [
        f"| {name} | {summary[name]:.4g} |"
        for name in _before_first(summary)
        if isinstance(summary[name], (int, float)) and name != "seconds"
    ]
    if figures:
        lines += ["", "## Figures", "", "| figure | value |", "| --- | ---: |", *figures]
    lines += ["", "## Settings that differ from the defaults", "", "| setting | value |", "| --- | --- |"]
    lines += [f"| {name} | {_plain(value)} |" for name, value in _changed(settings, step).items() if name not in chosen]
    lines += ["", f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.", ""]
    return "\n".join(lines)


def _before_first(names: Iterable[str]) -> list[str]:
    """The names in their order, but what was before training before what was after it."""
    ordered = list(dict.fromkeys(re.sub("_(before|after)$", "", name) for name in names))
    place = {f"{name}{end}": (at, end) for at, name in enumerate(ordered) for end in ("_before", "_after", "")}
    return sorted(names, key=lambda name: (place[name][0], place[name][1] != "_before"))


def _start_name(path: Any) -> str:
    """The last parts of a folder's path that name it: `sft/model` of `runs/sft/model`."""
    parts = Path(str(path)).parts
    return "/".join(parts[-2:] if parts[-1:] == ("model",) else parts[-1:]).replace("|", "\\|")


def write_card(folder: Path, out: Path | None = None, exported: tuple[str, str] | None = None) -> None:
    """Write the card of the run in `folder` into its model, or into `out`, which was `exported` (see `model_card`). A
    failure is one line."""
    try:
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        settings = redacted_value(parse_yaml(config))
        summary = {} if exported else read_json_object(str(folder / "summary.json")) or {}
        versions = (read_json_object(str(folder / "environment.json")) or {}).get("versions", {})
        model = out or folder / "model"
        style = (read_json_object(str(model / "tokenizer_config.json")) or {}).get(KEY) or {}
        begin, ending = style.get("prompt_begin", ""), style.get("prompt_end", "")
        frame = SavedStyle("", prompt_begin=begin, prompt_end=ending).frame
        card = model_card(
            settings,
            summary,
            versions,
            base_of(settings),
            exported=exported,
            frame=frame,
            chosen=chosen_in(config),
        )
        replace_file(model / CARD, card)
    except (OSError, ValueError, yaml.YAMLError) as problem:
        log(f"warning: no model card was written ({type(problem).__name__}: {problem})")


def card_of_export(exported: ExportedModel) -> None:
    """Write the card of a model that was made of a checkpoint."""
    write_card(exported.run, exported.out, (exported.part, exported.checkpoint))


def base_of(settings: Mapping[str, Any]) -> str | None:
    """The hub name of the model that training began with: the start model's, or the base in its card."""
    start = next((str(settings[flag]) for flag in step_of(settings).inputs if settings.get(flag)), "")
    if not Path(start).exists():
        return start if _HUB_NAME.fullmatch(start) else None
    try:
        parts = (Path(start) / CARD).read_text(encoding="utf-8").split("---\n")
        header = parse_yaml(parts[1]) if len(parts) > 2 else {}
    except (OSError, ValueError, yaml.YAMLError):
        return None
    base = header.get("base_model") if isinstance(header, dict) else None
    return base if isinstance(base, str) and _HUB_NAME.fullmatch(base) else None


def _dataset_of(name: str) -> str | None:
    """The hub name in a --data_path; None for files and built-in data."""
    plain = name.removeprefix("hub:").split(",")[0]
    return plain if _HUB_NAME.fullmatch(plain) and not Path(plain).exists() else None


def _changed(settings: Mapping[str, Any], step: Step) -> dict[str, Any]:
    defaults = defaults_of(step.groups)
    start = next((flag for flag in step.inputs if settings.get(flag)), "")  # which stands at the top
    return {
        name: value
        for name, value in sorted(settings.items())
        if name in defaults and name not in (*_LEFT_OUT, start) and value not in (defaults[name], [])
    }


def _plain(value: Any) -> str:
    """A value without folders of this machine, in one cell of a table."""
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    prefix, colon, path = text.rpartition(":")
    if os.path.isabs(path) or (os.sep in path and Path(path).exists()):
        text = prefix + colon + _start_name(path)
    return " ".join(text.replace("|", "\\|").split())
