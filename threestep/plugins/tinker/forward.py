"""Forwards and backwards of several clients' requests at once, dealt into micro-batches.

The gradient of a request is that of its own loss, which is a sum, so neither the micro-batches nor the rows beside it
change it but for rounding.

N rows, T tokens in a row, K targets of a position, C requests of a micro-batch, P numbers of a client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from threestep.plugins.tinker.losses import LOSSES
from threestep.plugins.tinker.records import ForwardOrder, ForwardResult, GivenMedia, SamplePrompt, TrainingDatum
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import padded_rows
from training.utils.models.attention import model_inputs, sliding_window, text_attention
from training.utils.models.own_forward import head_is_linear
from training.utils.models.token_model import CHUNK_BYTES, at_least_float32

if TYPE_CHECKING:
    from threestep.plugins.tinker.adapters import AdaptedModel, WeightLayout
    from training.utils.contracts.media import SentMedia
    from training.utils.contracts.token_rows import TokenRows


@dataclass
class ForwardJob:
    """A request with the weights that it is computed with. logprobs: of each datum, once it is computed, [T, K].
    gradient_P: the sum over its micro-batches so far; None without a backward."""

    order: ForwardOrder
    weights_P: torch.Tensor
    loss: float = 0.0
    logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    gradient_P: torch.Tensor | None = None

    @property
    def result(self) -> ForwardResult:
        """The answer, once all micro-batches are computed."""
        data = self.order.data
        found = (self.logprobs[place] for place in range(len(data)))
        return ForwardResult(
            self.loss,
            tuple(
                logprobs_TK.squeeze(-1) if datum.is_flat else logprobs_TK
                for datum, logprobs_TK in zip(data, found, strict=True)
            ),
        )


class _JobRow(NamedTuple):
    """A datum of a job: the job's number among those of a forward, and the datum's place in its request."""

    job: int
    place: int
    datum: TrainingDatum


class Forwards:
    """Computes jobs with one model."""

    def __init__(self, adapted: AdaptedModel, pad_id: int, most_tokens: int, media: SentMedia | None = None) -> None:
        """most_tokens: of a micro-batch, padding included; a longer datum is computed alone. media: reads those of
        inputs; None for a model of text."""
        self._adapted, self._pad_id, self._most_tokens, self._media = adapted, pad_id, most_tokens, media
        self._head_is_linear = head_is_linear(adapted.model)

    def run(self, jobs: Sequence[ForwardJob], layout: WeightLayout, has_backward: bool) -> None:
        """Compute jobs of one layout, all with a backward or all without."""
        if not layout.shares_rows and len(jobs) > 1:
            for job in jobs:
                self.run([job], layout, has_backward)
            return
        rows = [
            _JobRow(number, place, datum)
            for number, job in enumerate(jobs)
            for place, datum in enumerate(job.order.data)
        ]
        plan = PlanSettings(ranks=1, max_tokens_per_micro_batch=self._most_tokens)
        for micro_batch in plan_step([len(row.datum) for row in rows], plan)[0]:
            if micro_batch:
                places = sorted(place for (place,) in micro_batch)  # rows of a job follow one another
                self._micro_batch(jobs, [rows[place] for place in places], layout, has_backward)

    def of_prompt(self, prompt: SamplePrompt) -> Any:
        """Return what rows that draw take of the prompt's media; None of a text."""
        if not prompt.media.spans:
            return None
        assert self._media is not None, "it was read here"
        return self._media.of(prompt.media.sent).of_prompts([prompt.media.spans])

    def read(self, weights_P: torch.Tensor | None, layout: WeightLayout | None, prompt: SamplePrompt) -> torch.Tensor:
        """Return the log-probabilities [T, V] of what may follow each token of one row; without adapters for None."""
        with torch.no_grad():
            rows = self._rows([(torch.tensor(prompt.ids), prompt.media)])
            if weights_P is None or layout is None:
                return self._logprobs_TV(rows)
            with self._adapted.adapters(layout, weights_P.unsqueeze(0), [0]):
                return self._logprobs_TV(rows)

    def _logprobs_TV(self, rows: TokenRows) -> torch.Tensor:
        logits_TV = self._adapted.model(**self._inputs(rows)).logits[0]
        return torch.log_softmax(logits_TV.to(at_least_float32(logits_TV.dtype)), dim=-1)

    def _micro_batch(
        self, jobs: Sequence[ForwardJob], rows: Sequence[_JobRow], layout: WeightLayout, has_backward: bool
    ) -> None:
        present = sorted({row.job for row in rows})
        client_of_row = [present.index(row.job) for row in rows]
        stack_CP = torch.stack([jobs[number].weights_P for number in present]).requires_grad_(has_backward)
        with torch.set_grad_enabled(has_backward), self._adapted.adapters(layout, stack_CP, client_of_row):
            logprobs_NTK = self._logprobs(rows)
            losses_N = self._losses(jobs, rows, logprobs_NTK)
            if has_backward:  # inside, since a chunk of the output layer is computed once more
                losses_N.sum().backward()
        for row, logprobs_TK, loss in zip(rows, logprobs_NTK.detach(), losses_N.tolist(), strict=True):
            job, (tokens, targets) = jobs[row.job], row.datum.targets_TK.shape
            job.logprobs[row.place] = logprobs_TK[:tokens, :targets].cpu().clone()
            job.loss += loss
        if has_backward:
            assert stack_CP.grad is not None
            for number, gradient_P in zip(present, stack_CP.grad, strict=True):
                job = jobs[number]
                job.gradient_P = gradient_P.clone() if job.gradient_P is None else job.gradient_P + gradient_P

    def _losses(self, jobs: Sequence[ForwardJob], rows: Sequence[_JobRow], logprobs_NTK: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row, float64 [N]. Rows with one loss and the same settings are computed together."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, row in enumerate(rows):
            order = jobs[row.job].order
            key = (order.loss, tuple(sorted(order.config.items())), tuple(sorted(row.datum.inputs)))
            groups.setdefault(key, []).append(place)
        places, losses = list[int](), list[torch.Tensor]()
        for own in groups.values():
            order, shape = jobs[rows[own[0]].job].order, logprobs_NTK.shape[1:]
            device, loss = logprobs_NTK.device, LOSSES[order.loss]
            own_NTK = logprobs_NTK if len(own) == len(rows) else logprobs_NTK[torch.tensor(own, device=device)]
            inputs = {
                name: _padded([rows[place].datum.inputs[name] for place in own], shape).to(own_NTK)
                for name in rows[own[0]].datum.inputs
            }
            is_target_NTK = _padded([torch.ones_like(rows[place].datum.targets_TK) for place in own], shape).bool()
            each_NTK = loss.of_targets(own_NTK, inputs, {**loss.config, **order.config})
            losses.append(each_NTK.where(is_target_NTK.to(device), 0.0).flatten(1).sum(1, dtype=torch.float64))
            places += own
        back = torch.tensor(places).argsort().to(logprobs_NTK.device)
        return torch.cat(losses)[back]

    def _logprobs(self, rows: Sequence[_JobRow]) -> torch.Tensor:
        """Return the log-probabilities of the rows' targets, [N, T, K]; those of padding are of token 0."""
        token_rows = self._rows((row.datum.ids_T, row.datum.media) for row in rows)
        most = max(row.datum.targets_TK.shape[1] for row in rows)
        shape = torch.Size((token_rows.input_ids_NT.shape[1], most))
        targets_NTK = _padded([row.datum.targets_TK for row in rows], shape).to(self._adapted.model.device)
        model = self._adapted.model
        if not self._head_is_linear:
            return _picked(model(**self._inputs(token_rows)).logits, targets_NTK)
        hidden_NTH = model.base_model(**self._inputs(token_rows))[0]
        head = model.get_output_embeddings()
        tokens = max(1, CHUNK_BYTES // (4 * len(rows) * model.config.get_text_config().vocab_size))
        if tokens >= hidden_NTH.shape[1]:
            return _picked(head(hidden_NTH), targets_NTK)

        def chunk(hidden_NtH: torch.Tensor, targets_NtK: torch.Tensor) -> torch.Tensor:
            return _picked(head(hidden_NtH), targets_NtK)

        parts = [
            checkpoint(chunk, hidden_NtH, targets_NtK, use_reentrant=False)
            for hidden_NtH, targets_NtK in zip(hidden_NTH.split(tokens, 1), targets_NTK.split(tokens, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)

    def _rows(self, inputs: Iterable[tuple[torch.Tensor, GivenMedia]]) -> TokenRows:
        sequences, sent = list[TokenSequence](), list[bytes]()
        for ids_T, media in inputs:
            spans = tuple(replace(span, key=len(sent) + span.key) for span in media.spans)
            sequences.append(TokenSequence(ids_T, torch.zeros_like(ids_T, dtype=torch.bool), spans))
            sent += media.sent
        rows = padded_rows(sequences, self._pad_id)
        if sent:
            assert self._media is not None, "they were read here"
            rows = self._media.of(sent).loaded(rows)
        return rows.to(self._adapted.model.device)

    def _inputs(self, rows: TokenRows) -> dict[str, object]:
        model = self._adapted.model
        inputs = model_inputs(rows, text_attention(model), sliding_window(model))
        return inputs if rows.media is None else inputs | rows.media.inputs(model, rows.input_ids_NT.device)


def _picked(logits_NTV: torch.Tensor, targets_NTK: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each target."""
    logits_NTV = logits_NTV.to(at_least_float32(logits_NTV.dtype))
    return logits_NTV.gather(-1, targets_NTK) - torch.logsumexp(logits_NTV, dim=-1, keepdim=True)


def _padded(parts_TK: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Return the parts as one tensor [N, *shape], filled up with 0."""
    whole = parts_TK[0].new_zeros(len(parts_TK), *shape)
    for place, part in enumerate(parts_TK):
        whole[place, : part.shape[0], : part.shape[1]] = part
    return whole
