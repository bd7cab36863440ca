"""Models as steps read them: log-probabilities of given tokens, and scalars at given positions.

Both are modules whose forward takes a `TokenRows`, so that ZeRO-3 gathers each weight where it is used. Logits are
computed only at predicting positions, and not all of them are in memory at once. A loss needs one number per token, and
a token has as many logits as the vocabulary: 1 MB in float32 at 256,000 tokens. `TargetHead` computes logits in chunks
of rows and turns them into probabilities in place. If all rows fit one chunk, their probabilities are saved for the
backward; otherwise it computes each chunk's logits again (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989, but
for any loss: the log-probabilities may have any gradient). torch's `linear_cross_entropy` gives only a loss, and was
slower where we measured it (docs/lab_book.md).

Ranks that share rows are given the same ones, compute a part of them, and return the numbers of all; gradients of those
of its own part reach a rank's weights.

N rows, T tokens in a row, M tokens to be predicted, U different ones of these, B sequences, H hidden size,
V vocabulary, E width of the input embeddings, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from training.utils.contracts.documents import UNKNOWN
from training.utils.models.attention import model_inputs, sliding_window, text_attention
from training.utils.models.own_forward import head_is_linear
from training.utils.models.row_sharing import ALONE
from training.utils.models.weights import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.row_sharing import OwnPositions, RowPart, RowSharing


# Float32 logits of one chunk on a CPU: 512 rows at a vocabulary of 128,000.
CHUNK_MB = 256
CHUNK_BYTES = CHUNK_MB * 2**20
# On a GPU a chunk takes at most this share of what is free as a run starts, and no more rows than these. Each reads and
# writes the whole gradient of the head's weight, about 10 bytes a weight beside 6 FLOPs a weight and row: at 512 rows
# half as long as the products, by the rates of an H100 (3e12 byte/s, 5e14 FLOP/s); at 4,096 a fifteenth.
_FREE_SHARE, _ENOUGH_ROWS = 1 / 64, 4096
_LEAST_MB, _MOST_MB = 32, 1024


class Readout(NamedTuple):
    """Reads of the output layer. entropies, logits, collisions: those of TokenLogprobs, each for its price."""

    temperature: float = 1.0
    entropies: bool = False
    logits: bool = False
    collisions: bool = False


PLAIN = Readout()


class TokenLogprobs(NamedTuple):
    """After division by the temperature; float32, and float64 from float64 models.

    logprobs_M: log p(target | what it may see).
    log_normalizers_M: log of the sum of the exponentiated logits (a z-loss holds it near 0).
    is_greedy_M: bool, the target's logit is larger than every other one; in a tie it is not.
    entropies_M, logits_MV: in nats; of the whole vocabulary; None unless asked for.
    collisions_M: the sum of the squared probabilities, that two draws agree; without a gradient; None unless asked for.
    beside: what `after_trunk` returned; compared: what `compare` made of the head. None without them.
    """

    logprobs_M: torch.Tensor
    log_normalizers_M: torch.Tensor
    is_greedy_M: torch.Tensor
    entropies_M: torch.Tensor | None
    logits_MV: torch.Tensor | None = None
    collisions_M: torch.Tensor | None = None
    beside: Any = None
    compared: Any = None

    def listed(self, read_M: torch.Tensor | None) -> TokenLogprobs:
        """Return the same for each of `TokenRows.target_ids_M`, from the numbers of `TokenRows.reads`. read_M: of the
        rows; None returns it as it is."""
        if read_M is None:
            return self

        def of_owners(part: Any) -> Any:
            return part.index_select(0, read_M) if isinstance(part, torch.Tensor) else part

        return TokenLogprobs(*map(of_owners, self))


# Given states, the output layer that reads them, whole, and the bytes of a chunk's logits.
AtHead = Callable[[torch.Tensor, "TargetHead", int], Any]


class TargetHead(nn.Module):
    """A model's output layer, read at given tokens. It holds the layer's weight and bias as its parameters, because
    ZeRO-3 gathers a parameter for the module that holds it, forward and backward."""

    def __init__(self, head: nn.Linear, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self._chunk_bytes = chunk_bytes

    def forward(
        self,
        hidden_MH: torch.Tensor,
        target_ids_M: torch.Tensor,
        readout: Readout = PLAIN,
        at_head: AtHead | None = None,
    ) -> TokenLogprobs:
        """See TokenLogprobs. at_head: makes `compared`."""
        compared = None if at_head is None else at_head(hidden_MH, self, self._chunk_bytes)
        if readout.logits:
            logits_MV = functional.linear(hidden_MH, self.weight, self.bias)
            return read_logits(logits_MV, target_ids_M, readout)._replace(compared=compared)
        vocabulary = whole_shape(self.weight)[0]
        chunk = max(1, self._chunk_bytes // (4 * vocabulary))
        read = _TargetLogprobs.apply(hidden_MH, self.weight, self.bias, target_ids_M, readout, chunk)
        logprobs_M, log_normalizers_M, is_greedy_M, entropies_M, collisions_M = read
        return TokenLogprobs(
            logprobs_M,
            log_normalizers_M,
            is_greedy_M,
            entropies_M if readout.entropies else None,
            collisions_M=collisions_M if readout.collisions else None,
            compared=compared,
        )

    def read_alone(self, hidden_MH: torch.Tensor, target_ids_M: torch.Tensor) -> TokenLogprobs:
        """Return the same at temperature 1, with gradients for `hidden_MH` and none for the layer. Under ZeRO-3 the
        layer must be whole until the backward is over."""
        bias = None if self.bias is None else self.bias.detach()
        chunk = max(1, self._chunk_bytes // (4 * self.weight.shape[0]))
        given = (hidden_MH, self.weight.detach(), bias, target_ids_M, PLAIN, chunk)
        logprobs_M, log_normalizers_M, is_greedy_M, *_ = _TargetLogprobs.apply(*given)
        return TokenLogprobs(logprobs_M, log_normalizers_M, is_greedy_M, None)


def chunk_mb_for(free_bytes: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the MiB of float32 logits in one chunk, a power of two, on a GPU with `free_bytes` free as a run starts.

    dtype: the model's. A logit takes 4 bytes in float32, and as many as `dtype` has if that is narrower. Powers of two:
    GPUs of one kind choose alike, though some of their memory may be taken.

    80e9 bytes, 128,256 tokens, bfloat16: 1/64 of it, of 6 bytes a logit 4 for float32, is 794 MiB: 512 of them, 1,046
    rows.
    """
    own = dtype.itemsize if dtype.itemsize < 4 else 0
    affordable = int(free_bytes * _FREE_SHARE) * 4 // (4 + own)
    useful = _ENOUGH_ROWS * 4 * vocabulary
    chosen = 1 << max(0, (min(affordable, useful) // 2**20).bit_length() - 1)
    return min(max(chosen, _LEAST_MB), _MOST_MB)


def read_logits(logits_MV: torch.Tensor, target_ids_M: torch.Tensor, readout: Readout = PLAIN) -> TokenLogprobs:
    """Return the same as TargetHead, and the logits in any case, from logits that are in memory."""
    logits_MV = logits_MV.to(at_least_float32(logits_MV.dtype))
    if readout.temperature != 1.0:
        logits_MV = logits_MV / readout.temperature
    log_norm_M = torch.logsumexp(logits_MV, dim=-1)
    target_logit_M = logits_MV.gather(-1, target_ids_M.unsqueeze(-1)).squeeze(-1)
    entropies_M = None
    if readout.entropies:  # H = log Z - sum p * logit
        entropies_M = log_norm_M - (torch.softmax(logits_MV, dim=-1) * logits_MV).sum(-1)
    largest_M1 = logits_MV.detach().amax(dim=-1, keepdim=True)
    is_only_M = (logits_MV.detach() == largest_M1).sum(dim=-1) == 1
    is_greedy_M = (target_logit_M >= largest_M1.squeeze(-1)) & is_only_M
    collisions_M = None
    if readout.collisions:  # log sum p^2 = log sum exp 2 l - 2 log Z
        collisions_M = (torch.logsumexp(2.0 * logits_MV.detach(), dim=-1) - 2.0 * log_norm_M.detach()).exp()
    return TokenLogprobs(target_logit_M - log_norm_M, log_norm_M, is_greedy_M, entropies_M, logits_MV, collisions_M)


class _TargetLogprobs(torch.autograd.Function):
    """See TargetHead. With l the logits over the temperature, z = log sum exp l, p = exp(l - z), t the target and
    H = z - sum p l the entropy:  d logprob / d l_v = [v = t] - p_v,  d z / d l_v = p_v,  and
    d H / d l_v = -p_v (l_v - z + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_M: torch.Tensor,
        readout: Readout,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts: list[tuple[torch.Tensor, ...]] = []
        kept_MV = None
        for begin in range(0, max(1, len(hidden_MH)), chunk):
            here = slice(begin, begin + chunk)
            logits_CV = _logits(hidden_MH[here], weight_VH, bias_V, readout.temperature)
            targets_C1 = target_ids_M[here].unsqueeze(-1)
            target_C1 = logits_CV.gather(-1, targets_C1)
            # Of the others, in one pass: a target that shares the largest logit is no first choice.
            others_C1 = logits_CV.scatter_(-1, targets_C1, -torch.inf).amax(dim=-1, keepdim=True)
            logits_CV.scatter_(-1, targets_C1, target_C1)
            most_C1, target_C = torch.maximum(target_C1, others_C1), target_C1.squeeze(-1)
            raised_CV = (logits_CV - most_C1 if readout.entropies else logits_CV.sub_(most_C1)).exp_()
            sum_C1 = raised_CV.sum(dim=-1, keepdim=True)
            z_C = (most_C1 + sum_C1.log()).squeeze(-1)
            entropy_C = z_C
            if readout.entropies:
                entropy_C = z_C - logits_CV.mul_(raised_CV).sum(dim=-1) / sum_C1.squeeze(-1)
            collision_C = z_C
            if readout.collisions:
                collision_C = (torch.linalg.vector_norm(raised_CV, dim=-1) / sum_C1.squeeze(-1)).square()
            parts.append((target_C - z_C, z_C, target_C > others_C1.squeeze(-1), entropy_C, collision_C))
            if chunk >= len(hidden_MH) and any(ctx.needs_input_grad[:3]):
                kept_MV = raised_CV.div_(sum_C1)
        logprobs_M, z_M, is_greedy_M, entropies_M, collisions_M = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.mark_non_differentiable(is_greedy_M, collisions_M)
        ctx.save_for_backward(hidden_MH, target_ids_M, z_M, entropies_M)
        # Not by save_for_backward: under ZeRO-3 a parameter's storage comes and goes.
        ctx.head, ctx.kept_MV, ctx.temperature, ctx.chunk = (weight_VH, bias_V), kept_MV, readout.temperature, chunk
        return logprobs_M, z_M, is_greedy_M, entropies_M, collisions_M

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs_M, grad_z_M, _, grad_entropies_M, _ = grads
        hidden_MH, target_ids_M, z_M, entropies_M = ctx.saved_tensors
        weight_VH, bias_V = ctx.head
        grad_hidden_MH = torch.empty_like(hidden_MH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = grad_bias_V = None
        # Probabilities become gradients in place, so a second backward computes them again.
        kept_MV, ctx.kept_MV = ctx.kept_MV, None
        for begin in range(0, max(1, len(hidden_MH)), ctx.chunk):
            here = slice(begin, begin + ctx.chunk)
            if kept_MV is not None and grad_entropies_M is None:
                probability_CV, shift_CV = kept_MV, None
            else:
                logits_CV = _logits(hidden_MH[here], weight_VH, bias_V, ctx.temperature).sub_(z_M[here].unsqueeze(-1))
                shift_CV = None
                if grad_entropies_M is not None:
                    shift_CV = (logits_CV + entropies_M[here].unsqueeze(-1)).mul_(grad_entropies_M[here].unsqueeze(-1))
                probability_CV = logits_CV.exp_()
            scale_C = torch.zeros_like(z_M[here])
            if grad_logprobs_M is not None:
                scale_C -= grad_logprobs_M[here]
            if grad_z_M is not None:
                scale_C += grad_z_M[here]
            scale_C1 = scale_C.unsqueeze(-1)
            grad_CV = probability_CV.mul_(scale_C1 if shift_CV is None else scale_C1 - shift_CV)
            if grad_logprobs_M is not None:
                grad_CV.scatter_add_(-1, target_ids_M[here].unsqueeze(-1), grad_logprobs_M[here].unsqueeze(-1))
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(hidden_MH.dtype)
            if grad_hidden_MH is not None:
                grad_hidden_MH[here] = grad_CV @ weight_VH
            if ctx.needs_input_grad[1]:
                grad_weight_VH = plus_product(grad_weight_VH, grad_CV.t(), hidden_MH[here])
            if ctx.needs_input_grad[2]:
                part_V = grad_CV.sum(dim=0, dtype=at_least_float32(grad_CV.dtype))
                grad_bias_V = part_V if grad_bias_V is None else grad_bias_V.add_(part_V)
        grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_MH, grad_weight_VH, grad_bias_V, None, None, None, None


def plus_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return total + left @ right, in place where it can; several products in half precision add up in float32."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype == at_least_float32(left.dtype):
        return total.addmm_(left, right)
    return total.to(at_least_float32(total.dtype)).add_(left @ right)


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Return new logits over the temperature, in float32 (or float64), which the caller may overwrite."""
    logits_CV = functional.linear(hidden_CH, weight_VH, bias_V)
    logits_CV = logits_CV.to(at_least_float32(logits_CV.dtype))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# True as an attribute of a model whose layers take `rows.experts_NTLK` by this name.
TAKES_EXPERTS = "_threestep_takes_experts"
EXPERTS = "experts_NTLK"


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities of the target tokens.

    Where its logits are one linear layer on its last hidden state, only those of predicting positions are computed.

    chunk_mb: MiB of float32 logits that are computed at a time (`TargetHead`); 0 for the default of a CPU
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
