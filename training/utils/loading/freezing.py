"""Freezing of weights: a tower and its projector beside a language model, and those that a model folder names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.loading.judgement import HEAD, OUTPUT_HEADS
from training.utils.models.families.parts import is_beside_language, is_of_projector, refuse_without_projector
from training.utils.models.tensors.adapters import adapters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings

FROZEN = "frozen.txt"  # in a model folder: the names of weights that stay as they are, one a line


def freeze_parts(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Freeze tower and projector where `settings` say so, but for adapters that they have. A text model has neither.

    ThreestepError for `--freeze_projector` where there is none.
    """
    is_beside, adapters = is_beside_language(model), adapters_of(model)
    weights = {name: part for name, part in model.named_parameters() if is_beside(name)}
    if settings.freeze_projector and not any(map(is_of_projector, weights)):
        refuse_without_projector(model)
    for name, weight in weights.items():
        frozen = settings.freeze_projector if is_of_projector(name) else settings.freeze_vision_tower
        if frozen and not adapters.holds(name):
            weight.requires_grad_(False)


def freeze_named(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool) -> None:
    """Freeze the weights that the model's folder names in frozen.txt, if it has that file.

    embeddings_train: they have new rows

    ThreestepError for names that the model lacks, and where embeddings or adapters would move a weight that is named.
    """
    path = Path(settings.name_or_path, FROZEN)
    if not path.is_file():
        return
    named = dict.fromkeys(path.read_text(encoding="utf-8").split())
    adapters = adapters_of(model)
    own = {name: weight for name, weight in model.named_parameters() if not adapters.holds(name)}
    weights = {adapters.plain_name(name): weight for name, weight in own.items()}
    unknown = [name for name in named if name not in weights and not name.startswith(OUTPUT_HEADS)]
    if unknown:
        raise ThreestepError(
            f"{path} names {unknown[0]}, which {type(model).__name__} lacks, the model that is trained; start from "
            "one of that class, or freeze no such weight"
        )
    adapted = [adapters.plain_name(name) for name in own if len(adapters.parameters_of(model, name)) > 1]
    layers = {name.rpartition(".")[0] for name in adapted}
    moved = [name for name in named if name.rpartition(".")[0] in layers]
    is_whole = all(name in named or name.startswith(HEAD) for name in weights)
    if moved and not is_whole:
        raise ThreestepError(
            f"adapters train on {moved[0]} and {len(moved) - 1} other weights that are frozen ({path}), which would "
            "move them as saved; have adapters on other layers, unfreeze them, or freeze the model as a whole"
        )
    frozen = [weights[name] for name in named if name in weights]
    if embeddings_train and any(weight is model.get_input_embeddings().weight for weight in frozen):
        raise ThreestepError(
            f"the tokenizer gained tokens, whose embeddings must be trained, and these are frozen ({path}); unfreeze "
            "them, or start from a model and tokenizer that have the tokens"
        )
    for weight in frozen:
        weight.requires_grad_(False)
    log_on_main(f"model: {len(frozen)} of {len(weights)} weights stay as they are ({path})")
