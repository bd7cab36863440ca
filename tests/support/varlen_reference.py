"""torch's `varlen_attn` in plain torch, sequence by sequence: its documented signature and meaning, in any precision.
torch's own has no kernel for a CPU."""

from __future__ import annotations

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: None = None,
    block_table: None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """query [tokens, heads, size], key and value [keys, heads that share, size]; cu_seq: int32, where each sequence
    begins, and the end. window_size (-1, 0) is causal, aligned at the bottom right; no other window stands here."""
    assert window_size in ((-1, -1), (-1, 0)) and return_aux is seqused_k is block_table is num_splits is None
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert enable_gqa or query.shape[1] == key.shape[1]
    bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert bounds_q[0] == bounds_k[0] == 0 and bounds_q[-1] == len(query) and bounds_k[-1] == len(key) == len(value)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    outputs = []
    for index in range(len(bounds_q) - 1):
        here_q, here_k = (slice(*bounds[index : index + 2]) for bounds in (bounds_q, bounds_k))
        queries, keys = here_q.stop - here_q.start, here_k.stop - here_k.start
        assert 0 < queries <= max_q and 0 < keys <= max_k
        scores = torch.einsum("qhd,khd->hqk", query[here_q], key[here_k]) * (scale or query.shape[-1] ** -0.5)
        if window_size == (-1, 0):
            seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
            scores = scores.masked_fill(~seen, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[here_k]))
    return torch.cat(outputs)
