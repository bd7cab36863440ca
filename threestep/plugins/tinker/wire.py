"""Bodies of the Tinker API as records, and records as its answers: JSON, and protobuf by the client's own messages.

Numbers of a client are not trusted: each has its bounds, and a field that is not read is refused by its name, so that
nothing that was asked for is left out in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from threestep.plugins.tinker.losses import LOSSES
from threestep.plugins.tinker.records import (
    ATTENTION,
    HEAD,
    MLP,
    AdamOrder,
    ForwardOrder,
    ForwardResult,
    GivenMedia,
    LoadOrder,
    LoraSpec,
    Order,
    PromptReading,
    SampledPrompt,
    SampleOrder,
    SamplePrompt,
    SaveOrder,
    StopRule,
    TrainingDatum,
    WrongRequest,
)
from training.utils.base.errors import ThreestepError, first_line, nearest_names
from training.utils.base.storage import parse_json
from training.utils.data.formats.media import ONLY_TEXT

if TYPE_CHECKING:
    from threestep.plugins.tinker.store import StoredMessage
    from training.utils.contracts.media import SentMedia, SentMedium

FORWARD, STEP, SAVE, LOAD, SAVE_SAMPLER = "forward", "step", "save", "load", "save_sampler"
MOST_RANK, MOST_SAMPLES, MOST_TOP = 1024, 4096, 128
MOST_SPARSE = 1 << 24  # numbers in all sparse tensors of a request once they are dense: 64 MB of float32
_TARGETS, _TEXT = "target_tokens", "encoded_text"
_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4  # DType of the messages
_TYPES = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32, _BFLOAT16: np.uint16}
_Kind = TypeVar("_Kind", int, float, str, bool)


class RequestBounds(NamedTuple):
    """vocabulary: ids below it exist. positions: the longest row; None without a bound. media: reads those that are
    sent; None where the model reads text alone, for the reason `unread`."""

    vocabulary: int
    positions: int | None
    media: SentMedia | None = None
    unread: str = ONLY_TEXT


class Fields:
    """The fields of a JSON object, of which all have to be read."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, dict):
            raise WrongRequest(f"{where} must be an object, got {type(given).__name__}")
        self._given, self._where = {name: value for name, value in given.items() if value is not None}, where

    def has(self, name: str) -> bool:
        return name in self._given

    def skip(self, *names: str) -> None:
        """Leave fields unread that say nothing to this server."""
        for name in names:
            self._given.pop(name, None)

    def skip_off(self, *names: str) -> None:
        """Leave fields unread that are 0 or false."""
        self.skip(*(name for name in names if self._given.get(name) in (0, False)))

    def take(self, name: str, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
        """Return a field. WrongRequest for another kind, and for none where there is no default."""
        value = self._given.pop(name, default)
        if kind is float and type(value) is int:
            value = float(value)  # type: ignore[assignment]
        if type(value) is not kind or (kind is float and not math.isfinite(value)):  # type: ignore[arg-type]
            got = "nothing" if value is None else f"{value!r:.60}"
            raise WrongRequest(f"{self._where}: '{name}' expects {_KINDS[kind]}, got {got}")
        return value  # type: ignore[return-value]

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        """Return a number within bounds."""
        value = self.take(name, float, default)
        if not low <= value <= high:
            raise WrongRequest(f"{self._where}: '{name}' expects {_range(low, high)}, got {value:g}")
        return value

    def count(self, name: str, default: int | None, low: int, high: int) -> int:
        """Return a whole number within bounds."""
        value = self.take(name, int, default)
        if not low <= value <= high:
            raise WrongRequest(f"{self._where}: '{name}' expects {_range(low, high)}, got {value}")
        return value

    def raw(self, name: str) -> Any:
        """Return a field as it came; None without it."""
        return self._given.pop(name, None)

    def end(self) -> None:
        """WrongRequest if a field is left."""
        for name in self._given:
            raise WrongRequest(f"{self._where}: '{name:.60}' is not supported; leave it out")


_KINDS: dict[type, str] = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"


# --- creation


def lora_of(given: Any, new_seed: Callable[[], int]) -> LoraSpec:
    """Read `lora_config`."""
    fields = Fields(given, "lora_config")
    rank = fields.count("rank", None, 1, MOST_RANK)
    seed = fields.count("seed", None, -(2**63), 2**63 - 1) if fields.has("seed") else new_seed()
    switches = (("train_attn", ATTENTION), ("train_mlp", MLP), ("train_unembed", HEAD))
    parts = tuple(part for name, part in switches if fields.take(name, bool, True))
    fields.end()
    return LoraSpec(rank, seed, parts)


def check_optimizer(given: Any) -> None:
    """WrongRequest for another optimizer than AdamW."""
    kind = "adamw" if given is None else given.get("type") if isinstance(given, dict) else given
    if kind != "adamw":
        raise WrongRequest(f"optimizer_config must have type 'adamw', got {kind!r:.60}; this server supports no other")


# --- chunks


def read_chunks(chunks: Iterable[tuple[str, Any]], where: str, bounds: RequestBounds) -> tuple[np.ndarray, GivenMedia]:
    """Return the ids of an input, int64 [T], and its media. chunks: of each its kind, and the ids of a text or the
    fields of another. WrongRequest for what the model does not read."""
    parts, spans, sent, length = [np.zeros(0, np.int64)], list[Any](), list[bytes](), 0
    for place, (kind, held) in enumerate(chunks):
        if kind == _TEXT:
            ids = np.asarray(held).astype(np.int64)
            _check_ids(ids, where, bounds.vocabulary)
            if bounds.media is not None and (ids == bounds.media.placeholder_id).any():
                raise WrongRequest(
                    f"{where}: in this model, the token {bounds.media.placeholder_id} stands for "
                    f"{bounds.media.run.name}; send them as separate chunks"
                )
        else:
            medium = _medium(kind, held, f"{where}, chunk {place}", bounds)
            ids = np.asarray(medium.ids, np.int64)
            spans += [replace(span, begin=length + span.begin, key=len(sent)) for span in medium.media]
            sent.append(medium.data)
        parts.append(ids)
        length += len(ids)
    most = None if bounds.media is None else bounds.media.most
    if most is not None and len(sent) > most:
        raise WrongRequest(
            f"{where}: this model family reads at most {most} media per input, got {len(sent)}; send fewer"
        )
    return np.concatenate(parts), GivenMedia(tuple(spans), tuple(sent))


def _medium(kind: str, fields: Mapping[str, Any], where: str, bounds: RequestBounds) -> SentMedium:
    if bounds.media is None:
        raise WrongRequest(f"{where}: expected encoded_text, got {kind:.60}; {bounds.unread}")
    try:
        return bounds.media.read(kind, fields, where)
    except ThreestepError as problem:
        raise WrongRequest(str(problem)) from problem


# --- requests of training clients


def read_order(message: StoredMessage, bounds: RequestBounds) -> Order:
    """Read a request. `message.kind` is one of this module's."""
    if message.kind == FORWARD:
        return _forward_of(message.body, bounds)
    try:
        given = parse_json(message.body)
    except ValueError as problem:
        raise WrongRequest(f"{message.kind} expects JSON: {first_line(problem)}") from problem
    fields = Fields(given, message.kind)
    fields.skip("model_id", "seq_id", "type", "user_metadata", "ttl_seconds")
    order: Order = _READERS[message.kind](fields)
    fields.end()
    return order


def _step_of(fields: Fields) -> AdamOrder:
    adam = Fields(fields.raw("adam_params") or {}, "adam_params")
    default = AdamOrder()
    order = AdamOrder(
        adam.number("learning_rate", default.learning_rate, 0.0),
        adam.number("beta1", default.beta1, 0.0, 1.0 - 2**-53),
        adam.number("beta2", default.beta2, 0.0, 1.0 - 2**-53),
        adam.number("eps", default.eps, 0.0),
        adam.number("weight_decay", default.weight_decay, 0.0),
        adam.number("grad_clip_norm", default.grad_clip_norm, -math.inf),
    )
    adam.end()
    return order


def _save_of(fields: Fields) -> SaveOrder:
    return SaveOrder(fields.take("path", str), fields.take("overwrite", bool, False))


def _save_sampler_of(fields: Fields) -> SaveOrder:
    kind = fields.take("kind", str, "snapshot")
    if kind != "snapshot":
        raise WrongRequest(f"save_weights_for_sampler: 'kind' must be 'snapshot', got '{kind:.60}'")
    name = fields.take("path", str) if fields.has("path") else None
    number = fields.count("sampling_session_seq_id", None, 0, 10**9 - 1) if name is None else None
    return SaveOrder(name, for_sampling=True, session_number=number)


def _load_of(fields: Fields) -> LoadOrder:
    check_optimizer(fields.raw("optimizer_config"))
    return LoadOrder(fields.take("path", str), fields.take("optimizer", bool))


_READERS: dict[str, Callable[[Fields], Any]] = {
    STEP: _step_of,
    SAVE: _save_of,
    SAVE_SAMPLER: _save_sampler_of,
    LOAD: _load_of,
}


# --- protobuf


def messages() -> Any:
    """The client's protobuf messages. ThreestepError where it is not installed."""
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as problem:
        raise ThreestepError(
            "threestep serve training needs the tinker package for its protobuf messages, which is not installed; "
            "in the checkout, run pip install -e '.[tinker]'"
        ) from problem
    return tinker_public_pb2


def forward_message(body: bytes) -> Any:
    """Parse the body of forward_backward. WrongRequest for what is none."""
    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as problem:  # noqa: BLE001 - protobuf's DecodeError, which differs by its implementation
        raise WrongRequest("forward_backward needs a ForwardBackwardRequest in protobuf") from problem
    return message


def _forward_of(body: bytes, bounds: RequestBounds) -> ForwardOrder:
    message = forward_message(body)
    loss = LOSSES.get(message.loss_fn)
    if loss is None:
        raise WrongRequest(
            f"loss_fn must be one of {', '.join(LOSSES)}, got "
            f"'{message.loss_fn:.60}'{nearest_names(message.loss_fn, LOSSES)}; use forward_backward_custom for any "
            "other loss"
        )
    config = {name: value.number for name, value in message.loss_fn_config_v2.items() if value.HasField("number")}
    config = config or dict(message.loss_fn_config)
    for name in (*config, *message.loss_fn_config_v2):
        if name not in loss.config or not math.isfinite(config.get(name, math.nan)):
            takes = ", ".join(loss.config) or "no settings"
            raise WrongRequest(
                f"loss_fn_config of {message.loss_fn} accepts finite numbers for {takes}, got '{name:.60}'"
            )
    if not message.data:
        raise WrongRequest("data must have at least one datum, got none")
    tensors = [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]
    written_out = sum(math.prod(map(abs, each.shape)) for each in tensors if _is_sparse(each))
    if written_out > MOST_SPARSE:
        raise WrongRequest(
            f"data may have sparse tensors of at most {MOST_SPARSE:,} numbers in total when made dense, got "
            f"{written_out:,}; send less data per request"
        )
    data = [_datum(place, each, message.loss_fn, bounds) for place, each in enumerate(message.data)]
    return ForwardOrder(tuple(data), message.loss_fn, config, not message.forward_only)


def _datum(place: int, given: Any, loss_name: str, bounds: RequestBounds) -> TrainingDatum:
    where, loss = f"datum {place}", LOSSES[loss_name]
    chunks = (_held(chunk, where) for chunk in given.model_input)
    ids_T, media = read_chunks(chunks, f"{where}: model_input", bounds)
    if len(ids_T) == 0 or (bounds.positions is not None and len(ids_T) > bounds.positions):
        raise WrongRequest(f"{where}: model_input must have 1 to {bounds.positions or 'many'} tokens, got {len(ids_T)}")
    tensors = {name: _tensor(value, f"{where}: {name}") for name, value in given.loss_fn_inputs.items()}
    names = (_TARGETS, *loss.needs)
    if loss_name == "cross_entropy" and "weights" not in tensors and _TARGETS in tensors:
        tensors["weights"] = np.ones(tensors[_TARGETS].shape, np.float32)
    lacking = [name for name in names if name not in tensors]
    unknown = [name for name in tensors if name not in (*names, *loss.takes)]
    if lacking or unknown:
        raise WrongRequest(
            f"{where}: {loss_name} takes {', '.join((*names, *loss.takes))}; "
            + (f"'{lacking[0]}' is missing" if lacking else f"'{unknown[0]:.60}' is not supported")
        )
    targets = tensors.pop(_TARGETS)
    if targets.ndim not in (1, 2) or len(targets) != len(ids_T) or targets.dtype.kind != "i" or 0 in targets.shape:
        raise WrongRequest(
            f"{where}: target_tokens must be whole numbers of shape [{len(ids_T)}] or [{len(ids_T)}, K], as long "
            f"as model_input, got {list(targets.shape)}"
        )
    _check_ids(targets, f"{where}: target_tokens", bounds.vocabulary)
    for name, value in tensors.items():
        if value.shape != targets.shape:
            raise WrongRequest(
                f"{where}: {name} must have the shape of target_tokens, {list(targets.shape)}, got {list(value.shape)}"
            )
        if not np.isfinite(value).all():
            raise WrongRequest(f"{where}: {name} must be finite numbers, got some that are not")
    column = (len(ids_T), -1)
    inputs = {name: torch.from_numpy(value.astype(np.float32)).view(column) for name, value in tensors.items()}
    targets_TK = torch.from_numpy(targets.astype(np.int64)).view(column)
    return TrainingDatum(torch.from_numpy(ids_T), targets_TK, inputs, targets.ndim == 1, media)


def _held(chunk: Any, where: str) -> tuple[str, Any]:
    kind = chunk.WhichOneof("chunk")
    if kind == _TEXT:
        return kind, _from_bytes(chunk.encoded_text.tokens, np.int32, where)
    fields = () if kind is None else getattr(chunk, kind).ListFields()
    return str(kind), {field.name: value for field, value in fields}


def _check_ids(ids: np.ndarray, where: str, vocabulary: int) -> None:
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < vocabulary):
        strange = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise WrongRequest(f"{where} must be ids from 0 to {vocabulary - 1}, got {strange}")


def _from_bytes(data: bytes, kind: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(kind).itemsize:
        raise WrongRequest(f"{where} must be numbers of {np.dtype(kind).itemsize} bytes each, got {len(data)} bytes")
    return np.frombuffer(data, kind)


def _tensor(given: Any, where: str) -> np.ndarray:
    """Return a `Tensor`; a sparse one with 0 where nothing stands."""
    kind = _TYPES.get(given.dtype)
    if kind is None:
        raise WrongRequest(f"{where} must have dtype float32, int64, int32 or bfloat16, got {given.dtype}")
    is_sparse = _is_sparse(given)
    values = _from_bytes(given.sparse_csr.values if is_sparse else given.dense, kind, where)
    if given.dtype == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    shape = tuple(given.shape) or (len(values),)
    if len(shape) > 2 or min(shape) < 0:
        raise WrongRequest(f"{where} must have a shape of one or two sizes, got {list(shape)!s:.60}")
    if not is_sparse:
        if math.prod(shape) != len(values):
            raise WrongRequest(f"{where} expects {list(shape)} numbers, got {len(values)}")
        return values.reshape(shape)
    rows = _from_bytes(given.sparse_csr.crow_indices, np.int64, where)
    columns = _from_bytes(given.sparse_csr.col_indices, np.int64, where)
    counts = np.diff(rows)
    if (
        len(shape) != 2 or len(rows) != shape[0] + 1 or rows[0] != 0 or (counts < 0).any()
        or rows[-1] != len(values) or len(columns) != len(values)
        or (len(columns) and not (0 <= columns.min() and columns.max() < shape[1]))
        or 0 in shape
    ):  # fmt: skip
        raise WrongRequest(f"{where} must be a sparse matrix of shape {list(shape)}, but its indices do not form one")
    whole = np.zeros(shape, values.dtype)
    whole[np.repeat(np.arange(shape[0]), counts), columns] = values
    return whole


def _is_sparse(given: Any) -> bool:
    return bool(given.WhichOneof("encoding") == "sparse_csr")


def forward_answer(result: ForwardResult) -> bytes:
    """Return a forward's result as the client reads it."""
    answer = messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": result.loss})
    # A record is rectangular, so data with K targets of a position follow one another in runs of equal K.
    begin = 0
    while begin < len(result.logprobs):
        trailing = result.logprobs[begin].shape[1:]
        end = begin
        while end < len(result.logprobs) and result.logprobs[end].shape[1:] == trailing:
            end += 1
        parts = [each.float().contiguous().numpy() for each in result.logprobs[begin:end]]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - begin)
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(part.tobytes() for part in parts)
        tensor.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype(np.int64).tobytes()
        tensor.dtype = _FLOAT32
        tensor.trailing_shape.extend(trailing)
        begin = end
    found: bytes = answer.SerializeToString()
    return found


# --- sampling


def sample_of(fields: Fields, bounds: RequestBounds) -> SampleOrder:
    """Read `asample`, but for the fields that say of which weights."""
    prompt = Fields(fields.raw("prompt"), "prompt")
    ids, media = _prompt_chunks(prompt.raw("chunks"), bounds)
    params = Fields(fields.raw("sampling_params") or {}, "sampling_params")
    room = None if bounds.positions is None else bounds.positions - len(ids)
    most = params.count("max_tokens", None, 1, 2**31 - 1) if params.has("max_tokens") else None
    if room is not None and (room < 1 or (most is not None and most > room)):
        raise WrongRequest(
            f"the prompt has {len(ids)} tokens and the model {bounds.positions} positions, which leaves room for "
            f"{max(room, 0)} tokens, not {1 if most is None else most}; shorten the prompt, or lower max_tokens"
        )
    top_k = params.take("top_k", int, -1)
    seed = params.take("seed", int) if params.has("seed") else None
    order = SampleOrder(
        SamplePrompt(ids, media),
        fields.count("num_samples", 1, 1, MOST_SAMPLES),
        most if most is not None else room,
        params.number("temperature", 1.0, 0.0, 100.0),
        max(0, top_k),
        params.number("top_p", 1.0, 1e-6, 1.0),
        seed,
        _stop_of(params.raw("stop"), bounds),
        _reading_of(fields),
        fields.count("topk_sample_logprobs", 0, 0, MOST_TOP),
    )
    fields.skip_off("record_stability_info", "prompt_alt_tokens_k")
    fields.skip("type")
    for part in (params, prompt, fields):
        part.end()
    return order


def _prompt_chunks(chunks: Any, bounds: RequestBounds) -> tuple[tuple[int, ...], GivenMedia]:
    held, given = list[tuple[str, Any]](), list[Any](chunks if isinstance(chunks, list) else [None])
    for chunk in given:
        fields = Fields(chunk, "prompt: a chunk")
        kind = fields.take("type", str, _TEXT)
        if kind == _TEXT:
            tokens = fields.raw("tokens")
            if not isinstance(tokens, list) or not all(type(each) is int and abs(each) < 2**31 for each in tokens):
                raise WrongRequest("prompt must have encoded_text chunks with lists of token ids")
            held.append((kind, tokens))
        else:
            held.append((kind, {name: value for name, value in chunk.items() if name != "type" and value is not None}))
    ids, media = read_chunks(held, "prompt", bounds)
    if len(ids) == 0:
        raise WrongRequest("prompt must have at least one token, got none")
    return tuple(ids.tolist()), media


def _stop_of(given: Any, bounds: RequestBounds) -> StopRule:
    if given is None:
        return StopRule()
    entries = [given] if isinstance(given, str) else given
    if isinstance(entries, list) and all(isinstance(each, str) and each for each in entries):
        return StopRule((), tuple(entries))
    if isinstance(entries, list) and all(type(each) is int and 0 <= each < bounds.vocabulary for each in entries):
        return StopRule(tuple(entries))
    raise WrongRequest(f"stop must be texts or token ids, got {given!r:.60}")


def _reading_of(fields: Fields) -> PromptReading:
    has_logprobs = fields.take("prompt_logprobs", bool, False)
    top = fields.count("topk_prompt_logprobs", 0, 0, MOST_TOP)
    last = fields.count("prompt_logprobs_last_n", None, 1, 2**31) if fields.has("prompt_logprobs_last_n") else None
    return PromptReading(has_logprobs, last, top)


def sample_answer(sampled: SampledPrompt, order: SampleOrder) -> bytes:
    """Return sequences as the client reads them."""
    answer = messages().SampleResponse()
    for sequence in sampled.sequences:
        own = answer.sequences.add(stop_reason=0 if sequence.stop else 1)
        own.tokens = np.asarray(sequence.tokens, np.int32).tobytes()
        own.logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        if order.top_sample:
            _write_top(own.topk_sampled_logprobs, sequence.top, order.top_sample)
    if sampled.prompt_logprobs is not None:
        answer.prompt_logprobs = np.asarray(sampled.prompt_logprobs, np.float32).tobytes()
    if sampled.prompt_top is not None:
        _write_top(answer.topk_prompt_logprobs, sampled.prompt_top, order.read.top)
    found: bytes = answer.SerializeToString()
    return found


_EMPTY = (0, -99999.0)  # of the client's matrices


def _write_top(matrix: Any, rows: Sequence[Sequence[tuple[int, float]]], count: int) -> None:
    cells = [[*row, *[_EMPTY] * (count - len(row))][:count] for row in rows]
    matrix.k, matrix.length = count, len(rows)
    matrix.token_ids = np.asarray([[token for token, _ in row] for row in cells], np.int32).tobytes()
    matrix.logprobs = np.asarray([[logprob for _, logprob in row] for row in cells], np.float32).tobytes()
