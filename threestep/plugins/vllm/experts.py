"""The experts by which vLLM computes each token of a mixture of experts.

vLLM 0.32 returns them itself (`enable_return_routed_experts`) where its second model runner works, which needs Triton:
on GPUs. On a CPU they are read from its routers: every step runs the tokens of its requests one after the other, those
of each from the first that is not computed yet. Nothing may come from the prefix cache there, as what it holds is not
computed again.

T tokens of a request, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import UNKNOWN
from training.utils.contracts.rollout import DrawnExperts, Response, Rollout

if TYPE_CHECKING:
    from training.utils.contracts.drawing import DrawnTurn
    from training.utils.contracts.rollout_engine import RolloutRequest

_SUFFIX = 9  # of a request's name inside vLLM: "-" and 8 characters


class ExpertCapture:
    """The experts of the requests of a worker in this process and on a CPU."""

    def __init__(self, begin: str = "") -> None:
        """begin: of the names of the requests that are noted."""
        self._begin = begin
        self._of_layer: dict[int, torch.Tensor] = {}
        self._layers = 0
        self._of_name: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._taken: set[str] = set()  # of requests that may still be computed

    def attach(self, worker: Any) -> None:
        """Note what vLLM's worker computes from now on. ThreestepError where its experts cannot be read."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner = worker.model_runner
        found = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        if not found or not all(hasattr(module.router, "set_capture_fn") for module in found):
            raise ThreestepError(
                "--replay_routers needs to know which experts vLLM chooses, but for "
                f"{type(runner.get_model()).__name__}, vLLM chooses them inside a kernel; use --rollout_engine hf"
            )
        self._layers = runner.model_config.get_total_num_hidden_layers()
        for module in found:
            module.router.set_capture_fn(partial(self._of_layer.__setitem__, module.layer_id))
        runner.execute_model = partial(self._executed, runner, runner.execute_model)

    def _executed(self, runner: Any, execute: Any, scheduled: Any, *others: Any, **more: Any) -> Any:
        """Run a step of vLLM, and note the experts of its tokens."""
        self._of_layer.clear()
        result = execute(scheduled, *others, **more)
        if not self._of_layer:  # nothing was computed
            return result
        first = next(iter(self._of_layer.values()))
        experts_tLK = torch.full((len(first), self._layers, first.shape[1]), UNKNOWN, dtype=torch.int16)
        for layer, own_tK in self._of_layer.items():
            experts_tLK[:, layer] = own_tK.to(torch.int16)
        at, starts = 0, runner.input_batch.num_computed_tokens_cpu
        self._taken.intersection_update(name[:-_SUFFIX] for name in runner.input_batch.req_ids)
        for place, name in enumerate(runner.input_batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            if name.startswith(self._begin) and name[:-_SUFFIX] not in self._taken:
                own_tLK = experts_tLK[at : at + count]
                self._of_name.setdefault(name[:-_SUFFIX], []).append((int(starts[place]), own_tLK))
            at += count
        return result

    def take(self, name: str) -> torch.Tensor | None:
        """Return int16 [T, L, K] of a request that is over, and forget them; None of one that is not known."""
        self._taken.add(name)
        parts = self._of_name.pop(name, None)
        if parts is None:
            return None
        tokens = max(start + len(part) for start, part in parts)
        found_TLK = torch.full((tokens, *parts[0][1].shape[1:]), UNKNOWN, dtype=torch.int16)
        for start, part in parts:  # in the order in which they were computed
            found_TLK[start : start + len(part)] = part
        return found_TLK

    def forget(self) -> None:
        """Forget requests that nobody waits for."""
        self._of_name.clear()
        self._taken.clear()


def returned_experts(part: Any) -> torch.Tensor:
    """Return int16 [T, L, K] that vLLM returns itself. part: vllm.CompletionOutput of a request that is over."""
    if part.routed_experts is None:
        raise ThreestepError(
            "--replay_routers: vLLM returned no experts for a response, which happens when a --stop string ends it; "
            "remove --stop, or use --rollout_engine hf"
        )
    return torch.from_numpy(part.routed_experts.astype("int16"))


def repack_experts(model: Any) -> None:
    """Pack the weights of experts anew for the kernels of a CPU, which vLLM (0.32) does once, when it starts: new ones
    are written as they are over the packed ones, and read as packed (`UnquantizedFusedMoEMethod`)."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        kernel = getattr(module._quant_method, "moe_kernel", None) if isinstance(module, MoERunner) else None
        if kernel is None or not hasattr(kernel.fused_experts, "isa"):
            continue
        experts, width = kernel.fused_experts, kernel.fused_experts.moe_config.intermediate_size_per_partition
        if experts._padded_intermediate_size(experts.moe_config) != width:
            raise ThreestepError(
                f"on a CPU, vLLM pads experts of {width} units and cannot replace their weights; use "
                "--rollout_engine hf"
            )
        experts.process_weights_after_loading(module.routed_experts)


def rollout_of(request: RolloutRequest, drawn: Sequence[DrawnTurn], seconds: float) -> Rollout:
    """Return a rollout of turns that are whole responses, with their experts where they are recorded."""
    prompts = request.repeated()
    responses = [Response(each.ids, each.logprobs, each.ended) for each in drawn]
    rollout = Rollout.of_responses(prompts, responses, request.sampling.pad_token_id, seconds)
    known = [each.experts_TLK for each in drawn if each.experts_TLK is not None]
    if not known:
        return rollout
    assert len(known) == len(drawn), "an engine records all responses or none"
    return replace(rollout, experts=drawn_experts(known, prompts, rollout.response_lengths_B))


def drawn_experts(
    each_TLK: Sequence[torch.Tensor], prompts: tuple[torch.Tensor, torch.Tensor], lengths_B: torch.Tensor
) -> DrawnExperts:
    """Return the experts of sequences, each of its first T tokens, prompt and response; those behind are unknown.
    Samples of a prompt get the first one's experts for it: vLLM's may differ by rounding, and training computes it once
    for all. prompts: ids and mask of each."""
    ids_BP, mask_BP = (part.cpu() for part in prompts)
    of_prompt, of_response = list[torch.Tensor](), list[torch.Tensor]()
    first = dict[bytes, torch.Tensor]()
    for ids_P, mask_P, own_TLK, length in zip(ids_BP, mask_BP, each_TLK, lengths_B.tolist(), strict=True):
        count, known = int(mask_P.sum()), int(mask_P.sum()) + length - 1
        whole_TLK = torch.full((count + length, *own_TLK.shape[1:]), UNKNOWN, dtype=torch.int16)
        whole_TLK[:known] = own_TLK[:known].to(torch.int16)
        prompt_PLK = torch.full((len(mask_P), *own_TLK.shape[1:]), UNKNOWN, dtype=torch.int16)
        prompt_PLK[mask_P] = first.setdefault(ids_P[mask_P].numpy().tobytes(), whole_TLK[:count])
        of_prompt.append(prompt_PLK)
        of_response.append(whole_TLK[count:])
    response_BRLK = pad_sequence(of_response, batch_first=True, padding_value=UNKNOWN)
    return DrawnExperts(*(part.to(lengths_B.device) for part in (torch.stack(of_prompt), response_BRLK)))
