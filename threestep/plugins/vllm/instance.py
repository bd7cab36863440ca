"""One vLLM engine in the training's own process: start, sleep, weights, and what it must leave unchanged around it.

It starts without weights and takes the trained ones (vllm_weights.py) whenever they have changed. On a GPU it sleeps
while the models are trained.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from threestep.plugins.vllm.arguments import CPU_CACHE_GIB, VllmArguments
from threestep.plugins.vllm.draft import VllmDraft, expand_batch_to_tokens
from threestep.plugins.vllm.experts import ExpertCapture, returned_experts
from threestep.plugins.vllm.images import read_weights, start_settings
from threestep.plugins.vllm.weights import send_draft, send_weights
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.lending import Tensors

# Read by vLLM at its start. One process, because the weights are handed over in memory. On a CPU, threads are not
# bound: vLLM would bind two ranks to the same cores.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_BLOCK_TOKENS = 32  # vLLM's default of 128 is longer than many prompts, which could then not be shared


class VllmInstance:
    """llm: vllm.LLM, None before the start.
    updates: how often the weights that vLLM holds had been changed; None if it holds none that are known.
    sync_seconds: time spent on sending weights.
    draft: what it drafts with, if that is set before the start.
    records_experts: of each token, if that is set before the start; experts: what reads them, where vLLM returns none.
    """

    def __init__(self, flags: VllmArguments, longest_tokens: int) -> None:
        self.llm: Any = None
        self.updates: int | None = None
        self.sync_seconds = 0.0
        self.draft: VllmDraft | None = None
        self.records_experts = False
        self.experts: ExpertCapture | None = None
        self._flags = flags
        self._longest_tokens = longest_tokens
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_awake = False
        self._is_checked = False

    def wake(self, model: PreTrainedModel) -> None:
        """Start vLLM with the shape of `model`, or wake it up; ready for `take`."""
        if self.llm is None:
            with _global_state_restored():
                self.llm = self._started(model)
            self._is_awake = True
        elif not self._is_awake:
            self.llm.wake_up(tags=["weights"])  # the cache waits until the weights are in place

    def take(self, tensors: Any, model: PreTrainedModel, keep: bool) -> None:
        """Send `tensors`, of `model`, and the head to draft with; see send_weights."""
        started, self.updates = time.perf_counter(), None
        check = self._flags.vllm_tensor_parallel_size == 1 and (self._flags.vllm_check_weights or not self._is_checked)
        send_weights(self.llm, read_weights(self.llm, tensors), model.dtype, keep, check=check)
        if self.draft is not None:
            from vllm.model_executor.model_loader.reload.inplace import reload_weights

            send_draft(self.llm, reload_weights, self.draft.tensors(model.config, model.dtype), check)
        self._is_checked = True
        self.sync_seconds += time.perf_counter() - started

    def allocate_cache(self) -> None:
        if not self._is_awake:
            self.llm.wake_up(tags=["kv_cache"])
            self._is_awake = True

    def hold(self, model: PreTrainedModel, tensors: Tensors | None = None) -> None:
        """Start or wake vLLM and send it `tensors` of `model`, by default its parameters."""
        self.wake(model)
        self.take(model.named_parameters() if tensors is None else tensors, model, keep=True)
        self.allocate_cache()

    def sleep(self) -> None:
        if self._flags.vllm_sleep and torch.cuda.is_available():
            self.llm.sleep(level=2)  # weights are dropped, not copied: the next rollout brings new ones
            self.updates, self._is_awake = None, False

    def figures(self) -> dict[str, float]:
        """Metrics since the last call."""
        seconds, self.sync_seconds = self.sync_seconds, 0.0
        figures = {"time/weights_to_vllm": seconds}
        if self.draft is not None and self.llm is not None:
            metrics = {metric.name: getattr(metric, "value", 0.0) for metric in self.llm.get_metrics()}
            figures |= self.draft.figures(metrics)
        return figures

    def forget_prompts(self) -> None:
        """Empty the caches of what was computed of prompts and of images, which vLLM keeps through new weights."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if self.experts is not None:
            self.experts.forget()

    def experts_of(self, name: str, part: Any) -> torch.Tensor | None:
        """Return the experts of a request that is over, int16 [T, L, K], where they are recorded. part: its output."""
        if not self.records_experts:
            return None
        return returned_experts(part) if self.experts is None else self.experts.take(name)

    def set_temperature(self, temperature: float) -> None:
        """The temperature goes into the model, before the log-probabilities that vLLM returns: its own are either
        before temperature and cuts ("raw_logprobs") or after both."""

        def scale(model: Any) -> None:
            from vllm.model_executor.layers.logits_processor import LogitsProcessor

            for module in model.modules():
                if isinstance(module, LogitsProcessor):
                    own = vars(module).setdefault("scale_of_the_model", module.scale)
                    module.scale = own * (1.0 / temperature if temperature else 1.0)

        self.llm.apply_model(scale)

    def _started(self, model: PreTrainedModel) -> Any:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        parallel = self._flags.vllm_tensor_parallel_size
        if ranks % parallel:
            raise ThreestepError(
                f"--vllm_tensor_parallel_size {parallel} does not divide the run's {ranks} ranks; change it or "
                "--num_ranks"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._folder = tempfile.TemporaryDirectory(prefix="threestep_vllm_")
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(self._folder.name)
        settings = _settings(self._flags, self._longest_tokens, model.dtype, ranks)
        settings |= start_settings(model, self._longest_tokens)
        if self.records_experts and torch.cuda.is_available():
            settings["enable_return_routed_experts"] = True
        elif self.records_experts:
            settings["enable_prefix_caching"] = False
        if self.draft is not None:
            settings["speculative_config"] = self.draft.described(Path(self._folder.name))
            settings["disable_log_stats"] = False  # they count what is accepted
            _mend_verification()
        try:
            from vllm import LLM

            llm = LLM(self._folder.name, **settings)
        except Exception as problem:
            raise ThreestepError(
                f"vLLM could not start with {type(model).__name__}: {one_line(problem)}; if memory is short, "
                "change --vllm_cache_gib or --vllm_memory_share; if vLLM does not support this architecture, use "
                "--rollout_engine hf"
            ) from problem
        # Collected or at the program's end, it would end every process group, the training's too (vllm 0.32,
        # EngineCore.shutdown).
        llm.llm_engine.engine_core._finalizer.detach()
        if self.records_experts and not torch.cuda.is_available():
            self.experts = ExpertCapture()
            llm.collective_rpc(self.experts.attach)
        gc.unfreeze()  # vLLM hides all objects of this process from the garbage collector
        return llm


def _mend_verification() -> None:
    """Put working functions in the place of two of vLLM's (0.32): see `expand_batch_to_tokens`; and its top-k without
    top-p fails where a step verifies no draft, as the first of a prompt."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def cut(logits: Any, top_k: Any, top_p: Any) -> Any:
        return apply_top_k_top_p(logits, top_k, top_p) if len(logits) else logits

    rejection_sampler.apply_top_k_top_p = cut
    if not torch.cuda.is_available():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _settings(flags: VllmArguments, longest_tokens: int, dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """The keyword arguments of vllm.LLM."""
    on_gpu = torch.cuda.is_available()
    # Chunked prompts and seeds exclude each other on a CPU: "CPU Generator does not use offset" (vllm 0.32).
    chunked = flags.vllm_chunked_prefill and on_gpu
    cache_gib = flags.vllm_cache_gib if on_gpu or flags.vllm_cache_gib else CPU_CACHE_GIB
    settings: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's
        "logprobs_mode": "raw_logprobs",
        "max_model_len": longest_tokens,
        "tensor_parallel_size": flags.vllm_tensor_parallel_size,
        "enable_prefix_caching": flags.vllm_prefix_caching,
        "enable_chunked_prefill": chunked,
        "enforce_eager": flags.vllm_eager or not on_gpu,
        "gpu_memory_utilization": flags.vllm_memory_share,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
    }
    if not chunked:
        settings["max_num_batched_tokens"] = max(8192, longest_tokens)
    if on_gpu:
        settings["enable_sleep_mode"] = flags.vllm_sleep
    else:
        settings["block_size"] = _CPU_BLOCK_TOKENS
    if ranks > 1:
        settings["distributed_executor_backend"] = "external_launcher"  # this process is one of the engine's
    return settings


@contextlib.contextmanager
def vllm_at_work() -> Iterator[None]:
    """Around vLLM's work: restore what it changes in the process, and turn its exceptions into ThreestepError."""
    # On a CPU vLLM also draws from torch's global generator, and discards those numbers if requests have seeds.
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"),
    ):
        try:
            yield
        except ThreestepError:
            raise
        except Exception as problem:
            raise ThreestepError(
                f"vLLM failed while generating responses: {one_line(problem)}; the last checkpoint is intact: "
                "resume with --resume, or use --rollout_engine hf"
            ) from problem


@contextlib.contextmanager
def _global_state_restored() -> Iterator[None]:
    """Around vLLM's import and start. It seeds every global generator and, on a CPU, disables setting the number of
    threads and preloads libraries into every program that is started later."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    preloaded = os.environ.get("LD_PRELOAD")
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about how vLLM inspects modules
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_threads
            os.environ.pop("LD_PRELOAD", None)
            if preloaded is not None:
                os.environ["LD_PRELOAD"] = preloaded


def one_line(problem: Exception) -> str:
    """The message of vLLM's exception on one line; of a pydantic list its first entry."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [""]
    line = lines[1] if "validation error" in lines[0] and len(lines) > 1 else lines[0]
    return f"{type(problem).__name__}: {line.rstrip('.')}"
