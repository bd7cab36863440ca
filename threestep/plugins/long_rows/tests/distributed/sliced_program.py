"""Launched on two or four ranks: models in float64 on slices of rows and on whole rows, and what differs.

Report: {case: {"read", "gradient"}}, the largest difference of what a model returns, and of its gradient summed over
the group's ranks as a share of the largest; of cases named `broken_...`, whose backward is wrong on purpose, too.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

HEADS, SIZE, VOCAB = 12, 4, 29
# Windows in all layers, and in some; keys of other layers; caps; latent keys; sinks.
FAMILIES = ("mistral", "gemma3_text", "gemma3n_text", "gemma2", "deepseek_v2", "deepseek_v3", "gpt_oss")


def main() -> None:
    import torch
    import torch.distributed as dist

    from tests.distributed.launch import report
    from threestep.plugins.long_rows import exchange
    from threestep.plugins.long_rows.sharing import SharedRows

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[str, float]] = {}
    try:
        for size in {2, ranks}:
            group = SharedRows(size).joined(rank, ranks)
            for attention in ("sdpa", "sdpa_by_document"):
                for key_heads in (12, 3, 1):
                    model = model_of(key_heads, attention)
                    for form, rows in forms().items():
                        found[f"P{size}_{attention}_{key_heads}_{form}"] = compared(model, rows, group)
            model, rows = model_of(3, "sdpa_by_document"), forms()["packed"]
            model.gradient_checkpointing_enable()
            model.train()
            found[f"P{size}_recomputed"] = compared(model, rows, group)
            found[f"P{size}_scores"] = compared(model_of(3, "sdpa_by_document", scalar=True), rows, group)
            for attention in ("sdpa", "sdpa_by_document"):
                for joint in (False, True):
                    found[f"P{size}_{attention}_head_{joint}"] = with_head(attention, joint, group)
            for family in FAMILIES if ranks == 4 else FAMILIES[:1]:
                for form in ("packed", "padded"):
                    found[f"P{size}_{family}_{form}"] = compared(model_of_family(family), forms()[form], group)
            if size == ranks:  # a step's load is of all ranks
                found[f"P{size}_routers"] = with_routers(group)
        for name in ("_Exchange", "_Sum"):
            with broken(getattr(exchange, name)):
                found[f"broken{name}"] = compared(model_of(3, "sdpa_by_document"), rows, group)
        with broken(exchange._Bring):
            found["broken_Bring"] = with_head("sdpa", True, group)
    finally:
        report(found)
        dist.barrier()
        dist.destroy_process_group()


def broken(function: Any) -> Any:
    """Inside, a collective passes its gradient on as no other rank would: the exchange its own parts, the sum twice,
    what is brought to other ranks without theirs."""

    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        return (2 * grad if function.__name__ == "_Sum" else grad), None

    return mock.patch.object(function, "backward", staticmethod(backward))


def model_of(key_heads: int, attention: str, scalar: bool = False) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from training.utils.models.document_attention import use_document_attention

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HEADS * SIZE, intermediate_size=20, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=HEADS, num_key_value_heads=key_heads, max_position_embeddings=64, num_labels=1,
        attn_implementation="sdpa", initializer_range=0.3,
    )  # fmt: skip
    model = (LlamaForSequenceClassification if scalar else LlamaForCausalLM)(config).double().eval()
    if attention != "sdpa":
        use_document_attention(model)
    return model


def model_of_family(family: str) -> Any:
    """A tiny model of random weights, of which the norms of some families, and the experts of others, compute in
    float32. Windows are of eight tokens: shorter than the rows."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask

    from tests.families.builds import draw_weights
    from tests.families.configs import tiny_config

    AttentionInterface.register("sinks", attention_with_sinks)
    AttentionMaskInterface.register("sinks", sdpa_mask)
    implementation, dtype = ("sinks", torch.float32) if family == "gpt_oss" else ("sdpa", torch.float64)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").to(dtype).eval()
    model.set_attn_implementation(implementation)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others compute in no float64
    draw_weights(model, seed=2)
    return model


def attention_with_sinks(
    module: Any, query_NATD: Any, key_NKTD: Any, value_NKTD: Any, attention_mask: Any, **others: Any
) -> Any:
    """A head's sink takes a share of its weights (gpt-oss), as kernels get it: s_aux, a number for each head."""
    import torch

    groups = query_NATD.shape[1] // key_NKTD.shape[1]
    key_NATD, value_NATD = (part.repeat_interleave(groups, dim=1) for part in (key_NKTD, value_NKTD))
    scores_NATT = query_NATD @ key_NATD.transpose(2, 3) * others["scaling"]
    tokens = scores_NATT.shape[-1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() if attention_mask is None else attention_mask
    sinks_NAT1 = others["s_aux"].view(1, -1, 1, 1).expand(*scores_NATT.shape[:-1], 1)
    scores_NATT = torch.cat([scores_NATT.masked_fill(~seen, -1e9), sinks_NAT1], dim=-1)
    return (scores_NATT.softmax(-1)[..., :-1] @ value_NATD).transpose(1, 2), None


def with_head(attention: str, joint: bool, group: Any) -> dict[str, float]:
    """Differences of a head for multi-token prediction, of two depths; joint: trained with the model by one loss."""
    from functools import partial

    import torch

    from threestep.plugins.mtp.head import new_head
    from threestep.plugins.mtp.layout.entries import mtp_entries
    from threestep.plugins.mtp.reading import INSIDE, read_ahead, read_depths, read_states
    from training.utils.models.document_attention import use_document_attention
    from training.utils.models.token_model import PolicyModel

    model = model_of(3, attention)
    head = new_head(model, 2, seed=5).double()
    for module in head.depths if attention != "sdpa" else ():
        use_document_attention(module.trunk)
    rows = forms()["packed"]
    entries = mtp_entries(rows, 2)

    def read(shared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own, beside = copy.deepcopy(model), copy.deepcopy(head)
        policy = PolicyModel(own, beside={INSIDE: beside} if joint else None, **shared)
        if joint:
            depths = policy(rows, after_trunk=partial(read_ahead, entries=entries)).beside
        else:
            states = policy(rows, after_trunk=read_states).beside
            depths = read_depths(
                beside(*states[:2], entries, states.part), entries, states.part, policy.target_head.read_alone
            )
        numbers = torch.cat([each.logprobs_M for each in depths])
        loss_of(torch.stack([numbers, numbers])).backward()
        return numbers.detach(), gradient_of([*own.parameters(), *beside.parameters()])

    return difference(read({}), read({"sharing": group}), group)


def with_routers(group: Any) -> dict[str, float]:
    """Differences of a mixture of experts, most of which are given, with its balancing loss; of the load and of where
    the router chose others, too."""
    from dataclasses import replace

    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    from threestep.plugins.routers.replay import RouterReplay, check_replay, open_replay
    from threestep.plugins.routers.routers import Balance, RouterRecord
    from threestep.plugins.routers.step_loss import RouterLoss, StepRouterLoss
    from training.utils.models.token_model import PolicyModel

    torch.manual_seed(6)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=HEADS * SIZE, intermediate_size=12, num_hidden_layers=2, num_key_value_heads=3,
        num_attention_heads=HEADS, num_local_experts=5, num_experts_per_tok=2, pad_token_id=0, initializer_range=0.3,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = MixtralForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")
    open_replay(model, "follow")
    rows = forms()["packed"]
    random = torch.Generator().manual_seed(7)
    experts_NTLK = torch.rand((*rows.input_ids_NT.shape, 2, 5), generator=random).topk(2).indices.to(torch.int16)
    experts_NTLK[:, 3:6] = -1
    given = replace(rows, slots=replace(rows.slots, experts_NTLK=experts_NTLK))

    # Every rank reads all rows.
    alone = mock.patch("threestep.plugins.routers.step_loss._of_all_ranks", lambda own: own)

    def read(shared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own: Any = copy.deepcopy(model)
        policy, replay = PolicyModel(own, **shared), RouterReplay(own, follows=True)
        check_replay(replay, lambda read: policy(read).logprobs_M, rows, 1e-9)
        routers = RouterLoss(None, Balance(0.5, 2, ""), RouterRecord(own))  # type: ignore[arg-type]
        found = policy(given).logprobs_M
        step = StepRouterLoss(routers, None)
        with contextlib.nullcontext() if shared else alone:
            part = step.loss_part(rows)
        (loss_of(torch.stack([found, found])) + part).backward()
        figures = torch.tensor(list(step.end("train").values()))
        differs_L = replay.differing()
        assert differs_L is not None and 0 < differs_L.sum() < differs_L.numel()
        return torch.cat([found.detach(), figures, differs_L]), gradient_of(own.parameters())

    return difference(read({}), read({"sharing": group}), group)


def forms() -> dict[str, Any]:
    """Rows of 23 tokens, which no P here divides: packed, with three responses of a prompt, or with paths side by side;
    padded; and one whose targets are all in its last slice."""
    import torch

    from threestep.plugins.parallel_thinking.layout import ParallelTags, parallel_document
    from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
    from training.utils.layout.rows import packed_rows

    random = torch.Generator().manual_seed(4)

    def part(tokens: int, targets: int) -> TokenSequence:
        ids = torch.randint(1, VOCAB, (tokens,), generator=random)
        return TokenSequence(ids, torch.arange(tokens) >= tokens - targets)

    tags = ParallelTags(3, 4, 5, 6)
    ids = [10, 11, 3, 4, 12, 13, 14, 5, 4, 15, 16, 5, 6, 17, 18, 19]
    blocks = TokenSequence(torch.tensor(ids), torch.arange(len(ids)) > 1)
    shared = shared_prompt(part(5, 0), [part(4, 4), part(3, 3), part(2, 2)])
    return {
        "packed": packed_rows([[shared, plain(part(9, 6))], [plain(part(20, 12))]], 0, with_before=True),
        "padded": packed_rows([[plain(part(23, 9))], [plain(part(7, 5))]], 0),
        "paths": packed_rows([[parallel_document(blocks, tags), plain(part(7, 4))]], 0),
        "late": packed_rows([[plain(part(23, 2))]], 0),
    }


def compared(model: Any, rows: Any, group: Any) -> dict[str, float]:
    """Differences between the model on whole rows and on slices of them."""
    import torch

    from training.utils.models.token_model import PolicyModel, Readout, ScalarModel

    def read(shared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = copy.deepcopy(model)
        if hasattr(own, "score"):
            numbers = ScalarModel(own, **shared)(rows).double()
            numbers = torch.stack([numbers, numbers])
        else:
            found = PolicyModel(own, **shared)(rows, Readout(entropies=True))
            numbers = torch.stack([found.logprobs_M, found.log_normalizers_M, found.entropies_M])
        loss_of(numbers).backward()
        return numbers.detach(), gradient_of(own.parameters())

    return difference(read({}), read({"sharing": group}), group)


def gradient_of(weights: Any) -> Any:
    import torch

    return torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])


def difference(one: Any, sliced: Any, group: Any) -> dict[str, float]:
    """one, sliced: numbers and gradient of whole rows and of a rank's slices."""
    import torch.distributed as dist

    (whole, wanted), (parts, gradient) = one, sliced
    dist.all_reduce(gradient, group=group.group)
    return {
        "read": float((whole - parts).abs().max()),
        "gradient": float((wanted - gradient).abs().max() / wanted.abs().max()),
    }


def loss_of(numbers: Any) -> Any:
    """Not linear in a target: the gradient of one depends on all."""
    return (numbers[0].sum() / 10).square() + (numbers[1:] * numbers[:1]).sum() / 10


if __name__ == "__main__":
    main()
