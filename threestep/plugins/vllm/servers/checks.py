"""Checks of a server before it draws: one sentence on the first thing that is not what the run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.groups import End
from threestep.plugins.vllm.servers.protocol import PROTOCOL

VLLM_VERSION = "0.32"
_COMPARED_TOKENS = 64
# Fields of a configuration on which no forward depends.
_FREE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "initializer_range")
_FREE_ENDS = ("token_id", "dropout", "_pdrop", "_init")
_FREE_STARTS = ("output_", "return_", "chunk_size_", "summary_")
_START = "start it with scripts/serve.sh"


@dataclass(frozen=True)
class WantedServer:
    """config: of the model, as a dictionary. dtype: torch's name. longest_tokens: of a prompt with its response.
    decode: of the tokenizer; None leaves it out of the comparison. experts: it is to record those of each token."""

    architecture: str
    config: Mapping[str, Any]
    dtype: str
    longest_tokens: int
    decode: Callable[[Sequence[int]], str] | None
    experts: bool = False


def prepared_workers(client: ServerClient, wanted: WantedServer, seconds: float) -> list[End]:
    """Make a server ready to draw; return what its workers are. ServerFailure if it is not the one wanted, with a
    sentence."""
    found, *others = _abilities(client, wanted, seconds)
    reason = why_not(found, wanted)
    if reason is None and found.get("tokenizer") and wanted.decode is not None:
        reason = _why_not_tokenizer(client, wanted, seconds)
    if reason is not None:
        raise ServerFailure(reason)
    return [End(**each["end"]) for each in (found, *others)]


def why_not(found: Mapping[str, Any], wanted: WantedServer) -> str | None:
    """Return why what a server says of itself does not fit; None if it does."""
    if found.get("protocol") != PROTOCOL:
        return f"it runs another version of Threestep (protocol {found.get('protocol')}, training has {PROTOCOL})"
    version = str(found.get("vllm"))
    if version != VLLM_VERSION and not version.startswith(f"{VLLM_VERSION}."):
        return f"it runs vLLM {version}, but this version of Threestep supports {VLLM_VERSION}"
    if not found.get("tempers"):
        return (
            f"this version of Threestep does not support its sampler; {_START}, which sets VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if wanted.architecture not in found.get("architectures", ()):
        return f"it serves {'/'.join(found.get('architectures', ()))}, but the run trains {wanted.architecture}"
    other = _other_fields(found.get("config", {}), wanted.config)
    if other:
        return f"it serves another model: {', '.join(other)}"
    if found.get("dtype") != wanted.dtype:
        return (
            f"it computes in {found.get('dtype')}; start it with --dtype {wanted.dtype}, as the run trains in that "
            "precision"
        )
    if int(found.get("longest_tokens", 0)) < wanted.longest_tokens:
        return (
            f"it accepts {found.get('longest_tokens')} tokens, but a prompt with its response may have "
            f"{wanted.longest_tokens}; start it with --max-model-len {wanted.longest_tokens}"
        )
    if wanted.experts and found.get("no_experts") is not None:
        return f"--replay_routers needs the experts of each token: {found['no_experts']}; use --rollout_engine vllm"
    return None


def _abilities(client: ServerClient, wanted: WantedServer, seconds: float) -> list[Mapping[str, Any]]:
    """Return what each worker says of itself."""
    words = {"records_experts": True} if wanted.experts else {}
    try:
        answer = client.post("/collective_rpc", {"method": "threestep_prepare", "kwargs": words}, seconds)
    except ServerFailure as problem:
        if problem.is_passing or "key" in str(problem) or "within" in str(problem):
            raise
        raise ServerFailure(f"it was not started for training ({problem}); {_START}") from problem
    results = answer.get("results") if isinstance(answer, dict) else None
    if not (isinstance(results, list) and results and all(isinstance(each, dict) for each in results)):
        raise ServerFailure(f"it does not report what it serves; {_START}")
    return results


def _other_fields(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Describe the fields that differ, the first three."""
    found = [
        f"{name} {theirs[name]} there, {own[name]} here"
        for name in sorted(own)
        if name in theirs and _is_compared(name, own[name]) and theirs[name] != own[name]
    ]
    return found[:3]


def _is_compared(name: str, value: Any) -> bool:
    is_free = name in _FREE or name.endswith(_FREE_ENDS) or name.startswith(_FREE_STARTS)
    return isinstance(value, (bool, int, float, str)) and not is_free


def _why_not_tokenizer(client: ServerClient, wanted: WantedServer, seconds: float) -> str | None:
    assert wanted.decode is not None
    vocabulary = int(wanted.config.get("vocab_size", 0))
    ids = list(range(0, vocabulary, max(vocabulary // _COMPARED_TOKENS, 1)))
    answer = client.post("/detokenize", {"tokens": ids}, seconds)
    theirs, own = (answer or {}).get("prompt"), wanted.decode(ids)
    if theirs == own:
        return None
    return f"it has another tokenizer: it decodes {len(ids)} tokens as {str(theirs)[:40]!r}, training as {own[:40]!r}"
