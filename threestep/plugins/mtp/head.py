"""The head of multi-token prediction: modules that each predict one token further ahead.

Depth k joins, for each token, its embedding with the state of depth k - 1 at the token before:
    h^k_i = Block_k( P_k [ RMSNorm(Emb(t_{i+k})) ; RMSNorm(h^{k-1}_i) ] ),  then the model's own output layer
(DeepSeek-V3, arXiv:2412.19437, equations 21 to 23; the order of the two halves is that of its published weights, not of
the paper.) h^0 is the model's last state, after its final norm. `mtp.layout.entries` says where entries stand.

The block is the model's own kind: its trunk with one layer, which brings positions, masks and a final norm. Embeddings
and output layer are the model's, and are not held here.

N rows, T tokens in a row, L slots of all rows (and what fills the last block), M targets of one depth, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from training.utils.base.errors import ThreestepError
from training.utils.models.attention import model_inputs
from training.utils.models.dropout import set_dropout
from training.utils.models.own_forward import head_is_linear
from training.utils.models.row_sharing import WHOLE_ROWS, RowPart
from training.utils.models.weights import adapters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.mtp.layout.entries import MtpEntries

_ONE_LAYER = {"num_hidden_layers": 1}
# Of configurations that describe each layer: which of them the one layer is.
_BY_LAYER = ("layer_types", "mlp_layer_types", "moe_layers", "layers_block_type")
# Families with experts in later layers alone: from which on, and which have none.
_FIRST_DENSE = {"first_k_dense_replace": 0, "mlp_only_layers": [], "moe_layer_start_index": 0, "decoder_sparse_step": 1}


class MtpModule(nn.Module):
    """One depth. enorm, hnorm: of embedding and state; eh_proj: joins them, [H, 2 H]; trunk: one block, final norm."""

    def __init__(self, trunk: PreTrainedModel, enorm: nn.Module, hnorm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = enorm, hnorm
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        nn.init.normal_(self.eh_proj.weight, std=(2 * hidden_size) ** -0.5)  # keeps the size of what it reads
        self.trunk = trunk

    def forward(
        self, embeddings_LH: torch.Tensor, before_LH: torch.Tensor, rows: Any, part: RowPart = WHOLE_ROWS
    ) -> torch.Tensor:
        """Return the states [L, H]. before_LH: of the depth before, at the token before each. part: of the rows, which
        all of these are of."""
        joined_LH = self.joined(embeddings_LH, before_LH)
        inputs = model_inputs(rows, self.trunk.config._attn_implementation)
        inputs, _ = part.sharing.part_of(self.trunk, rows, inputs)
        shape = inputs.pop("input_ids").shape
        filled_LH = functional.pad(joined_LH, (0, 0, 0, shape.numel() - len(joined_LH)))
        return self.trunk(inputs_embeds=filled_LH.view(*shape, -1), **inputs)[0].flatten(0, 1)

    def joined(self, embeddings: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return what the block reads of entries [..., H]."""
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(before)], dim=-1))


class MtpHead(nn.Module):
    """The modules of all depths; their output layer and embeddings are the model's."""

    def __init__(self, modules: Iterable[MtpModule]) -> None:
        super().__init__()
        self.depths = nn.ModuleList(modules)

    def forward(
        self,
        hidden_LH: torch.Tensor,
        embeddings_LH: torch.Tensor,
        entries: Sequence[MtpEntries],
        part: RowPart = WHOLE_ROWS,
    ) -> tuple[torch.Tensor, ...]:
        """Return, for each depth, the states [M, H] that predict its targets.

        hidden_LH: the model's last states. embeddings_LH: its input embeddings of the rows' tokens, without noise.
        part: of the rows, which both are of, and the states for the targets in it.
        """
        found, states_LH = [], hidden_LH
        for module, entry in zip(self.depths, entries, strict=True):
            before_LH, own = part.moved(states_LH, entry.before_L), part.owned(entry.rows.predictor_M)
            states_LH = module(embeddings_LH, before_LH, entry.rows, part)
            found.append(states_LH.index_select(0, own.local_m))
        return tuple(found)


def new_head(model: PreTrainedModel, layers: int, seed: int, final_norm: bool = True) -> MtpHead:
    """Return a head of `layers` modules for `model`, the blocks of which have random weights yet. On the CPU, or on the
    meta device if `model` is there; in the model's dtype. The generators of torch stay as they are.
    final_norm: each module ends in a norm, as the model does.

    Raises ThreestepError if the model has no block, embeddings or output layer that such a head could take.
    """
    _check_fits(model)
    has_weights = next(model.parameters()).device.type != "meta"
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if has_weights else "meta"):
        torch.manual_seed(seed)
        head = MtpHead([_new_module(model, final_norm) for _ in range(layers)])
    return head.to(model.dtype)


def block_weights(model: PreTrainedModel, head: MtpHead) -> dict[str, str]:
    """By the name of each weight of one module's trunk, the name of the weight of `model` that it can start from: the
    last layer's for the block's, and the same for what belongs to no layer."""
    prefix, count = _layers(model.base_model)
    outer = f"{model.base_model_prefix}." if model.base_model is not model else ""
    first, last = f"{prefix}.0.", f"{prefix}.{count - 1}."
    module: Any = head.depths[0]
    names = [name for name, _ in module.trunk.named_parameters()]
    return {name: outer + (last + name.removeprefix(first) if name.startswith(first) else name) for name in names}


def _new_module(model: PreTrainedModel, final_norm: bool) -> MtpModule:
    config = one_layer_config(model)
    own: Any = model.base_model
    trunk: Any = type(own)._from_config(config, dtype=model.dtype)
    trunk.set_input_embeddings(nn.Identity())
    set_dropout(trunk, 0.0)  # it would draw from the model's stream, and change the model
    _check_same_block(model, trunk)
    size = _hidden_size(model)
    enorm, hnorm = (_new_norm(trunk, size, float(getattr(config, "rms_norm_eps", 1e-6))) for _ in range(2))
    if not final_norm:
        _remove_final_norm(trunk, type(model).__name__)
    return MtpModule(trunk, enorm, hnorm, size)


def _new_norm(trunk: Any, size: int, eps: float) -> nn.Module:
    """An RMSNorm as the family's own, where it has one: some multiply by 1 + weight, and so do their public heads."""
    theirs: Any = type(getattr(trunk, "norm", None))
    return (theirs if "RMSNorm" in theirs.__name__ else nn.RMSNorm)(size, eps=eps)


def _remove_final_norm(trunk: Any, name: str) -> None:
    if not isinstance(getattr(trunk, "norm", None), nn.Module):
        raise ThreestepError(
            f"--mtp_final_norm false needs a model whose final norm is called `norm`, but {name} has none of that "
            "name; remove the flag"
        )
    trunk.norm = nn.Identity()


def one_layer_config(model: PreTrainedModel) -> Any:
    """Return the configuration of `model` with its last layer alone."""
    config = copy.deepcopy(model.base_model.config)
    for name, value in (*_ONE_LAYER.items(), *_FIRST_DENSE.items()):
        if hasattr(config, name):
            setattr(config, name, value)
    for name in _BY_LAYER:
        if isinstance(getattr(config, name, None), list) and getattr(config, name):
            setattr(config, name, getattr(config, name)[-1:])
    return config


def _check_fits(model: PreTrainedModel) -> None:
    name, size = type(model).__name__, _hidden_size(model)
    embeddings: Any = model.get_input_embeddings()
    reason = None
    if not head_is_linear(model):
        reason = "its logits are not one linear layer on its last hidden state"
    elif embeddings.embedding_dim != size:
        reason = f"its embeddings have width {embeddings.embedding_dim} but its hidden states {size}"
    elif _layers(model.base_model) is None:
        reason = "its trunk has no list of layers"
    if reason is not None:
        raise ThreestepError(
            f"--mtp_num_layers needs a model whose embeddings and output layer a head can share, but {name} is not "
            f"one: {reason}; use another model family, or remove --mtp_num_layers"
        )


def _check_same_block(model: PreTrainedModel, trunk: PreTrainedModel) -> None:
    """ThreestepError unless the one layer of `trunk` is of the kind of the model's last."""
    from training.utils.models.weights import whole_shape

    prefix, count = _layers(model.base_model)
    theirs = {
        name.removeprefix(f"{prefix}.{count - 1}."): tuple(whole_shape(weight))
        for name, weight in _plain_parameters(model.base_model)
        if name.startswith(f"{prefix}.{count - 1}.")
    }
    ours = {
        name.removeprefix(f"{prefix}.0."): tuple(weight.shape)
        for name, weight in trunk.named_parameters()
        if name.startswith(f"{prefix}.0.")
    }
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()))
        raise ThreestepError(
            f"--mtp_num_layers builds a block like the model's last one, but for {type(model).__name__} they differ "
            f"in {differing[0][0]}; use another model family, or remove --mtp_num_layers"
        )


def _plain_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Weights under the names of the model without adapters."""
    adapters = adapters_of(model)
    for name, weight in model.named_parameters():
        if not adapters.holds(name):
            yield adapters.plain_name(name), weight


def _layers(trunk: nn.Module) -> Any:
    """Return the name of the list of blocks of `trunk`, and how many it has; None if there is no such list."""
    count = trunk.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for name, part in trunk.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name, count
    return None


def _hidden_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)
