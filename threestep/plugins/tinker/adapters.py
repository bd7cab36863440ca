"""LoRA of many clients on one base model: each row of a forward has the adapters of its own client.

A client's adapters are one vector (see `AdapterLayout`). A forward stacks the vectors of its clients, so that each
layer costs two batched products however many clients there are, and the gradient of the stack has a row for each.

C clients of a forward, P numbers of a client, N rows, T tokens in a row, R rank, I and O inputs and outputs of a layer.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from threestep.plugins.lora.adaptable import why_no_adapters
from threestep.plugins.tinker.full_weights import FullLayout, full_layout, vector_in, vector_of, weights_of
from threestep.plugins.tinker.records import ATTENTION, HEAD, MLP, LoraSpec
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.models.families import is_beside_language

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."  # and the beginning of names in it, of PEFT
ALPHA = 32.0  # of every client, as in the Tinker API: the scale is ALPHA / rank


class AdaptedLayer(NamedTuple):
    """A linear layer that may have adapters. part: of PARTS."""

    name: str
    part: str
    inputs: int
    outputs: int


class AdapterLayout(NamedTuple):
    """Adapters of one shape as a vector: of each layer in turn A [R, I], then B [O, R]."""

    rank: int
    layers: tuple[AdaptedLayer, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers of each piece."""
        return [size for layer in self.layers for size in (self.rank * layer.inputs, layer.outputs * self.rank)]

    @property
    def size(self) -> int:
        """P."""
        return sum(self.sizes)

    @property
    def scale(self) -> float:
        return ALPHA / self.rank

    @property
    def shares_rows(self) -> bool:
        """True: rows of a forward may be of several clients."""
        return True

    def pieces(self, stack_CP: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A [C, R, I] and B [C, O, R] of each layer, by its name: views of the stack."""
        parts, found = iter(stack_CP.split(self.sizes, dim=1)), {}
        for layer in self.layers:
            down, up = next(parts), next(parts)
            found[layer.name] = (
                down.view(-1, self.rank, layer.inputs),
                up.view(-1, layer.outputs, self.rank),
            )
        return found

    def new(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return first weights: A uniform within 1 / sqrt(I), as PEFT's, and B 0. The same on every device."""
        dice, pieces = torch.Generator().manual_seed(seed), list[torch.Tensor]()
        for layer in self.layers:
            bound = 1.0 / math.sqrt(layer.inputs)
            down = torch.empty(self.rank * layer.inputs, dtype=torch.float32).uniform_(-bound, bound, generator=dice)
            pieces += [down, torch.zeros(layer.outputs * self.rank)]
        return torch.cat(pieces).to(dtype)

    def write(self, folder: Path, weights_P: torch.Tensor, base: str) -> None:
        """Write a folder of adapters as PEFT does. base: the name of the base model."""
        tensors = {}
        for layer, (down_1RI, up_1OR) in self.pieces(weights_P.detach().cpu().unsqueeze(0)).items():
            tensors[f"{_PREFIX}{layer}.lora_A.weight"] = down_1RI[0].contiguous()
            tensors[f"{_PREFIX}{layer}.lora_B.weight"] = up_1OR[0].contiguous()
        save_file(tensors, folder / _FILE, metadata={"format": "pt"})
        description = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": self.rank,
            "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
            "target_modules": [layer.name for layer in self.layers],
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(description, indent=1), encoding="utf-8")

    def read(self, folder: Path) -> torch.Tensor:
        """Return the vector of a folder that `write` wrote. ThreestepError for another one."""
        shapes = {}
        for layer in self.layers:
            shapes[f"{_PREFIX}{layer.name}.lora_A.weight"] = (self.rank, layer.inputs)
            shapes[f"{_PREFIX}{layer.name}.lora_B.weight"] = (layer.outputs, self.rank)
        return vector_in(folder / _FILE, shapes)


WeightLayout = AdapterLayout | FullLayout


@dataclass(frozen=True)
class RowShares:
    """Rows of a forward by the C clients that they are of. take: for each client the places of its rows, filled up with
    its first row to the same number [C x most]; put: the place of each row among those [N]. Both None where the rows
    of the clients follow one another in equal numbers."""

    clients: int
    take: torch.Tensor | None
    put: torch.Tensor | None

    @classmethod
    def of(cls, client_of_row: Sequence[int], device: torch.device) -> RowShares:
        """client_of_row: numbers from 0, each there at least once."""
        clients = max(client_of_row) + 1
        rows: list[list[int]] = [[] for _ in range(clients)]
        for row, client in enumerate(client_of_row):
            rows[client].append(row)
        most = max(map(len, rows))
        flat = [row for own in rows for row in own]
        if all(len(own) == most for own in rows) and flat == list(range(len(flat))):
            return cls(clients, None, None)
        take = [row for own in rows for row in [*own, *own[:1] * (most - len(own))]]
        put = [0] * len(client_of_row)
        for client, own in enumerate(rows):
            for place, row in enumerate(own):
                put[row] = client * most + place
        return cls(clients, torch.tensor(take, device=device), torch.tensor(put, device=device))


class _Active(NamedTuple):
    pieces: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    rows: int
    shares: RowShares


class AdaptedModel:
    """A model whose linear layers add what adapters make of their inputs inside `adapters`, and not outside."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = _adaptable_layers(model)
        self._active: _Active | None = None
        modules = dict(model.named_modules())
        for layer in self.layers:
            modules[layer.name].register_forward_hook(self._hook_of(layer.name))

    def layout(self, spec: LoraSpec) -> WeightLayout:
        """Return the layout of what a client trains. ThreestepError where that would be nothing."""
        if spec.rank == 0:
            return full_layout(self.model)
        layers = tuple(layer for layer in self.layers if layer.part in spec.parts)
        if not layers:
            raise ThreestepError(
                f"no layers to put adapters on: this model has linear layers in {', '.join(self.parts)}, but the "
                f"request selects {', '.join(spec.parts) or 'none'}; turn on train_attn, train_mlp or train_unembed"
            )
        return AdapterLayout(spec.rank, layers)

    def new(self, spec: LoraSpec) -> torch.Tensor:
        """Return a client's first weights. ThreestepError as of `layout`."""
        layout = self.layout(spec)
        if isinstance(layout, FullLayout):
            return vector_of(self.model, self.dtype)
        return layout.new(spec.seed, self.dtype).to(self.model.device)

    @property
    def parts(self) -> list[str]:
        return sorted({layer.part for layer in self.layers})

    @property
    def dtype(self) -> torch.dtype:
        """The precision of adapters, their gradients and moments."""
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    @contextlib.contextmanager
    def adapters(self, layout: WeightLayout, stack_CP: torch.Tensor, client_of_row: Sequence[int]) -> Iterator[None]:
        """Inside, row n of a forward has the adapters of `stack_CP[client_of_row[n]]`, or all rows its weights."""
        if isinstance(layout, FullLayout):
            assert len(stack_CP) == 1, "a forward of all weights is for one client"
            with weights_of(self.model, layout, stack_CP[0]):
                yield
            return
        shares = RowShares.of(client_of_row, stack_CP.device)
        pieces = layout.pieces(stack_CP.to(self.model.dtype))
        self._active = _Active(pieces, layout.scale, len(client_of_row), shares)
        try:
            yield
        finally:
            self._active = None

    def _hook_of(self, name: str) -> Any:
        def added(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            active = self._active
            if active is None or name not in active.pieces:
                return None
            return _with_adapters(inputs[0], output, active.pieces[name], active)

        return added


def _with_adapters(
    given: torch.Tensor, output: torch.Tensor, pieces: tuple[torch.Tensor, torch.Tensor], active: _Active
) -> torch.Tensor:
    """Return output + scale * given @ A^T @ B^T, each row by its client's A and B. given: [N, T, I], or [N * T, I]."""
    down_CRI, up_COR = pieces
    shares = active.shares
    if shares.clients == 1:
        middle = given.flatten(0, -2) @ down_CRI[0].t()
        return torch.addmm(output.flatten(0, -2), middle, up_COR[0].t(), alpha=active.scale).view(output.shape)
    rows_NTI = given.reshape(active.rows, -1, given.shape[-1])
    if shares.take is not None:
        rows_NTI = rows_NTI.index_select(0, shares.take)
    tokens_CtI = rows_NTI.reshape(shares.clients, -1, given.shape[-1])
    middle_CtR = torch.bmm(tokens_CtI, down_CRI.transpose(1, 2))
    if shares.put is None:
        output_CtO = output.reshape(shares.clients, -1, output.shape[-1])
        return torch.baddbmm(output_CtO, middle_CtR, up_COR.transpose(1, 2), alpha=active.scale).view(output.shape)
    added_NTO = torch.bmm(middle_CtR, up_COR.transpose(1, 2)).view(len(shares.take), -1, output.shape[-1])  # type: ignore[arg-type]
    return torch.add(output, added_NTO.index_select(0, shares.put).view(output.shape), alpha=active.scale)


def _adaptable_layers(model: PreTrainedModel) -> tuple[AdaptedLayer, ...]:
    """Return the linear layers that see every token of every row, the output layer among them; print those that
    cannot have adapters."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    named = {name: module for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))}
    reasons = why_no_adapters(model, {name: module for name, module in named.items() if module is not head})
    seen, is_beside = _layers_of_all_tokens(model, named), is_beside_language(model)
    reasons |= dict.fromkeys((name for name in named if name not in seen), "they see only some of the tokens")
    reasons |= {name: "they do not belong to the language model" for name in named if is_beside(name)}
    for reason in sorted(set(reasons.values())):
        kinds = sorted({name.rpartition(".")[2] for name, why in reasons.items() if why == reason})
        note(f"no adapters on layers named {', '.join(kinds[:6])}: {reason}")
    return tuple(
        AdaptedLayer(name, HEAD if module is head else _part_of(name), *_sides(module))
        for name, module in named.items()
        if name not in reasons
    )


def _sides(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; GPT-2's `Conv1D` has them the other way round."""
    inputs, outputs = module.weight.shape if type(module).__name__ == "Conv1D" else module.weight.shape[::-1]
    return int(inputs), int(outputs)


def _part_of(name: str) -> str:
    return ATTENTION if any("attn" in part or "attention" in part for part in name.lower().split(".")) else MLP


@torch.no_grad()
def _layers_of_all_tokens(model: PreTrainedModel, named: dict[str, torch.nn.Module]) -> set[str]:
    """Return the names of layers whose input is [N, T, I] or [N * T, I] in a forward of N rows of T tokens."""
    rows, tokens, seen = 2, 3, set[str]()

    def looking(name: str) -> Any:
        def look(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape[:-1] in ((rows, tokens), (rows * tokens,)):
                seen.add(name)

        return look

    with contextlib.ExitStack() as hooks:
        for name, module in named.items():
            hooks.callback(module.register_forward_hook(looking(name)).remove)
        model(input_ids=torch.ones(rows, tokens, dtype=torch.int64, device=model.device), use_cache=False)
    return seen
