"""Forwards of several clients at once beside one client and datum at a time, with adapters written out, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.support.training_orders import filled, order_of, written_out
from threestep.plugins.tinker import forward
from threestep.plugins.tinker.adapters import AdaptedModel
from threestep.plugins.tinker.forward import ForwardJob, Forwards
from threestep.plugins.tinker.losses import LOSSES
from threestep.plugins.tinker.records import ATTENTION, PARTS, LoraSpec, SamplePrompt


def of_reference(read, learned, order):
    """Loss, log-probabilities and gradient, a datum after the other. read: the log-probabilities [T, V] of the datum at
    a place."""
    total, logprobs = 0.0, []
    config = {**LOSSES[order.loss].config, **order.config}
    for place, datum in enumerate(order.data):
        own = read(place, datum).gather(-1, datum.targets_TK)
        inputs = {key: value.double() for key, value in datum.inputs.items()}
        loss = LOSSES[order.loss].of_targets(own, inputs, config).sum()
        loss.backward()
        total += float(loss.detach())
        logprobs.append(own.detach().squeeze(-1) if datum.is_flat else own.detach())
    grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in learned]
    return total, logprobs, torch.cat([grad.flatten() for grad in grads])


def check(job, known, rtol=1e-10, atol=1e-12):
    loss, logprobs, gradient_P = known
    assert job.result.loss == pytest.approx(loss, rel=rtol)
    for own, right in zip(job.result.logprobs, logprobs, strict=True):
        torch.testing.assert_close(own, right, rtol=rtol, atol=atol)
    torch.testing.assert_close(job.gradient_P, gradient_P, rtol=100 * rtol, atol=10 * atol)


@pytest.fixture(params=["llama", "gpt2"])
def family(request):
    return request.param


@pytest.mark.parametrize(("most_tokens", "chunk"), [(10_000, 1 << 28), (14, 1 << 28), (10_000, 4 * VOCABULARY * 8)])
def test_each_client_has_its_own_loss_and_gradient(family, most_tokens, chunk, monkeypatch):
    """Of unequal numbers of rows and lengths, in one micro-batch, in several, and with the output layer in chunks."""
    monkeypatch.setattr(forward, "CHUNK_BYTES", chunk)
    adapted = AdaptedModel(tiny_causal_lm(family, torch.float64).requires_grad_(False))
    layout = adapted.layout(LoraSpec(3, 0))
    orders = [
        order_of(1, "cross_entropy", [5, 3, 8]),
        order_of(2, "ppo", [4], config={"clip_high_threshold": 1.4}),
        order_of(3, "importance_sampling", [6, 7]),
        order_of(4, "cross_entropy", [5, 2], targets=3),
        order_of(5, "dro", [3, 6]),  # whose loss of padding would not be 0
    ]
    jobs = [ForwardJob(order, filled(layout, place)) for place, order in enumerate(orders)]
    Forwards(adapted, 0, most_tokens).run(jobs, layout, has_backward=True)
    for job in jobs:
        model = tiny_causal_lm(family, torch.float64).requires_grad_(False)
        learned = written_out(model, layout, job.weights_P)

        def read(place, datum, model=model):
            return torch.log_softmax(model(input_ids=datum.ids_T.unsqueeze(0)).logits[0], dim=-1)

        check(job, of_reference(read, learned, job.order))


def test_rows_of_equal_numbers_and_a_client_alone_agree(family):
    adapted = AdaptedModel(tiny_causal_lm(family, torch.float64).requires_grad_(False))
    layout = adapted.layout(LoraSpec(2, 0, (ATTENTION,)))
    orders = [order_of(seed, "cross_entropy", [4, 4]) for seed in (1, 2)]
    together = [ForwardJob(order, filled(layout, place)) for place, order in enumerate(orders)]
    Forwards(adapted, 0, 1000).run(together, layout, has_backward=True)
    for job in together:
        alone = ForwardJob(job.order, job.weights_P)
        Forwards(adapted, 0, 1000).run([alone], layout, has_backward=True)
        torch.testing.assert_close(job.gradient_P, alone.gradient_P, rtol=1e-10, atol=1e-12)


def test_a_client_whose_weights_are_not_finite_spoils_no_other():
    adapted = AdaptedModel(tiny_causal_lm("llama", torch.float64).requires_grad_(False))
    layout = adapted.layout(LoraSpec(2, 0))
    orders = [order_of(1, "cross_entropy", [4, 6]), order_of(2, "cross_entropy", [5])]
    broken = ForwardJob(orders[0], torch.full_like(filled(layout, 0), float("nan")))
    whole = ForwardJob(orders[1], filled(layout, 1))
    Forwards(adapted, 0, 1000).run([broken, whole], layout, has_backward=True)
    assert bool(whole.gradient_P.isfinite().all()) and not bool(broken.gradient_P.isfinite().any())


def test_a_forward_alone_has_no_gradient_and_a_prompt_is_read():
    adapted = AdaptedModel(tiny_causal_lm("llama", torch.float64).requires_grad_(False))
    layout = adapted.layout(LoraSpec(2, 0))
    job = ForwardJob(order_of(1, "cross_entropy", [4], has_backward=False), filled(layout, 1))
    forwards = Forwards(adapted, 0, 1000)
    forwards.run([job], layout, has_backward=False)
    assert job.gradient_P is None
    [datum] = job.order.data
    read_TV = forwards.read(job.weights_P, layout, SamplePrompt(tuple(datum.ids_T.tolist())))
    torch.testing.assert_close(read_TV.gather(-1, datum.targets_TK)[:, 0], job.result.logprobs[0])
    base = tiny_causal_lm("llama", torch.float64)(input_ids=datum.ids_T.unsqueeze(0)).logits[0]
    torch.testing.assert_close(
        forwards.read(None, None, SamplePrompt(tuple(datum.ids_T.tolist()))), torch.log_softmax(base, dim=-1)
    )


def test_parts_choose_layers():
    adapted = AdaptedModel(tiny_causal_lm("llama"))
    names = {part: {layer.name for layer in adapted.layout(LoraSpec(2, 0, (part,))).layers} for part in PARTS}
    assert names["head"] == {"lm_head"}
    assert all("self_attn" in name for name in names[ATTENTION]) and all("mlp" in name for name in names["mlp"])
    assert sum(map(len, names.values())) == len(adapted.layers) == 7 * 2 + 1
