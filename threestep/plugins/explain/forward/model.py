"""The model of a record, and its derivatives along directions of its weights, by forward-mode differentiation.

The forward is transformers' own, on the record's weights, one sequence in a row with padding on the right, which causal
attention does not see. Baydin et al. 2018, section 3.1: a product with the Jacobian costs a forward, or two. Several
directions share the forward itself (`moving`).

B sequences of a batch, S sequences, T their tokens with padding, V vocabulary, D directions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.func import functional_call, jvp
from torch.overrides import TorchFunctionMode

from threestep.plugins.audit.quantities.models import sequences_of
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.explain.forward.moving import Move, moves_of, moving
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import is_out_of_memory
from training.utils.models.families import processor_files
from training.utils.setup.media import has_media_kind, media_kind

if TYPE_CHECKING:
    from training.utils.contracts.media import RecordedMedia

_Batch = tuple[Sequence[int], Mapping[str, Sequence[torch.Tensor]]]  # the places of sequences; what is read of each
Whole = Mapping[str, np.ndarray]  # a number for each weight, by the record's names
Direction = Mapping[str, np.ndarray | float]  # of weights by the record's names; a number: that multiple of the weight
_BATCH_LOGITS = 8_000_000  # in float64: 64 MB, as much for the derivative, and several times that in between
_BATCH_TOKENS, _PADDED_TOKENS = 2048, 512  # a batch of more tokens than the second ends where padding exceeds a tenth


@dataclass(frozen=True)
class Reads:
    """The numbers that a model gives each token, one sequence after the other; of a first token 0.

    logprobs_T, normalizers_T (log Z), entropies_T: nats. scores_S: of a reward model; the others are then None.
    """

    logprobs_T: np.ndarray | None = None
    normalizers_T: np.ndarray | None = None
    entropies_T: np.ndarray | None = None
    scores_S: np.ndarray | None = None


class IdsWithMedia(np.ndarray):
    """Token ids [T] of a sequence with images."""

    media: RecordedMedia


def read_sequences(step: AuditedStep) -> list[np.ndarray]:
    """Return the token ids of each sequence, with its images. LackingError for one whose images are not on record."""
    found, first = sequences_of(step), 0
    for rank in step.by_rank:
        for sequence, media in (media_kind().recorded(rank) if "media_begins" in rank else {}).items():
            ids = found[first + sequence].view(IdsWithMedia)
            ids.media = media
            found[first + sequence] = ids
        first += len(rank["lengths"])
    named = (step.head.model.get(name) for name in ("image_token_id", "image_token_index"))
    places = [int(place) for place in named if place is not None]
    if places and any(not isinstance(ids, IdsWithMedia) and np.isin(ids, places).any() for ids in found):
        raise LackingError("the images of its rows")
    return found


def media_scale(folders: Iterable[Path]) -> Any:
    """Return the scale of what the first of these models with files of a processor reads; None without one."""
    with_files = (folder for folder in folders if has_media_kind() and folder.is_dir() and processor_files(folder))
    return next(filter(None, (media_kind().scale_of(folder) for folder in with_files)), None)


def shown_media(step: AuditedStep, scale: Any) -> list[list[str]]:
    """Return, of each sequence, its images as addresses of pictures on a page; nothing where no sequence has any."""
    if not any("media_begins" in rank for rank in step.by_rank):
        return []
    config = _configuration(step.head.model)
    return [ids.media.shown(config, scale) if isinstance(ids, IdsWithMedia) else [] for ids in read_sequences(step)]


class RecordedModel:
    """weights: by the record's names. config: of the record. temperature: that divides the logits. scores: it is a
    reward model. dtype: of all its numbers. ThreestepError for a model that the record does not hold whole."""

    def __init__(
        self,
        weights: Whole,
        config: Mapping[str, Any],
        *,
        temperature: float = 1.0,
        scores: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.temperature, self._scores, self._dtype = temperature, scores, dtype
        self._lora_scale = config.get("lora_scale")
        self._weights = {name: torch.tensor(values, dtype=dtype) for name, values in weights.items()}
        _check_layers(config, len(weights))
        module = _module(config, scores)
        self._prefix = _prefix(module, weights)
        given = self._effective(self._weights)
        missing = [
            name for name, own in module.named_parameters() if name not in given or given[name].shape != own.shape
        ]
        self.module = module.to(dtype)  # of sizes that the record has, too
        if missing or (scores and self._head() is None):
            raise ThreestepError(
                f"the record of a {config.get('model_type')} model lacks {(missing or ['score'])[0]} in the expected "
                "shape: it was not written with all values, or the model has extra parts"
            )

    def read(self, sequences: Sequence[np.ndarray]) -> Reads:
        """Return what it says of token ids [T] of each sequence."""
        with torch.no_grad():
            return _joined([(index, self._read(self._weights, ids)) for index, ids in self._batches(sequences)])

    def along(self, sequences: Sequence[np.ndarray], direction: Whole) -> Reads:
        """Return the derivatives of `read` as the weights move along a direction; weights that it lacks stand still."""
        return self.along_all(sequences, [direction])[1][0]

    def along_all(self, sequences: Sequence[np.ndarray], directions: Sequence[Direction]) -> tuple[Reads, list[Reads]]:
        """Return `read`, and its derivatives along each direction. All have the same weights."""
        moves = {
            name: [self._move(each[name]) for each in directions] for name in directions[0] if name in self._weights
        }
        read, found = list[_Batch](), [list[_Batch]() for _ in directions]
        with torch.no_grad():
            for index, ids in self._batches(sequences):
                output, tangents = self._outputs_along(ids, moves)
                read.append((index, self._of_output(output, ids)))
                for own, tangent in zip(found, tangents, strict=True):
                    own.append((index, self._of_output(output, ids, tangent)))
        return _joined(read), [_joined(own) for own in found]

    def _move(self, move: np.ndarray | float) -> Move:
        return (move or None) if isinstance(move, float) else torch.from_numpy(move).to(self._dtype)

    def with_weights(self, weights: Whole) -> RecordedModel:
        """Return the same model of other weights."""
        found = copy(self)
        found._weights = {name: torch.tensor(values, dtype=self._dtype) for name, values in weights.items()}
        return found

    def gradient(self, sequences: Sequence[np.ndarray], slopes: Reads) -> dict[str, np.ndarray]:
        """Return the derivative by every weight of what `read` returns, each number times its slope, summed."""
        leaves = {name: value.clone().requires_grad_(True) for name, value in self._weights.items()}
        sums = {name: torch.zeros_like(value) for name, value in leaves.items()}
        given = _split(slopes, sequences)
        for index, ids in self._batches(sequences):
            parts = self._read(leaves, ids)
            whole = sum(
                (part * torch.tensor(given[name][place])).sum()
                for name, rows in parts.items()
                if name in given
                for place, part in zip(index, rows, strict=True)
            )
            if isinstance(whole, int):
                continue
            for name, value in zip(
                leaves, torch.autograd.grad(whole, [*leaves.values()], allow_unused=True), strict=True
            ):
                if value is not None:
                    sums[name] += value
        return {name: value.numpy() for name, value in sums.items()}

    # --- one batch

    def _batches(self, sequences: Sequence[np.ndarray]) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Sequences of like lengths together."""
        config: Any = self.module.config
        vocabulary = int(config.get_text_config().vocab_size)
        for ids in sequences:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise ThreestepError(f"token IDs must be from 0 to {vocabulary - 1:,}, got {ids.min()} to {ids.max()}")
        vocabulary = 1 if self._scores else vocabulary
        most = max(1, min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary))
        index: list[int] = []
        for place in sorted(range(len(sequences)), key=lambda place: len(sequences[place])):
            if not len(sequences[place]):
                continue
            if isinstance(sequences[place], IdsWithMedia):
                yield [place], [sequences[place]]
                continue
            whole = (len(index) + 1) * len(sequences[place])
            real = sum(len(sequences[each]) for each in (*index, place))
            if index and (whole > most or (whole > _PADDED_TOKENS and whole > 1.1 * real)):
                yield index, [sequences[each] for each in index]
                index = []
            index.append(place)
        if index:
            yield index, [sequences[each] for each in index]

    def _read(self, weights: Mapping[str, torch.Tensor], ids: Sequence[np.ndarray]) -> dict[str, list[torch.Tensor]]:
        """Return, by the names of `Reads`, a tensor for each sequence."""
        return self._of_output(self._output(weights, ids), ids)

    def _output(self, weights: Mapping[str, torch.Tensor], ids: Sequence[np.ndarray]) -> torch.Tensor:
        """Return logits over the temperature, [B, T - 1, V], or scores [B]."""
        last = 0 if self._scores else 1  # of a text nothing is read at its last token
        given, rows = self._effective(weights), _padded(ids)[:, : max(1, max(map(len, ids)) - last)]
        with InDouble() if self._dtype == torch.float64 else nullcontext():
            kwargs = {"use_cache": False, "return_dict": True, **self._beside(ids, rows.shape[1])}
            found = functional_call(self.module, given, (rows,), kwargs)
        if not self._scores:
            return found.logits[:, : max(map(len, ids)) - 1] / self.temperature
        head = self._head()
        assert head is not None
        last_BC = torch.stack([found.last_hidden_state[row, len(own) - 1] for row, own in enumerate(ids)])
        return (last_BC @ weights[head].T).squeeze(1)

    def _beside(self, ids: Sequence[np.ndarray], length: int) -> dict[str, Any]:
        """The arguments of forward beside the tokens, of which the first `length` are read."""
        [first, *_] = ids
        if not isinstance(first, IdsWithMedia):
            return {}
        module: Any = self.module
        accepted = inspect.signature(module.base_model.forward).parameters
        return first.media.inputs(module.config, length, accepted, self._dtype)

    def _outputs_along(
        self, ids: Sequence[np.ndarray], moves: Mapping[str, Sequence[Move]]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the output, and its derivative along each direction. moves: [D] of each weight that moves."""
        count = len(next(iter(moves.values())))
        moved = {name: moving(self._weights[name], own) for name, own in moves.items()}
        try:
            output = self._output({**self._weights, **moved}, ids)
        except RuntimeError:  # a model that writes into its tensors (`CannotMoveError`): by torch, one after the other
            full = {name: moves_of(value, count) for name, value in moved.items()}
            start = {name: self._weights[name] for name in moves}

            def read(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
                return self._output({**self._weights, **own}, ids)

            singly = [
                jvp(read, (start,), ({name: own[place] for name, own in full.items()},)) for place in range(count)
            ]
            return singly[0][0], [each[1] for each in singly]
        return output.as_subclass(torch.Tensor), moves_of(output, count)

    def _of_output(
        self, output: torch.Tensor, ids: Sequence[np.ndarray], tangent: torch.Tensor | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """Return, by the names of `Reads`, a tensor for each sequence: of an output, or of its tangent."""
        if self._scores:
            return {"scores": list(output if tangent is None else tangent)}
        targets_BT = _padded(ids)[:, 1:]
        parts = of_logits(output, targets_BT) if tangent is None else of_tangents(output, targets_BT, tangent)
        return {
            name: [torch.nn.functional.pad(part_BT[row, : len(own) - 1], (1, 0)) for row, own in enumerate(ids)]
            for name, part_BT in parts.items()
        }

    # --- names

    def _effective(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's weights by its own names: LoRA's products are added to what they stand beside (Hu et al. 2021,
        equation 3)."""
        found = {}
        for name, value in weights.items():
            if not name.startswith(self._prefix) or ".lora_" in name:
                continue
            if name.endswith(".base_layer.weight"):
                own = name.removesuffix(".base_layer.weight")
                down, up = (weights[f"{own}.lora_{side}.default.weight"] for side in "AB")
                value = value + float(self._lora_scale or 1.0) * (up @ down)
            found[name.removeprefix(self._prefix).replace(".base_layer.", ".")] = value
        return found

    def _head(self) -> str | None:
        """The score head's name in the record."""
        return next((name for name in self._weights if name.endswith("score.weight")), None)


def of_logits(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return log-probabilities of the targets, log Z and entropies, [B, T] each."""
    normalizer_BT = logits_BTV.logsumexp(-1)
    logprob_BT = _at_targets(logits_BTV, targets_BT) - normalizer_BT
    entropy_BT = normalizer_BT - (logits_BTV.softmax(-1) * logits_BTV).sum(-1)
    return {"logprobs": logprob_BT, "normalizers": normalizer_BT, "entropies": entropy_BT}


def of_tangents(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, tangent_BTV: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the derivatives of `of_logits` along a tangent of the logits.

    With p the probabilities and H the entropy: of log Z p . t, of the entropy - p (log p + H) . t.
    """
    logprob_BTV = logits_BTV.log_softmax(-1)
    weight_BTV = logprob_BTV.exp()
    normalizer_BT = (weight_BTV * tangent_BTV).sum(-1)
    entropy_BT1 = -(weight_BTV * logprob_BTV).sum(-1, keepdim=True)
    entropies_BT = -(weight_BTV * (logprob_BTV + entropy_BT1) * tangent_BTV).sum(-1)
    logprobs_BT = _at_targets(tangent_BTV, targets_BT) - normalizer_BT
    return {"logprobs": logprobs_BT, "normalizers": normalizer_BT, "entropies": entropies_BT}


def _at_targets(values_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return values_BTV.gather(2, targets_BT.unsqueeze(2)).squeeze(2)


def _padded(ids: Sequence[np.ndarray]) -> torch.Tensor:
    """Return [B, T], with zeros on the right."""
    ids_BT = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    for row, own in enumerate(ids):
        ids_BT[row, : len(own)] = torch.tensor(own)
    return ids_BT


class InDouble(TorchFunctionMode):
    """Float64 where a model's code asks for float32: norms, rotary angles and softmax of transformers' models do, whose
    rounding would hide what a small update does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif given.get("dtype") is torch.float32:
            given["dtype"] = torch.float64
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return func(*args, **given)


def _configuration(config: Mapping[str, Any]) -> Any:
    """The configuration of a record as transformers has it."""
    import transformers

    return transformers.AutoConfig.for_model(**{name: value for name, value in config.items() if name != "lora_scale"})


def _module(config: Mapping[str, Any], scores: bool) -> torch.nn.Module:
    """An empty model of this configuration. ThreestepError for one that transformers does not build."""
    import transformers
    from transformers.initialization import no_init_weights

    try:
        kind = _configuration(config)
        reads_images = bool(config.get("vision_config"))
        text: Any = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
        auto: Any = transformers.AutoModel if scores else text
        with no_init_weights():  # the record's take their place
            module = auto.from_config(kind, attn_implementation="eager")
        module.tie_weights()  # which making them does otherwise
    except Exception as problem:  # each value of a configuration has an error of its own
        if is_out_of_memory(problem):
            raise
        raise ThreestepError(
            "an explanation needs a model that transformers can build from the record's configuration, got "
            f"{config.get('model_type')}: {problem}"
        ) from problem
    if config.get("quantization_config"):
        raise ThreestepError("an explanation needs floating-point weights, got a quantized base")
    return module.eval()


_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")


def _check_layers(config: Mapping[str, Any], weights: int) -> None:
    """ThreestepError for no layers, and for more than the record has weights: they would be made before they are
    missed."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layers(value, weights)
        elif name in _LAYERS and isinstance(value, int) and not 1 <= value <= weights:
            raise ThreestepError(
                f"the record's configuration has {value:,} layers ({name}), but the record has only {weights:,} "
                "weight tensors"
            )


def _prefix(module: torch.nn.Module, weights: Whole) -> str:
    """Return what stands before the model's own names in the record."""
    own = next(name for name, _ in module.named_parameters())
    named = {name.replace(".base_layer.", "."): name for name in weights}
    found = [name.removesuffix(own) for name in named if name.endswith(own)]
    dora = next((name for name in weights if "lora_magnitude" in name), None)
    if dora is not None:
        raise ThreestepError(f"an explanation needs LoRA without magnitudes, got DoRA's {dora}")
    return min(found, key=len) if found else ""


def _joined(found: Sequence[_Batch]) -> Reads:
    """Batches in the order of the sequences."""
    by_name: dict[str, dict[int, np.ndarray]] = {}
    for index, parts in found:
        for name, rows in parts.items():
            own = by_name.setdefault(name, {})
            own.update({place: row.detach().numpy() for place, row in zip(index, rows, strict=True)})
    arrays = {
        name: np.concatenate([np.atleast_1d(rows[place]) for place in sorted(rows)]) for name, rows in by_name.items()
    }
    return Reads(**{f"{name}_{'S' if name == 'scores' else 'T'}": values for name, values in arrays.items()})


def _split(slopes: Reads, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Slopes of each sequence, by the names of what is read."""
    ends = np.cumsum([len(ids) for ids in sequences])[:-1]
    found = {
        name: np.split(values, ends)
        for name in ("logprobs", "normalizers", "entropies")
        if (values := getattr(slopes, f"{name}_T")) is not None
    }
    if slopes.scores_S is not None:
        found["scores"] = list(slopes.scores_S)
    return found
