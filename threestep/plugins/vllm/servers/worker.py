"""The extension of a vLLM server's workers (`--worker-extension-cls`); serves scripts/serve.sh.

Weights come by vLLM's interface for weight transfer, with the backend BACKEND, which importing this file registers:
`update_weights` takes all of them into the host's memory, `finish_weight_update` puts them in place. So a transfer
that breaks off leaves the old ones serving.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.sample.sampler import Sampler

from threestep.plugins.vllm.experts import ExpertCapture, repack_experts
from threestep.plugins.vllm.servers.experts import packed_experts
from threestep.plugins.vllm.servers.groups import Place, WeightGroup, own_end
from threestep.plugins.vllm.servers.protocol import BACKEND, EXPERTS_OF, NAMED_BY_VLLM, NCCL, PROTOCOL
from threestep.plugins.vllm.servers.stream import Frame, read, received, sums_of, with_adapters
from threestep.plugins.vllm.weights import BitSums, named_for_vllm, repack_tied, unwatch, watch
from training.utils.base.errors import ThreestepError

_GREEDY = 1e-5  # temperatures below draw the likeliest token (vllm 0.32, v1/sample/sampler.py)


class ThreestepWorker:
    """Methods that `/collective_rpc` calls, in a class that vLLM mixes into its worker's."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    _threestep_experts: ExpertCapture | None = None

    def threestep_prepare(self, records_experts: bool = False) -> dict[str, Any]:
        """Let log-probabilities be those after the temperature and before all cuts; return what the server is.
        records_experts: of the requests that ask for it, from now on."""
        sampler = getattr(self.model_runner, "sampler", None)
        if isinstance(sampler, Sampler) and not isinstance(sampler, TemperedSampler):
            sampler.__class__ = TemperedSampler
        if self.vllm_config.device_config.device_type == "cpu":
            torch.compiler.set_stance("force_eager")  # it would compile its log-probabilities for 15 seconds
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "tempers": isinstance(sampler, TemperedSampler),
            "config": model.hf_config.to_dict(),
            "architectures": list(model.architectures),
            "dtype": str(model.dtype).removeprefix("torch."),
            "longest_tokens": model.max_model_len,
            "prefix_caching": bool(cache.enable_prefix_caching),
            "tokenizer": not model.skip_tokenizer_init,
            "end": own_end(self.device)._asdict(),
            "no_experts": self._why_no_experts() if records_experts else None,
        }

    def _why_no_experts(self) -> str | None:
        """Record experts from now on; return why that cannot be."""
        if self._threestep_experts is not None:
            self._threestep_experts.forget()
            return None
        if self.vllm_config.device_config.device_type != "cpu":
            return "it runs on a GPU, where its model runner keeps the choice of experts inside CUDA graphs"
        capture = ExpertCapture(NAMED_BY_VLLM + EXPERTS_OF)
        try:
            capture.attach(self)
        except ThreestepError as problem:
            return str(problem)
        self._threestep_experts = capture
        return None

    def threestep_experts(self, name: str) -> dict[str, Any] | None:
        """Return the experts of a request that is over, and forget them; None where there are none."""
        found_TLK = None if self._threestep_experts is None else self._threestep_experts.take(NAMED_BY_VLLM + name)
        return None if found_TLK is None else packed_experts(found_TLK)


class TemperedSampler(Sampler):
    """vLLM's sampler behind the temperature of each request: vLLM's own log-probabilities are either before the
    temperature ("raw_logprobs") or behind the cuts too."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *words: Any, **named: Any) -> Any:
        """logits: [A, V]."""
        temperature_A = sampling_metadata.temperature
        if temperature_A is not None:
            is_greedy_A = temperature_A < _GREEDY
            scale_A = torch.where(is_greedy_A, 1.0, 1.0 / temperature_A)
            logits = logits.float() * scale_A.unsqueeze(1)
            left_A = torch.where(is_greedy_A, 0.0, 1.0)
            sampling_metadata = dataclasses.replace(sampling_metadata, temperature=left_A)
        return super().forward(logits, sampling_metadata, *words, **named)


@dataclass
class StreamInit(WeightTransferInitInfo):
    """A place at which the trainer and all workers meet for a group (`groups.Place`)."""

    by: str
    host: str
    port: int
    secret: str
    seconds: float
    size: int


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """The trainer's place, and the secret that it expects. seconds: that it may be silent. base: the name of the
    weights that adapters are added to; empty where whole weights come. by_group: tensors come by the group that was
    met. path: of a file in the place of all that."""

    host: str = ""
    port: int = 0
    secret: str = ""
    seconds: float = 0.0
    base: str = ""
    by_group: bool = False
    path: str = ""


class StreamedWeights(WeightTransferEngine[StreamInit, StreamUpdate]):
    """See the file. One transfer at a time. Where adapters come alone, the weights below them stay in the host's
    memory."""

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate
    supports_draft_weight_update = False

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._kept: list[Frame] = []
        self._kept_base = self._base_name = ""
        self._base: dict[str, torch.Tensor] = {}
        self._group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        self._leave_group()
        device = self.device if init_info.by == NCCL else torch.device("cpu")
        try:
            self._group = WeightGroup(Place(**dataclasses.asdict(init_info)), self.parallel_config.rank + 1, device)
        except (OSError, RuntimeError) as problem:
            raise RuntimeError(f"its worker could not connect to the trainer: {type(problem).__name__}") from None

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def start_weight_update(self) -> None:
        self._kept = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StreamUpdate) -> None:
        place = update_info
        try:
            if place.path:
                frames, sums = read(place.path)
            else:
                group = self._group if place.by_group else None
                if place.by_group and group is None:
                    raise ValueError("the group no longer exists")
                frames, sums = received(place.host, place.port, place.secret, place.seconds, group=group)
        except (OSError, ValueError, KeyError, RuntimeError) as problem:
            self._leave_group()  # so that nobody waits for this worker there
            raise RuntimeError(f"the weights did not arrive: {problem}") from None  # without the secret
        if {layer or "": own for layer, own in sums_of(frames).by_layer.items()} != sums:
            raise RuntimeError("the received weights differ from those that were sent")
        self._kept, self._kept_base = frames, place.base

    def finish_weight_update(self) -> None:
        """Put the weights in place. RuntimeError where the model then holds other numbers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors, arrived, sent = self._whole(), BitSums(), BitSums()
        for name, tensor in tensors.items():
            sent.add(name, tensor)
        with torch.no_grad():
            watch(self.model, arrived)
            initialize_layerwise_reload(self.model)
            given = ((name, tensor.to(self.device)) for name, tensor in tensors.items())
            self.model.load_weights(named_for_vllm(type(self.model).__name__, given))
            finalize_layerwise_reload(self.model, self.model_config)
            unwatch(self.model, arrived)
            repack_tied(self.model)
            repack_experts(self.model)
        differing = arrived.differing(sent) if self.parallel_config.world_size == 1 else []
        if differing:
            raise RuntimeError(
                f"vLLM's weights differ from those it was sent, in {', '.join(differing)}: it reads checkpoints of "
                "this architecture differently from how transformers stores them"
            )

    def _whole(self) -> dict[str, torch.Tensor]:
        """Return the weights that came, or those below the adapters with these added."""
        frames, self._kept = self._kept, []
        weights = {frame.name: frame.tensor for frame in frames if frame.of_adapter is None}
        if not self._kept_base:
            self._base, self._base_name = {}, ""
            return weights
        if weights:
            self._base, self._base_name = weights, self._kept_base
        elif self._base_name != self._kept_base:
            raise RuntimeError("adapters arrived without the weights that they are added to")
        return with_adapters(self._base, frames)

    def shutdown(self) -> None:
        self._kept, self._base = [], {}
        self._leave_group()


WeightTransferEngineFactory.register_engine(BACKEND, StreamedWeights)
