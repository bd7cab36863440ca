"""Routers of a mixture of experts: which families have a balancing loss, and that loss, over the tokens of many rows.

The loss is the Switch Transformer's (Fedus et al. 2021, eq. 4) as transformers computes it (`load_balancing_loss_func`
of Mixtral and its relatives): over the routers of all layers together, E experts x the sum over experts of (share of
tokens whose top k hold the expert) x (mean probability of the expert). The shares have no gradient.

L routers (one a layer), E experts, t tokens of a micro-batch. Knows no engine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import ROW_PART, WHOLE_ROWS, RowPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # most families; JetMoe; DBRX
_TOP_K = ("num_experts_per_tok", "moe_top_k")
_OWN_LOSS = "load_balancing_loss_func"  # in a family's file
_PRODUCT_KEYS = ("doge",)  # routers of two halves, with a loss of their own


class RouterSums(NamedTuple):
    """Over tokens, each counted as often as it stands in the separate sequences.

    chosen_LE: float64, by how many tokens each expert is among the top k.
    probability_E: float32 (float64 of float64 logits), the sum of its probabilities over tokens and layers; it alone
        has a gradient.
    tokens: float64 scalar, those of one layer.
    """

    chosen_LE: torch.Tensor
    probability_E: torch.Tensor
    tokens: torch.Tensor


def router_sums(router_logits: Sequence[torch.Tensor], copies_t: torch.Tensor, top_k: int) -> RouterSums:
    """router_logits: of each layer, [..., E] with t tokens in all. copies_t: int64, how often each token counts; those
    of 0 are not looked at."""
    counted = torch.nonzero(copies_t).flatten()
    weights_t = copies_t.index_select(0, counted)
    chosen, probabilities = [], []
    for logits in router_logits:
        logits_tE = logits.flatten(0, -2).index_select(0, counted)
        logits_tE = logits_tE if logits_tE.dtype == torch.float64 else logits_tE.float()
        probability_tE = logits_tE.softmax(-1)
        places = probability_tE.detach().topk(top_k, dim=-1).indices
        weights_tk = weights_t.double().unsqueeze(1).expand(-1, top_k)
        chosen_E = torch.zeros(logits_tE.shape[1], dtype=torch.float64, device=logits_tE.device)
        chosen.append(chosen_E.index_add(0, places.flatten(), weights_tk.flatten()))
        probabilities.append(weights_t.to(probability_tE.dtype) @ probability_tE)
    return RouterSums(torch.stack(chosen), torch.stack(probabilities).sum(0), weights_t.sum().double())


def balancing_loss(probability_E: torch.Tensor, load: RouterSums) -> torch.Tensor:
    """Return the loss, or the part of it whose probabilities add up to `probability_E`. load: of all tokens.

    Worked example, one layer of two experts, top 1, two tokens of probabilities (0.9, 0.1) and (0.6, 0.4):
        both choose the first: chosen (2, 0), probabilities (1.5, 0.5): 2 x (2/2 x 1.5/2 + 0/2 x 0.5/2) = 1.5
        a balanced router has (1, 1) and (1, 1): 2 x (1/2 x 1/2 + 1/2 x 1/2) = 1
    """
    layers, experts = load.chosen_LE.shape
    rows = layers * load.tokens
    share_E = (load.chosen_LE.sum(0) / rows).to(probability_E.dtype)
    return experts * (share_E * probability_E).sum() / rows.to(probability_E.dtype)


def largest_load(load: RouterSums) -> float:
    """Return E x the largest share of a layer's choices that one expert has: 1 is balanced, E / k the worst."""
    share_LE = load.chosen_LE / load.chosen_LE.sum(1, keepdim=True)
    return float(share_LE.max()) * share_LE.shape[1]


@dataclass(frozen=True)
class Balance:
    """coefficient: of the balancing loss. top_k: experts a token. said: one line for the log."""

    coefficient: float
    top_k: int
    said: str


def balance_of(model: PreTrainedModel, coefficient: float | None) -> Balance | None:
    """Return how the routers of `model` are balanced; None for a model without routers.

    coefficient: `--router_aux_loss_coef`; None takes the model's own, where transformers adds a loss with it.
    Raises ThreestepError if there is nothing that a coefficient above 0 could balance.
    """
    name = type(model).__name__
    if not has_routers(model):
        if coefficient:
            raise ThreestepError(
                "--router_aux_loss_coef needs a mixture of experts whose routers transformers can record, but "
                f"{name} has none; leave --router_aux_loss_coef out"
            )
        return None
    config = model.config.get_text_config()
    is_own_kind = config.model_type in _PRODUCT_KEYS
    if coefficient and is_own_kind:
        raise ThreestepError(
            f"--router_aux_loss_coef balances routers that have one logit per expert, but {name} routes by product "
            "keys; leave --router_aux_loss_coef out, or set it to 0"
        )
    without = "the routers are trained without a balancing loss"
    if coefficient is not None:
        said = f"router loss {coefficient:g} (--router_aux_loss_coef)" if coefficient else f"{without}, as asked"
        return Balance(coefficient, experts_per_token(model) if coefficient else 0, said)
    if is_own_kind:
        return Balance(0.0, 0, f"{without}: {name} routes by product keys, for which Threestep has no balancing loss")
    own = _named(config, _COEFFICIENTS) if hasattr(sys.modules[type(model).__module__], _OWN_LOSS) else None
    if own is None:
        return Balance(
            0.0, 0, f"{without}: this model family defines no coefficient; set one with --router_aux_loss_coef"
        )
    if not own:
        return Balance(0.0, 0, f"{without}: the model's own coefficient is 0; set another with --router_aux_loss_coef")
    return Balance(float(own), experts_per_token(model), f"router loss {own:g} (the model's own)")


def has_routers(model: PreTrainedModel) -> bool:
    """True if `base_model` has modules that transformers records router logits of (`output_router_logits`)."""
    trunk: Any = model.base_model
    recorders = (getattr(trunk, "_can_record_outputs", None) or {}).get("router_logits", ())
    for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
        kind: Any = getattr(recorder, "target_class", recorder)
        part = getattr(recorder, "layer_name", None)
        for name, module in trunk.named_modules():
            if isinstance(module, kind) and (part is None or f".{part}." in f".{name}."):
                return True
    return False


def experts_per_token(model: PreTrainedModel) -> int:
    """Return the experts that a token goes to; ThreestepError if the configuration does not say."""
    found = _named(model.config.get_text_config(), _TOP_K)
    if not isinstance(found, int):
        raise ThreestepError(
            f"{type(model).__name__}: its configuration does not specify the number of experts per token "
            f"({' or '.join(_TOP_K)}), which the balancing loss needs; set --router_aux_loss_coef 0"
        )
    return found


def _named(config: Any, names: Sequence[str]) -> Any:
    """Return the first of these fields that the configuration, or its part for the experts (DBRX), has."""
    for part in (config, getattr(config, "ffn_config", None)):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


class RouterRecord:
    """The router logits of the last forward of a model's trunk that had gradients, or that ran inside
    `without_gradients`. part: of the rows, which they are of.

    The trunk is asked for them by `output_router_logits`; it is the model's `base_model`, so that no other output
    changes, and gradient checkpointing does not run it twice.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._always = False
        self._last: tuple[torch.Tensor, ...] | None = None
        self.part: RowPart = WHOLE_ROWS
        model.base_model.register_forward_pre_hook(self._ask, with_kwargs=True)
        model.base_model.register_forward_hook(self._keep)

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the logits of each layer, and forget them."""
        last, self._last = self._last, None
        assert last, "no forward has been recorded"
        return last

    @contextlib.contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Inside, forwards without gradients are recorded too."""
        self._always = True
        try:
            yield
        finally:
            self._always = False

    def _is_on(self) -> bool:
        return self._always or torch.is_grad_enabled()

    def _ask(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self._is_on():
            return None
        self.part = kwargs.get(ROW_PART, WHOLE_ROWS)
        return args, {**kwargs, "output_router_logits": True}

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        if self._is_on():
            self._last = output.router_logits
