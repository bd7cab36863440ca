"""Models as steps read them: log-probabilities of given tokens, and scalars at given positions.

Both are modules whose forward takes a `TokenRows`, so that ZeRO-3 gathers each weight where it is used. Logits are
computed only at predicting positions, in chunks if they are many (`target_head`).

Ranks that share rows are given the same ones, compute a part of them, and return the numbers of all; gradients of those
of its own part reach a rank's weights.

N rows, T tokens in a row, M tokens to be predicted, U different ones of these, B sequences,
H hidden size, V vocabulary, E width of the input embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from training.utils.contracts.documents import UNKNOWN
from training.utils.models.attention import model_inputs, sliding_window, text_attention
from training.utils.models.own_forward import head_is_linear
from training.utils.models.row_sharing import ALONE
from training.utils.models.target_head import CHUNK_MB, PLAIN, AtHead, Readout, TargetHead, TokenLogprobs, read_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.row_sharing import OwnPositions, RowPart, RowSharing


# True as an attribute of a model whose layers take `rows.experts_NTLK` by this name.
TAKES_EXPERTS = "_threestep_takes_experts"
EXPERTS = "experts_NTLK"


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities of the target tokens.

    Where its logits are one linear layer on its last hidden state, only those of predicting positions are computed.

    chunk_mb: MiB of float32 logits that are computed at a time (`target_head`); 0 for the default of a CPU
    beside: further modules that are trained with the model, by one loss and under these names
    sharing: the ranks that share rows
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_mb: int = CHUNK_MB,
        beside: Mapping[str, nn.Module] | None = None,
        *,
        sharing: RowSharing = ALONE,
    ) -> None:
        super().__init__()
        self.model = model
        self._sharing = sharing
        head: Any = model.get_output_embeddings()
        self._target_head = TargetHead(head, (chunk_mb or CHUNK_MB) * 2**20) if head_is_linear(model) else None
        for name, module in (beside or {}).items():
            self.add_module(name, module)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that share the probability: those of the output layer, as wide as the configuration says."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def embedding_width(self) -> int:
        """The last dimension of `noise_NTE`; most models' hidden size."""
        return int(self.model.get_input_embeddings().embedding_dim)  # type: ignore[arg-type]

    def forward(
        self,
        rows: TokenRows,
        readout: Readout = PLAIN,
        noise_NTE: torch.Tensor | None = None,
        *,
        after_trunk: Callable[[PolicyModel, TokenRows, torch.Tensor, RowPart], Any] | None = None,
        compare: Callable[[TokenRows, float], AtHead] | None = None,
    ) -> TokenLogprobs:
        """noise_NTE: added to the input embeddings.
        after_trunk: makes `beside` of this model, the rows, the trunk's states [L, H] and the part of the rows that
        these are of; not called where the output layer is not linear. compare: given the rows and the temperature,
        before the trunk; what it returns makes `compared` where the output layer is whole."""
        at_head = None if compare is None else compare(rows, readout.temperature)
        target_ids_U, predictor_U, read_M = rows.reads()  # what several sequences share is read once
        inputs, part = _inputs(self.model, rows, noise_NTE, self._sharing)
        own = part.owned(predictor_U)
        target_ids_U, predictor_U = own.of(target_ids_U), own.local_m
        if self._target_head is not None:
            hidden_LH = _hidden(self.model, inputs)
            hidden_UH = hidden_LH.index_select(0, predictor_U)
            read = of_group(self._target_head(hidden_UH, target_ids_U, readout, at_head), own).listed(read_M)
            return read if after_trunk is None else read._replace(beside=after_trunk(self, rows, hidden_LH, part))
        logits_NTV = self.model(**inputs).logits
        logits_UV = logits_NTV.flatten(0, 1).index_select(0, predictor_U)
        read = read_logits(logits_UV, target_ids_U, readout)
        return of_group(read if readout.logits else read._replace(logits_MV=None), own).listed(read_M)

    @property
    def target_head(self) -> TargetHead | None:
        """The output layer, if the logits are it on the last state."""
        return self._target_head


class ScalarModel(nn.Module):
    """A sequence-classification model with one label that returns a score per sequence or a value per position.
    sharing: as in PolicyModel."""

    def __init__(self, model: PreTrainedModel, *, sharing: RowSharing = ALONE) -> None:
        super().__init__()
        self.model = model
        self._sharing = sharing
        self._head_is_linear = head_is_linear(model)

    def forward(self, rows: TokenRows, at: str = "end") -> torch.Tensor:
        """Return float32 scalars: [B] at each sequence's last token for `at="end"`; [M] at the position that predicts
        each target for `at="targets"`."""
        positions = {"end": rows.end_B, "targets": rows.predictor_M}[at]
        head: nn.Module = self.model.score  # type: ignore[assignment]
        inputs, part = _inputs(self.model, rows, None, self._sharing)
        own = part.owned(positions)
        positions = own.local_m
        if self._head_is_linear:
            scores_m1 = head(_hidden(self.model, inputs).index_select(0, positions))
        else:
            found: list[torch.Tensor] = []  # [N, T, 1]
            hook = head.register_forward_hook(lambda module, inputs, output: found.append(output))
            try:
                self.model(**inputs)
            finally:
                hook.remove()
            scores_m1 = found[0].flatten(0, 1).index_select(0, positions)
        return own.whole(scores_m1.squeeze(-1).float())


def _inputs(
    model: PreTrainedModel, rows: TokenRows, noise_NTE: torch.Tensor | None, sharing: RowSharing
) -> tuple[dict[str, Any], RowPart]:
    """The arguments of the model's forward, and the part of the rows that they are of."""
    inputs = model_inputs(rows, text_attention(model), sliding_window(model))
    if rows.media is not None:
        inputs |= rows.media.inputs(model, rows.input_ids_NT.device)
    if noise_NTE is not None:  # called as a module, so that ZeRO-3 gathers it
        if rows.media is not None:
            rows.media.refuse_noise()
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
        noise = noise_NTE.to(embeddings.dtype).reshape(len(embeddings), -1, embeddings.shape[-1])
        filling = embeddings.shape[1] - noise.shape[1]  # of a row of whole blocks
        inputs["inputs_embeds"] = embeddings + functional.pad(noise, (0, 0, 0, filling))
    inputs, part = sharing.part_of(model, rows, inputs)
    if rows.experts_NTLK is not None and getattr(model, TAKES_EXPERTS, False):
        inputs[EXPERTS] = part.cut_slots(rows.experts_NTLK.flatten(0, 1), UNKNOWN).unsqueeze(0)
    return inputs, part


def _hidden(model: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The trunk's states, [L, H]: of every slot, padding included."""
    return model.base_model(**inputs)[0].flatten(0, 1)


def of_group(read: TokenLogprobs, own: OwnPositions) -> TokenLogprobs:
    """The numbers of all targets, from those of this rank's part of the rows."""
    names = ("is_greedy_M", "logprobs_M", "log_normalizers_M", "entropies_M", "logits_MV", "collisions_M")
    return read._replace(
        **{name: own.whole(values) for name in names if (values := getattr(read, name)) is not None}  # type: ignore[arg-type]
    )
