"""The work of a forward and a backward as numbers: matmuls by shape, attention, bytes of memory-bound operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Matmul(NamedTuple):
    """`batch` products of [rows, inner] by [inner, columns]."""

    batch: int
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.inner

    @property
    def elements(self) -> float:
        """The numbers of both factors and the product, each read or written once."""
        rows, columns, inner = self.rows, self.columns, self.inner
        return float(self.batch) * (rows * inner + inner * columns + rows * columns)


@dataclass(frozen=True)
class Work:
    """matmuls: how often each is done.
    attention_flops: of causal attention; what is masked does not count.
    moved_bytes: read and written by all other operators, each alone; fused_bytes: if a compiler fuses those between two
    matmuls.
    launches: operators that do something.
    apart_documents, apart_launches, apart_bytes, apart_flops: what there is besides where attention is computed
    document by document, as on a CPU (`models/document_attention`): further documents, tensors put together
    from those of documents, their bytes, and what is masked within its blocks.
    """

    matmuls: Counter[Matmul] = field(default_factory=Counter)
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    fused_bytes: float = 0.0
    launches: float = 0.0
    apart_documents: float = 0.0
    apart_launches: float = 0.0
    apart_bytes: float = 0.0
    apart_flops: float = 0.0

    @property
    def matmul_flops(self) -> float:
        return sum(matmul.flops * times for matmul, times in self.matmuls.items())

    def plus(self, other: Work, times: float = 1) -> Work:
        """This work and `times` the other."""
        matmuls = Counter(self.matmuls)
        for matmul, count in other.matmuls.items():
            matmuls[matmul] += count * times  # type: ignore[assignment]
        return Work(
            Counter({matmul: count for matmul, count in matmuls.items() if count}),
            self.attention_flops + times * other.attention_flops,
            self.moved_bytes + times * other.moved_bytes,
            self.fused_bytes + times * other.fused_bytes,
            self.launches + times * other.launches,
            self.apart_documents + times * other.apart_documents,
            self.apart_launches + times * other.apart_launches,
            self.apart_bytes + times * other.apart_bytes,
            self.apart_flops + times * other.apart_flops,
        )


class TrainingWork(NamedTuple):
    """The work of one micro-batch: the body's forward, its backward, the head's forward and backward."""

    forward: Work
    backward: Work
    head: Work
