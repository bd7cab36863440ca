"""FlexAttention without a GPU: how often it is compiled over mixed layouts, and what block masks cost.

    python -m benchmarks.flex_attention

Compilations are counted over 40 layouts and two models, forward alone, and the outputs compared with the dense mask.
Block masks of 32,768 tokens: processor time on one thread (median of 5), and the growth of the peak resident size.
"""

from __future__ import annotations

import resource
import statistics
import time

import torch
from torch.nn import functional

from threestep.plugins.kernels.flex import FlexAttention, block_mask
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows

MODELS = ((4, 2, 16), (6, 2, 32))  # heads, heads of keys, head size


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    for name, documents in _long_layouts().items():
        _print_cost(name, packed_rows(documents, 0))
    _print_compilations()


def _print_cost(name: str, rows: TokenRows) -> None:
    block_mask(packed_rows([[_document(10), _document(20)]], 0))  # what the first call alone costs
    peak, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[float]()
    for _ in range(5):
        start = time.process_time()
        block_mask(rows)
        seconds.append(time.process_time() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(f"block mask, {name}: {1000 * statistics.median(seconds):.1f} ms, {grown:.0f} MB")


def _print_compilations() -> None:
    from torch._dynamo.utils import counters

    generator, attention, largest = torch.Generator().manual_seed(0), FlexAttention(), 0.0
    for index in range(40):
        documents = [[_random_document(generator) for _ in range(1 + index % 5)] for _ in range(1 + index % 4)]
        rows = packed_rows(documents, 0)
        for heads, shared, size in MODELS:
            largest = max(largest, _difference(attention, rows, heads, shared, size))
    count = counters["stats"]["unique_graphs"]
    print(f"40 layouts, two models: {count} compilations; largest difference from the dense mask {largest:.1e}")


def _difference(attention: FlexAttention, rows: TokenRows, heads: int, shared: int, size: int) -> float:
    """Run one forward by both, for random queries, keys and values."""
    mask, (count, width) = block_mask(rows), rows.input_ids_NT.shape
    length = mask.shape[-1]
    parts_1ALD = [torch.randn(1, number, length, size) for number in (heads, shared, shared)]
    parts_NATD = [
        part[0, :, : count * width].unflatten(1, (count, width)).transpose(0, 1).contiguous() for part in parts_1ALD
    ]
    flex = attention(torch.nn.Identity(), *parts_1ALD, mask, scaling=size**-0.5)[0][0, : count * width]
    dense = functional.scaled_dot_product_attention(*parts_NATD, attn_mask=_dense(rows), enable_gqa=True)
    return float((flex - dense.transpose(1, 2).flatten(0, 1)).abs().max())


def _dense(rows: TokenRows) -> torch.Tensor:
    """The dense mask, also of rows of one document, with padding apart."""
    mask_N1TT = rows.dense_mask()
    same_NTT = rows.segment_ids_NT.unsqueeze(1) == rows.segment_ids_NT.unsqueeze(2)
    return same_NTT.tril().unsqueeze(1) if mask_N1TT is None else mask_N1TT


def _sequence(tokens: int) -> TokenSequence:
    return TokenSequence(torch.ones(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool))


def _document(prompt: int, *responses: int) -> Document:
    return (
        shared_prompt(_sequence(prompt), [_sequence(tokens) for tokens in responses])
        if responses
        else plain(_sequence(prompt))
    )


def _random_document(generator: torch.Generator) -> Document:
    lengths = torch.randint(1, 60, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator)
    return _document(*lengths.tolist())


def _long_layouts() -> dict[str, list[list[Document]]]:
    return {
        "one row of 64 documents": [[_document(512) for _ in range(64)]],
        "one row, 128 prompts of 100 with two responses of 78": [[_document(100, 78, 78) for _ in range(128)]],
        "16 rows of 2,048, 8 documents each": [[_document(256) for _ in range(8)] for _ in range(16)],
        "one document": [[_document(32768)]],
        "one row, 1,024 documents of 32": [[_document(32) for _ in range(1024)]],
    }


if __name__ == "__main__":
    main()
