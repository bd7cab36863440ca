"""Heads for multi-token prediction under the names of public checkpoints: one table, and renaming both ways.

A form names the parts of one module: the two norms, the projection, the final norm (not all have one) and the block,
the tensors of which have the model's own names. Numbers stay as they are; the halves of a projection that reads the
state first change places, and experts are one by one in files and together in transformers' models.

MiMo's and ERNIE's heads read the state before the model's final norm, w x / rms(x), and ours the state after it. Both
norm it again, so that w, over its root mean square, belongs into their norm of the state: the same numbers but for a
factor of each token, near 1, which is 1 where all of w is equal.

Knows no files. Sources: the checkpoints' indices on the hub; vllm/model_executor/models/{deepseek,qwen3_next,mimo,
ernie}_mtp.py and mimo.py (vLLM 0.32); for ERNIE PaddleFormers' ernie4_5_moe/modeling.py, which trains it on states
before the norm, and puts the model's own final norm behind it (vLLM's has neither).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from training.utils.base.errors import ThreestepError

# Of a module of MtpHead.
_ENORM, _HNORM, _PROJECTION, _FINAL_NORM = "enorm.weight", "hnorm.weight", "eh_proj.weight", "trunk.norm.weight"
_BLOCK = "trunk.layers.0."
_IN_HEAD = re.compile(r"depths\.(\d+)\.(.+)")
_ONE_EXPERT = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class ModuleNames:
    """Tensors of one module; block: of its layer, before the layer's own names. A module without a final_norm ends in
    the model's."""

    enorm: str
    hnorm: str
    projection: str
    final_norm: str | None
    block: str


@dataclass(frozen=True)
class PublicForm:
    """Names of one module; {n} is its number, from 0, or from the model's number of layers if `after_layers`.

    families: who uses it. prefix: what no other tensor of such a checkpoint begins with. copies: of the model's
    embeddings and output layer, not read. hidden_first: the projection reads [state; embedding]. before_norm: the state
    that is read is that before the model's final norm.
    """

    families: str
    prefix: str
    names: ModuleNames
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    after_layers: bool = False
    before_norm: bool = False

    @property
    def is_single(self) -> bool:
        """True if there are names for one module alone."""
        return "{n}" not in self.names.projection

    def number(self, depth: int, model_layers: int) -> int:
        return depth + (model_layers if self.after_layers else 0)

    def parts(self, number: int) -> dict[str, str]:
        """By the head's names, without the block's."""
        found = {_ENORM: self.names.enorm, _HNORM: self.names.hnorm, _PROJECTION: self.names.projection}
        if self.names.final_norm is not None:
            found[_FINAL_NORM] = self.names.final_norm
        return {ours: theirs.format(n=number) for ours, theirs in found.items()}

    def shown(self, model_layers: int) -> str:
        """The names of the first module, for a message."""
        return self.names.projection.format(n=self.number(0, model_layers)).rsplit(".", 2)[0] + ".*"


FORMS = {
    "deepseek": PublicForm(
        "DeepSeek-V3 and GLM-4.5",
        "model.layers.{n}.",
        ModuleNames(
            "model.layers.{n}.enorm.weight",
            "model.layers.{n}.hnorm.weight",
            "model.layers.{n}.eh_proj.weight",
            "model.layers.{n}.shared_head.norm.weight",
            "model.layers.{n}.",
        ),
        ("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight"),
        after_layers=True,
    ),
    "qwen": PublicForm(
        "Qwen3-Next and Qwen3.5",
        "mtp.",
        ModuleNames(
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.layers.0.",
        ),
    ),
    "mimo": PublicForm(
        "MiMo-7B",
        "model.mtp_layers.{n}.",
        ModuleNames(
            "model.mtp_layers.{n}.token_layernorm.weight",
            "model.mtp_layers.{n}.hidden_layernorm.weight",
            "model.mtp_layers.{n}.input_proj.weight",
            "model.mtp_layers.{n}.final_layernorm.weight",
            "model.mtp_layers.{n}.",
        ),
        hidden_first=True,
        before_norm=True,
    ),
    "ernie": PublicForm(
        "ERNIE-4.5",
        "model.mtp_",
        ModuleNames(
            "model.mtp_emb_norm.{n}.weight",
            "model.mtp_hidden_norm.{n}.weight",
            "model.mtp_linear_proj.{n}.weight",
            None,
            "model.mtp_block.{n}.",
        ),
        before_norm=True,
    ),
}


def form_of(names: Iterable[str], model_layers: int) -> PublicForm | None:
    """Return the form of the head among the tensors `names` of a checkpoint; None if there is none."""
    names = set(names)
    for form in FORMS.values():
        if form.names.projection.format(n=form.number(0, model_layers)) in names:
            return form
    return None


def depths_of(form: PublicForm, names: Iterable[str], model_layers: int) -> int:
    """Return how many modules there are."""
    names, found = set(names), 0
    while form.names.projection.format(n=form.number(found, model_layers)) in names:
        found += 1
        if form.is_single:
            break
    return found


def names_in_head(form: PublicForm, names: Iterable[str], model_layers: int, depths: int) -> dict[str, str]:
    """Return, by the name in the checkpoint, the head's name of each tensor of the first `depths` modules; experts are
    still one by one. What is under the form's prefix and part of no module keeps its name, which no head knows."""
    names = list(names)
    found, others = {}, set[str]()
    for depth in range(depths_of(form, names, model_layers)):
        number = form.number(depth, model_layers)
        parts = {theirs: ours for ours, theirs in form.parts(number).items()}
        block = form.names.block.format(n=number)
        others.update(copy.format(n=number) for copy in form.copies)
        for name in names:
            part = parts.get(name) or (_BLOCK + name.removeprefix(block) if name.startswith(block) else None)
            if part is None or name in others:
                continue
            if depth < depths:
                found[name] = f"depths.{depth}.{part}"
            else:
                others.add(name)
    known = {*found, *others}
    return {**found, **{name: name for name in names if name.startswith(form.prefix) and name not in known}}


def from_public(
    form: PublicForm, stored: Mapping[str, torch.Tensor], model_layers: int, depths: int
) -> dict[str, torch.Tensor]:
    """Return the state of an MtpHead's first `depths` modules that a checkpoint `stored`."""
    names = names_in_head(form, stored, model_layers, depths)
    renamed = {
        ours: _swapped(stored[theirs]) if form.hidden_first and ours.endswith(_PROJECTION) else stored[theirs]
        for theirs, ours in names.items()
    }
    return _experts_together(renamed)


def before_the_norm(state: Mapping[str, torch.Tensor], norm_H: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a head whose first module reads the model's states before its final norm `norm_H`, as
    `state` reads those after it."""
    return {**state, **_state_norm_times(state, 0, _over_its_rms(norm_H))}


def after_the_norm(
    form: PublicForm, state: Mapping[str, torch.Tensor], norm_H: torch.Tensor, depths: int
) -> dict[str, torch.Tensor]:
    """Return the head that reads states after the model's final norm `norm_H` as `state` of `form` reads those before
    it. One that ends in the model's norm gets it, and reads its states of the depth before after that norm too."""
    factor_H = 1 / _over_its_rms(norm_H)
    factor_H = torch.where(factor_H.isfinite(), factor_H, 0.0)  # what the norm makes 0 is 0 after it
    found, chained = dict(state), form.names.final_norm is None
    for depth in range(depths):
        if depth == 0 or chained:
            found |= _state_norm_times(state, depth, factor_H)
        if chained:
            found[f"depths.{depth}.{_FINAL_NORM}"] = norm_H.clone()
    return found


def _over_its_rms(norm_H: torch.Tensor) -> torch.Tensor:
    weight_H = norm_H.double()
    return weight_H / weight_H.square().mean().sqrt()


def _state_norm_times(state: Mapping[str, torch.Tensor], depth: int, factor_H: torch.Tensor) -> dict[str, torch.Tensor]:
    name = f"depths.{depth}.{_HNORM}"
    if name not in state or state[name].shape != factor_H.shape:
        return {}  # of another model, which whoever fills a head with it finds
    return {name: (state[name].double() * factor_H).to(state[name].dtype)}


def to_public(form: PublicForm, state: Mapping[str, torch.Tensor], model_layers: int) -> dict[str, torch.Tensor]:
    """Return the state of an MtpHead under the names of `form`. ThreestepError if the form has none for a part."""
    found = {}
    for name, tensor in _experts_apart(state).items():
        depth, part = _of_head(name)
        number = form.number(depth, model_layers)
        parts = form.parts(number)
        if (depth and form.is_single) or not (part in parts or part.startswith(_BLOCK)):
            raise ThreestepError(
                f"a head for {form.families} needs {'one module' if form.is_single else 'modules'} with "
                f"{', '.join(parts)} and {_BLOCK}*, got {name}; choose another form, or train a head with these "
                "parts"
            )
        if part == _PROJECTION and form.hidden_first:
            tensor = _swapped(tensor)
        public = parts[part] if part in parts else form.names.block.format(n=number) + part.removeprefix(_BLOCK)
        found[public] = tensor.contiguous()
    return found


def _of_head(name: str) -> tuple[int, str]:
    match = _IN_HEAD.fullmatch(name)
    assert match is not None, f"{name} is not a tensor name of an MtpHead"
    return int(match[1]), match[2]


def _swapped(projection_HK: torch.Tensor) -> torch.Tensor:
    """[H, 2 H], its halves exchanged."""
    first, second = projection_HK.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def _experts_together(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' gate and up [I, H], down [H, I] as gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    found: dict[str, torch.Tensor] = {}
    apart: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in state.items():
        match = _ONE_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            apart.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for prefix, experts in apart.items():
        if sorted(experts) != list(range(len(experts))) or any(len(expert) != 3 for expert in experts.values()):
            continue  # some are lacking, and so is then what they would make
        whole = [experts[number] for number in range(len(experts))]
        found[prefix + "gate_up_proj"] = torch.stack([torch.cat([expert["gate"], expert["up"]]) for expert in whole])
        found[prefix + "down_proj"] = torch.stack([expert["down"] for expert in whole])
    return found


def _experts_apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found[f"{prefix}{number}.gate_proj.weight"] = gate
                found[f"{prefix}{number}.up_proj.weight"] = up
        elif name.endswith("mlp.experts.down_proj"):
            for number, expert in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{number}.down_proj.weight"] = expert
        else:
            found[name] = tensor
    return found
