"""Makes the head that a run trains, and says what it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from threestep.plugins.mtp.folder import FOLDER, layers_in, read_head
from threestep.plugins.mtp.head import MtpHead, MtpModule, block_weights, new_head
from threestep.plugins.mtp.public_folder import public_head_in
from threestep.plugins.mtp.training import HeadTraining, MultiTokenPrediction
from training.utils.base.console import log
from training.utils.base.seeds import derived_seed
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.zero3 import full_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.mtp.settings import MtpSettings
    from training.utils.engine.ranks.startup import Ranks

# Gives every weight of a model, whole, by its name; a collective under ZeRO-3.
WholeTensors = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def open_head(
    settings: MtpSettings,
    path: str,
    policy: TrainingEngine,
    model: PreTrainedModel,
    *,
    total_steps: int,
    seed: int,
) -> MultiTokenPrediction:
    """Return the head of `settings`, which has layers, under DeepSpeed as `policy` is. A collective.

    path: of the model that `policy` trains, whose folder may hold a head. model: inside `policy`, with the head of
    `joint_head` beside it where both are trained by one loss.
    Raises ThreestepError if the model cannot have such a head.
    """
    engine = policy
    if settings.detach:
        head = _made_head(settings, path, model, seed, ranks=policy.ranks, tensors=partial(policy.full_tensors, model))
        if policy.settings.zero_stage != 3:
            head.to(policy.ranks.device)
        engine = TrainingEngine(head, policy.settings, policy.ranks, total_steps)
    return MultiTokenPrediction(HeadTraining(engine, policy, settings.loss_coef, settings.layers))


def joint_head(
    settings: MtpSettings, path: str, model: PreTrainedModel, zero_stage: int, *, seed: int, ranks: Ranks
) -> MtpHead:
    """Return the head that is trained with `model` by one loss, for its PolicyModel: without `settings.detach`. A
    collective, before the model is under DeepSpeed. Otherwise as `open_head`."""
    head = _made_head(settings, path, model, seed, ranks=ranks, tensors=partial(full_tensors, model, zero_stage))
    return head if zero_stage == 3 else head.to(ranks.device)


def _made_head(
    settings: MtpSettings, path: str, model: PreTrainedModel, seed: int, *, ranks: Ranks, tensors: WholeTensors
) -> MtpHead:
    """Return a head on the CPU, and say what it starts from. tensors: of `model`."""
    head = new_head(model, settings.layers, derived_seed(seed, "mtp"), settings.final_norm)
    stored, origin = _read_stored(head, path, model)
    if stored < settings.layers:
        _start_as_the_last_block(head, stored, model, tensors)
    weights = sum(weight.numel() for weight in head.parameters())
    log(f"multi-token prediction: {_described(stored, settings.layers, origin)}; {weights:,} weights", ranks.is_main)
    return head


def _read_stored(head: MtpHead, path: str, model: PreTrainedModel) -> tuple[int, str]:
    """Load the modules of `head` that the model's folder has, under this project's names or a public checkpoint's.
    Return how many these are, and where they were, in words."""
    own = min(layers_in(path), len(head.depths))
    if own:
        read_head(path, _first(head, own))
        return own, f"{path}/{FOLDER}"
    public = public_head_in(path, int(model.config.get_text_config().num_hidden_layers))
    if public is None:
        return 0, ""
    found = min(public.depths, len(head.depths))
    public.read(_first(head, found))
    return found, f"{path}: {public.names}"


def _described(stored: int, layers: int, origin: str) -> str:
    """The origin of the modules, in words."""
    parts = []
    if stored:
        parts.append(f"{stored} loaded from {origin}")
    if layers > stored:
        parts.append(f"{layers - stored} new, initialized from the model's last block")
    return f"a head with {layers} module{'s' * (layers > 1)}: {' and '.join(parts)}"


def _first(head: MtpHead, count: int) -> MtpHead:
    """The first modules of `head`, as a head."""
    return MtpHead(list(head.depths)[:count])  # type: ignore[arg-type]


def _start_as_the_last_block(head: MtpHead, first: int, model: PreTrainedModel, tensors: WholeTensors) -> None:
    """Give the modules from `first` on the weights of the model's last block and final norm: a block that reads states
    of this model learns sooner from there than from random weights."""
    theirs = block_weights(model, head)
    wanted = set(theirs.values())
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors() if name in wanted}
    with torch.no_grad():
        for module in list(head.depths)[first:]:
            assert isinstance(module, MtpModule)
            for name, weight in module.trunk.named_parameters():
                weight.copy_(whole[theirs[name]])
