"""Rollouts written to a folder, and read from it in place of generation.

One safetensors file per rollout and rank, numbered in the order in which a run asks for them, evaluations included:
`rollout_000003_rank0.safetensors` holds the Rollout's tensors and the seeds, and in its metadata, as JSON, how they
were drawn, the sha256 of each prompt's media, and what became of conversations, whose environments a replay does not
ask. A run with the same settings asks
for the same rollouts in the same order, so it gets them back. A resumed run continues with its checkpoint's number, and
overwrites what a killed run wrote after it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from threestep.plugins.replay.rollout_tensors import ASKED, TENSORS, check_tensors, rollout_of, tensors_of
from threestep.plugins.replay.words import OF_ANOTHER_RUN
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import torch_tensors
from training.utils.contracts.rollout_engine import EngineWrapper, RolloutEngine, RolloutRequest
from training.utils.contracts.rows import STORED_MEDIA

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout import Rollout

_FORMAT = "threestep rollout 1"
_RECORDS = "conversations"


def file_of(folder: str | Path, index: int, rank: int) -> Path:
    return Path(folder) / f"rollout_{index:06d}_rank{rank}.safetensors"


class _Files:
    """The files of a rank in `folder`. more: what else decides the responses, by name, as JSON holds it. count: of
    rollouts so far."""

    def __init__(self, folder: str | Path, rank: int, more: Mapping[str, Any] | None) -> None:
        self.folder, self.more, self.count, self.rank = Path(folder), dict(more or {}), 0, rank

    @property
    def next(self) -> Path:
        return file_of(self.folder, self.count, self.rank)


class DumpingRollout(EngineWrapper):
    """Another engine, whose rollouts are also written to `folder`."""

    def __init__(
        self, engine: RolloutEngine, folder: str | Path, rank: int, more: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(engine)
        self._files = _Files(folder, rank, more)
        self._files.folder.mkdir(parents=True, exist_ok=True)

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        rollout = self._engine.roll_out(model, request)
        tensors, records = tensors_of(rollout)
        metadata = _metadata(request, self._files.more)
        if request.media is not None:
            metadata[STORED_MEDIA] = _media_of(request)
        if records is not None:
            asked = zip(ASKED, request.repeated(), strict=True)
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in asked}
            metadata[_RECORDS] = records
        path = self._files.next
        unfinished = path.with_suffix(".unfinished")
        save_file({**tensors, "seeds": torch.tensor(list(request.seeds))}, unfinished, metadata)
        unfinished.replace(path)
        self._files.count += 1
        return rollout

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rollouts": self._files.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._files.count = state["rollouts"]
        super().load_state_dict({name: part for name, part in state.items() if name != "rollouts"})


class ReplayRollout(RolloutEngine):
    """The rollouts of `folder`, one after the other; the model is not used."""

    def __init__(self, folder: str | Path, rank: int, more: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._files = _Files(folder, rank, more)

    def check(self, *given: Any) -> list[str]:
        return [f"replay: {OF_ANOTHER_RUN.format(self._files.folder)}"]

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started, path = time.perf_counter(), self._files.next
        if not path.exists():
            raise ThreestepError(
                f"--rollout_replay expects rollout {self._files.count} of rank {self._files.rank} in "
                f"{self._files.folder}, but {path.name} is missing; replay with the same steps, evaluations and "
                "number of ranks as the run that wrote the rollouts"
            )
        tensors, metadata = _read(path)
        _check_words(path, tensors, model)
        records = metadata.pop(_RECORDS, None)
        _check_media(path, metadata.pop(STORED_MEDIA, None), request)
        _check_asked_alike(path, tensors, metadata, request, wanted_settings=_metadata(request, self._files.more))
        self._files.count += 1
        columns = {name: tensor.to(request.prompt_ids_BP.device) for name, tensor in tensors.items()}
        return rollout_of(columns, records, seconds=time.perf_counter() - started)

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self._files.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._files.count = state["rollouts"]


def _metadata(request: RolloutRequest, more: Mapping[str, Any]) -> dict[str, str]:
    """Return all that decides the responses, as JSON by name: safetensors keeps strings."""
    sampling = dataclasses.asdict(request.sampling)
    ends, form = sampling.pop("ends"), sampling.pop("form") and request.sampling.form
    settings = {
        **sampling,
        **({} if form is None else form.decides),
        "stop": ends["texts"],
        "more_end_token_ids": ends["token_ids"],
        "samples_per_prompt": request.samples_per_prompt,
        "format": _FORMAT,
        **more,
    }
    return {name: json.dumps(value) for name, value in settings.items()}


def _media_of(request: RolloutRequest) -> str:
    """The sha256 of each medium of each prompt, as JSON."""
    assert request.rows is not None, "prompts with media are of a dataset"
    return json.dumps([list(row.media_digests) for row in request.rows])


def _check_media(path: Path, drawn: str | None, request: RolloutRequest) -> None:
    if drawn != (None if request.media is None else _media_of(request)):
        raise ThreestepError(
            f"--rollout_replay: {path} holds responses to prompts whose images differ from this run's; replay with "
            "the data of the run that wrote the rollouts, or dump them again"
        )


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Raises ThreestepError for what DumpingRollout has not written."""
    try:
        tensors, metadata = torch_tensors(path)
    except ThreestepError as problem:
        raise ThreestepError(f"--rollout_replay: {problem}; dump the rollouts again") from problem
    if metadata.get("format") != json.dumps(_FORMAT) or not {*TENSORS, "seeds"} <= tensors.keys():
        raise ThreestepError(
            f"--rollout_replay expects files from --rollout_dump ('{_FORMAT}'), but {path} is not one; dump the "
            "rollouts again"
        )
    check_tensors(tensors, f"--rollout_replay: {path}", metadata.get(_RECORDS))
    return tensors, metadata


def _check_words(path: Path, tensors: Mapping[str, torch.Tensor], model: Any) -> None:
    """ThreestepError for a token that the model does not have."""
    if model is None:
        return
    vocabulary, ids = model.config.get_text_config().vocab_size, ("prompt_ids_BP", "response_ids_BR")
    if (most := max(int(tensors[name].max()) for name in ids if tensors[name].numel())) >= vocabulary:
        raise ThreestepError(
            f"--rollout_replay: {path} holds the token id {most}, but the model has only {vocabulary:,} tokens; "
            "replay with the model of the run that wrote the rollouts"
        )


def _check_asked_alike(
    path: Path,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str],
    request: RolloutRequest,
    *,
    wanted_settings: dict[str, str],
) -> None:
    for name in dict.fromkeys((*wanted_settings, *metadata)):
        drawn, value = metadata.get(name, "null"), wanted_settings.get(name, "null")
        if drawn != value:
            raise ThreestepError(
                f"--rollout_replay: {path} was generated with {name} = {drawn}, but this run uses {value}; replay "
                "with the settings of the run that wrote the rollouts, or dump them again"
            )

    ids_BP, mask_BP = request.repeated()
    seeds = torch.tensor(list(request.seeds))
    ids_name, mask_name = ASKED if ASKED[0] in tensors else ("prompt_ids_BP", "prompt_mask_BP")
    for name, wanted in ((ids_name, ids_BP), (mask_name, mask_BP), ("seeds", seeds)):
        if not torch.equal(tensors[name], wanted.cpu()):
            what = "seeds" if name == "seeds" else "prompts"
            raise ThreestepError(
                f"--rollout_replay: {path} holds responses whose {what} differ from this run's; replay with the same "
                "data, seed, batch sizes, evaluations and ranks as the run that wrote the rollouts, or dump them "
                "again"
            )
