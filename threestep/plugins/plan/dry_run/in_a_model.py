"""Operators on this CPU inside a model, where each finds caches that others have filled.

An operator alone in a loop, or a model so small that it computes nothing, runs from caches: between the products of a
layer the same launches take two to three times as long, and the longer the larger its tensors (docs/lab_book.md). So
the clock's rates of memory-bound operators, of attention, of launches and of products are read from the forward and
backward of a Llama, whose attention and parts are those of a run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from threestep.plugins.plan.clock.devices import HostCosts, Points
from threestep.plugins.plan.dry_run.operators import (
    ATTENTION,
    KINDS,
    MEMORY_BOUND,
    PRODUCT,
    VIEW,
    masked_pairs,
    operator_kind,
    training_work,
)
from training.utils.contracts.token_rows import AttentionRun
from training.utils.models.document_attention import use_document_attention
from training.utils.models.settings import ForwardForm, preparers_of

if TYPE_CHECKING:
    from transformers import LlamaModel

    from threestep.plugins.plan.clock.work import TrainingWork

_WIDTH, _HEADS, _LAYERS, _TOKENS = 256, 4, 4, 256
_LENGTHS = (64, _TOKENS, 768)  # in tokens; operators of 0.1 to 1.3 MB
_DOCUMENTS = 32  # of the same tokens: so many that their differences to one document stand out
_OF_A_LAYER = 7  # products: four of attention and three of its MLP
_LAYERS_OF_PRODUCTS = 2
_TRIES, _TRIES_OF_PRODUCTS = 5, 3
_LONG_SECONDS = 0.5  # of a pass, which one try measures well


def now() -> float:
    """Seconds of this process: of its processor on one thread, from which others on the machine take none; otherwise of
    the clock on the wall, since threads that wait take processor time too."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class KernelSeconds(TorchDispatchMode):
    """Seconds inside operators by their kind, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = now()
        result = func(*args, **(kwargs or {}))
        kind = operator_kind(func)
        self.seconds[kind] += now() - begun  # type: ignore[assignment]
        self.calls[kind] += 1
        return result


class InAModel(NamedTuple):
    """FLOP/s of causal attention, as the clock counts them; bytes a second of memory-bound operators by the bytes of
    one, forward and backward; launches."""

    attention_forward: float
    attention_backward: float
    memory: tuple[Points, Points]
    costs: HostCosts


class _Pass(NamedTuple):
    """A forward, or a backward. kernels, calls: by kind; launched: operators as the clock counts them; moved: bytes."""

    seconds: float
    kernels: Mapping[str, float]
    calls: Mapping[str, float]
    launched: float
    moved: float

    @property
    def host(self) -> float:
        """Seconds outside of operators."""
        return max(0.0, self.seconds - sum(part for kind, part in self.kernels.items() if kind != VIEW))

    def launch_seconds(self, each: float) -> float:
        """Seconds of the host for an operator; `each` that is memory-bound takes so many in itself."""
        return (self.host + each * self.calls[MEMORY_BOUND]) / self.launched

    def memory_rate(self, each: float) -> float:
        """Bytes a second of memory-bound operators, besides `each` one's own seconds."""
        return self.moved / max(1e-9, self.kernels[MEMORY_BOUND] - each * self.calls[MEMORY_BOUND])


def rates_in_a_model(dtype: torch.dtype) -> InAModel:
    """The rates of this CPU in a Llama in `dtype`. A memory-bound operator's own cost, whatever its bytes, is that of
    one with nothing to compute: eight wide, four tokens."""
    empty = _passes(_Llama(8, 2, 4, dtype))
    each = sum(one.kernels[MEMORY_BOUND] for one in empty) / sum(one.calls[MEMORY_BOUND] for one in empty)
    by_length = [_passes(_Llama(_WIDTH, _HEADS, tokens, dtype)) for tokens in _LENGTHS]
    whole = by_length[_LENGTHS.index(_TOKENS)]
    apart = _passes(_Llama(_WIDTH, _HEADS, _TOKENS, dtype, documents=_DOCUMENTS))
    ahead, behind = (_AttentionSeconds.of(*both) for both in zip(whole, apart, strict=True))
    forwards, backwards = zip(*by_length, strict=True)
    pairs = _HEADS * (_WIDTH // _HEADS) * _pairs(_TOKENS)
    return InAModel(
        4 * pairs / ahead.pairs,
        10 * pairs / behind.pairs,
        (_by_size(forwards, _Pass.memory_rate, each), _by_size(backwards, _Pass.memory_rate, each)),
        HostCosts(
            _by_size(forwards, _Pass.launch_seconds, each),
            _by_size(backwards, _Pass.launch_seconds, each),
            document=(ahead.document, behind.document),
        ),
    )


def _by_size(passes: Sequence[_Pass], value: Callable[[_Pass, float], float], each: float) -> Points:
    """A value of each pass by the bytes of an operator in it."""
    return tuple((one.moved / one.launched, value(one, each)) for one in passes)


def _pairs(tokens: int) -> float:
    """Pairs that a CPU's kernel computes of a causal document."""
    return tokens * (tokens + 1) / 2 + masked_pairs(tokens)


class _AttentionSeconds(NamedTuple):
    """Seconds of a layer's attention: of the pairs of a document of `_TOKENS`; of a further document besides its pairs,
    in the kernel and of the host."""

    pairs: float
    document: float

    @classmethod
    def of(cls, whole: _Pass, apart: _Pass) -> _AttentionSeconds:
        """From the passes of one document and of the same tokens in `_DOCUMENTS`. A kernel takes its own time a
        document, and the pairs'."""
        one, all_ = (part.kernels[ATTENTION] / _LAYERS for part in (whole, apart))
        left = _DOCUMENTS * _pairs(_TOKENS // _DOCUMENTS) / _pairs(_TOKENS)  # of the pairs, where cut
        own = max(0.0, (all_ - left * one) / (_DOCUMENTS - left))
        host = max(0.0, apart.host - whole.host) / _LAYERS / (_DOCUMENTS - 1)
        return cls(max(1e-9, one - own), own + host)


def product_rate(rows: int, width: int, dtype: torch.dtype) -> float:
    """FLOP/s of the products of layers as wide as tall, forward and backward together."""
    model = _Llama(width, max(1, width // 64), rows, dtype, layers=_LAYERS_OF_PRODUCTS, inner=width)
    begun = now()
    model.backward(model.forward())
    tries = [_inside(model) for _ in range(_TRIES_OF_PRODUCTS if now() - begun < _LONG_SECONDS else 1)]
    seconds = statistics.median(ahead.seconds[PRODUCT] + behind.seconds[PRODUCT] for ahead, behind in tries)
    return product_flops(rows, width) / max(1e-9, seconds)


def product_flops(rows: int, width: int) -> float:
    """FLOPs of the products that `product_rate` measures."""
    return 3 * _LAYERS_OF_PRODUCTS * _OF_A_LAYER * 2.0 * rows * width**2


class _Llama:
    """A Llama's body as runs have it, and a row of tokens. inner: width of its MLPs. documents: that the row is cut
    into."""

    def __init__(
        self,
        width: int,
        heads: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        layers: int = _LAYERS,
        inner: int = 0,
        documents: int = 1,
    ) -> None:
        from transformers import LlamaConfig

        shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner or 2 * width, "vocab_size": 16}
        self._config = LlamaConfig(
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, **shape
        )
        with torch.random.fork_rng():
            self._model = self._new().to(dtype)
        self._ids = torch.zeros(1, tokens, dtype=torch.int64)
        self._grads = torch.ones(1, tokens, width, dtype=dtype)
        runs = [AttentionRun(tokens // documents, (), False)] * documents
        unread = torch.zeros(1, 1, tokens, tokens, dtype=torch.bool)
        self._cut: dict[str, Any] = {"runs": runs, "attention_mask": unread}

    def forward(self) -> torch.Tensor:
        states: torch.Tensor = self._model(input_ids=self._ids, use_cache=False, **self._cut).last_hidden_state
        return states

    def backward(self, states: torch.Tensor) -> None:
        states.backward(self._grads)

    def counted(self) -> TrainingWork:
        with torch.device("meta"):
            on_meta = self._new().to(self._grads.dtype)
        return training_work(on_meta, 1, self._ids.shape[1], 1)

    def _new(self) -> LlamaModel:
        from transformers import LlamaModel

        model = LlamaModel(self._config)
        use_document_attention(model)
        for preparer in preparers_of():
            preparer.after_adapters(model, ForwardForm())
        return model


def _passes(model: _Llama) -> tuple[_Pass, _Pass]:
    """The forward and the backward: with clocks in operators and without, in turns."""
    begun = now()
    model.backward(model.forward())
    tries = [_try(model) for _ in range(_TRIES if now() - begun < _LONG_SECONDS else 1)]
    counted = model.counted()
    ahead, behind = (
        _Pass(
            statistics.median(one[place][0] for one in tries),
            _medians([one[place][1].seconds for one in tries]),
            _medians([one[place][1].calls for one in tries]),
            work.launches,
            work.moved_bytes,
        )
        for place, work in enumerate((counted.forward, counted.backward))
    )
    return ahead, behind


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: statistics.median(one[kind] for one in found) for kind in KINDS}


def _try(model: _Llama) -> tuple[tuple[float, KernelSeconds], tuple[float, KernelSeconds]]:
    """Seconds of a forward and of a backward, each with the operators' of another one."""
    begun = now()
    states = model.forward()
    between = now()
    model.backward(states)
    ended = now()
    ahead, behind = _inside(model)
    return (between - begun, ahead), (ended - between, behind)


def _inside(model: _Llama) -> tuple[KernelSeconds, KernelSeconds]:
    """Seconds in the operators of a forward and of its backward."""
    with KernelSeconds() as ahead:
        states = model.forward()
    with KernelSeconds() as behind:
        model.backward(states)
    return ahead, behind
