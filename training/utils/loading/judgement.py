"""Checks of transformers' report of a load against the requested model: refused in a sentence, or logged.

Knows no torch and no files but their headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log, started_as_main_rank
from training.utils.base.errors import ThreestepError
from training.utils.loading.folder_kinds import resaving_command

if TYPE_CHECKING:
    from training.utils.loading.weight_files import StoredTensor

HEAD = "score."  # transformers' name of a scalar head
# What wraps a model when its state is saved, and stays in the names of the tensors.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model.model",
             "pretrained_model", "base_layer")  # fmt: skip
_WRAPPED = re.compile(rf"(?:(?<=\.)|(?<=^))((?:(?:{'|'.join(map(re.escape, _WRAPPERS))})\.)+)")
OUTPUT_HEADS = ("lm_head.", "embed_out.", "output_layer.", "cls.")  # a scalar model has none
# A head under another name, which one row of weights makes a score of, or more (DeepSpeed-Chat and Starling: v_head,
# TRL: v_head.summary, OpenRLHF: value_head, UltraRM: regression_head, Qwen2.5-Math-RM: score.0 and score.2, ...).
_OTHER_HEAD = re.compile(
    r"(?:.+\.)?(?:score|scorer|summary|v_head|(?:value|reward|rm|ranking|regression|classification)_(?:head|layer)|"
    r"classifier|qa_outputs)(?:\..+)?"
)
_SCORES = re.compile("SequenceClassification|TokenClassification|Reward|ValueHead")  # in the name of an architecture


@dataclass(frozen=True)
class LoadReport:
    """transformers' report of one load, in the model's names.

    names: of all that the model holds
    wrong_shapes: name to the shape in the file and that of the model
    unconverted: tensors that could not be made of those in the file, and why
    """

    names: Collection[str]
    missing: frozenset[str]
    unexpected: frozenset[str] = frozenset()
    wrong_shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    unconverted: tuple[str, ...] = ()
    why_unconverted: str = ""


@dataclass(frozen=True)
class RequestedModel:
    """The requested model.

    where: its folder or hub name
    config: as transformers reads it
    is_scalar: a reward model or critic; otherwise a language model
    new_head: a scalar head that is not there is made
    replaces_head: also in the place of one under another name
    supplied: tensors that an adapter brings
    """

    where: str
    config: Any
    is_scalar: bool
    new_head: bool = False
    replaces_head: bool = False
    supplied: frozenset[str] = frozenset()

    @property
    def architectures(self) -> list[str]:
        return list(getattr(self.config, "architectures", None) or [])


def judge(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> None:
    """ThreestepError if the load is not the model that is `wanted`; a log line for new and unused tensors."""
    report = replace(report, missing=report.missing - wanted.supplied)
    judges = (_unconverted, _wrapped, _no_language_model, _head_bias, _other_head, _wrong_head, _wrong_shape, _missing)
    for refused in judges:
        sentence = refused(wanted, report, stored)
        if sentence is not None:
            raise ThreestepError(sentence)
    is_main = started_as_main_rank()
    if report.missing:
        names, others = ", ".join(sorted(report.missing)), _other_heads(report, stored)
        has = f"has a different head ({counted(others)}), which is not used" if others else "has no scalar head"
        log(f"model: '{wanted.where}' {has}; initialized at random: {names}", is_main)
    dropped = OUTPUT_HEADS if wanted.is_scalar else ()
    unused = sorted(name for name in report.unexpected if not name.startswith(dropped))
    heads = [name for name in unused if name.startswith(OUTPUT_HEADS) or name in _other_heads(report, stored)]
    others = [name for name in unused if name not in heads]
    if heads:
        log(f"model: '{wanted.where}' has another head, which is not used here: {counted(heads)}", is_main)
    if others:
        log(
            f"warning: '{wanted.where}' has weights that are neither used nor saved, because {_classes(wanted)} in "
            f"transformers has no place for them: {counted(others)}",
            is_main,
        )


# --- what is refused, each a sentence or None


def _unconverted(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    if not report.unconverted:
        return None
    return (
        f"'{wanted.where}': cannot build {counted(report.unconverted)} of {_classes(wanted)}, from the tensors in the "
        f"files{report.why_unconverted}; if some are missing, such as an expert's, download or save the model again"
    )


def _wrapped(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    """Names of a wrapper around the model, or adapters beside it."""
    adapters = sorted(name for name in report.unexpected if ".lora_" in name)
    if adapters:
        return (
            f"'{wanted.where}' holds LoRA adapters next to the weights ({counted(adapters)}); merge them before saving "
            "(PEFT: merge_and_unload), and use the merged model"
        )
    bare = {name: _WRAPPED.sub("", name) for name in sorted(report.unexpected) if _WRAPPED.search(name)}
    wrapped = [name for name in bare if report.missing and _known(bare[name], report)]
    if not wrapped:
        return None
    part = _WRAPPED.findall(wrapped[0])[0]
    mapping = ("^" if all(name.startswith(part) for name in wrapped) else "") + re.escape(part)
    rename = resaving_command(wanted.where, wanted.architectures, key_mapping=f"{{r'{mapping}': ''}}")
    return (
        f"'{wanted.where}': the names of {len(wrapped)} tensors contain a wrapper's '{part}', such as "
        f"{wrapped[0]}, where {_classes(wanted)} has {bare[wrapped[0]]}; rename them: {rename}"
    )


def _no_language_model(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    if wanted.is_scalar or not any(name.startswith(HEAD) for name in report.unexpected):
        return None
    without = ", ".join(sorted(report.missing)[:2])
    return (
        f"'{wanted.where}': expected a language model, got a model for sequence classification "
        f"({', '.join(wanted.architectures) or 'no architecture'}) with {HEAD}weight"
        + (f" and without {without}, which would be random" if without else "")
        + "; use a language model, such as step 1's model folder"
    )


def _head_bias(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    """Name of a bias beside a head that is used, without which it computes other numbers."""
    heads = (HEAD,) if wanted.is_scalar else OUTPUT_HEADS
    moved = "scores would shift by a constant" if wanted.is_scalar else "log-probabilities would change"
    uses = {*report.names} - report.missing
    for head in heads:
        if f"{head}bias" not in report.unexpected or f"{head}weight" not in uses:
            continue
        again = resaving_command(wanted.where, wanted.architectures)
        return (
            f"'{wanted.where}' has {head}bias next to {head}weight, but {_classes(wanted)} in transformers has no "
            f"place for it: all its {moved}; if that is acceptable, save the model without it: {again}"
        )
    return None


def _other_head(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    """Name of a head under another name, if one would be drawn at random, or lost."""
    if not wanted.is_scalar:
        return None
    if f"{HEAD}weight" not in report.missing:
        return (
            f"--new_head is for a model whose head is not named {HEAD}weight, but '{wanted.where}' has such a head; "
            "leave the flag out to continue training its head, or use the original language model"
            if wanted.replaces_head
            else None
        )
    others = _other_heads(report, stored)
    scored = any(_SCORES.search(name) for name in wanted.architectures)
    if wanted.replaces_head or not (others or scored):
        return None
    got = f"one whose head is {counted(others)}" if others else f"{wanted.architectures[0]} without it"
    ways = ["train a new head in its place with --new_head"] if wanted.new_head else ["train one with step 2"]
    weights = [name for name in others if name.endswith(".weight")]
    if len(others) == len(weights) == 1 and stored[others[0]].shape[:-1] == (1,):
        mapping = f"{{r'^{re.escape(others[0])}$': '{HEAD}weight'}}"
        again = resaving_command(wanted.where, ["AutoModelForSequenceClassification"], mapping, num_labels=1)
        ways.insert(0, f"rename its head, if a score is that row times the last hidden state: {again}")
    elif not wanted.new_head and not others:
        return None  # `_wrong_head` reports it
    return f"'{wanted.where}': expected a reward model with {HEAD}weight, got {got}; {', or '.join(ways)}"


def _other_heads(report: LoadReport, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Names of what may be a head under another name, or more of one than its weight: by their words, or one row of
    weights that is in no layer."""
    return sorted(
        name
        for name in report.unexpected
        if name in stored
        and not name.startswith(OUTPUT_HEADS)
        and (
            _OTHER_HEAD.fullmatch(name)
            or (len(stored[name].shape) == 2 and stored[name].shape[0] == 1 and not re.search(r"\.\d+\.", name))
        )
    )


def _wrong_head(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    lacks = sorted(name for name in report.missing if name.startswith(HEAD))
    if wanted.is_scalar and lacks and not wanted.new_head:
        return (
            f"'{wanted.where}': expected a reward model, got one without {', '.join(lacks)}: its scores would be "
            "random; train one with step 2 and use its model folder"
        )
    for name, got, model in report.wrong_shapes:
        if wanted.is_scalar and name.startswith(HEAD) and got[1:] == model[1:]:
            return (
                f"'{wanted.where}': expected a model with one label, got {got[0]} labels (num_labels {got[0]}, "
                f"{name} {list(got)}); use a language model, or a reward model with num_labels 1"
            )
    return None


def _wrong_shape(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    if not report.wrong_shapes:
        return None
    name, got, model = min(report.wrong_shapes)
    key = next((key for key in stored if key == name or name.endswith(f".{key}") or key.endswith(f".{name}")), None)
    others = f" ({len(report.wrong_shapes)} tensors differ)" if len(report.wrong_shapes) > 1 else ""
    return (
        f"'{stored[key].file if key else wanted.where}': {name} expects the shape {list(model)} from config.json, got "
        f"{list(got)}{others}; use weights and a configuration from the same model"
    )


def _missing(wanted: RequestedModel, report: LoadReport, stored: Mapping[str, StoredTensor]) -> str | None:
    lacks = sorted(name for name in report.missing if not (wanted.new_head and name.startswith(HEAD)))
    if not lacks:
        return None
    held = f"'{wanted.where}' holds {len(stored)} tensors but lacks {counted(lacks)}, of the {len(report.names)} in "
    if 2 * len(lacks) > len(report.names) and report.unexpected:
        return (
            f"{held}{_classes(wanted)}, which does not know {counted(sorted(report.unexpected))}: config.json and the "
            "weights are from different architectures; use those of one model"
        )
    return f"{held}{_classes(wanted)}: the missing ones would be random; download or save the model again"


def _known(name: str, report: LoadReport) -> bool:
    """True if the model has a tensor of this name, with or without the name of its trunk."""
    return name in report.names or any(
        known.endswith(f".{name}") or name.endswith(f".{known}") for known in report.missing
    )


def _classes(wanted: RequestedModel) -> str:
    kind = "a scalar model" if wanted.is_scalar else "a language model"
    return f"{kind} of type {getattr(wanted.config, 'model_type', '?')}"


def counted(names: Collection[str]) -> str:
    """Number of tensors, and the first names."""
    first = ", ".join(list(names)[:3])
    return f"the tensor {first}" if len(names) == 1 else f"{len(names)} tensors, such as {first}"
