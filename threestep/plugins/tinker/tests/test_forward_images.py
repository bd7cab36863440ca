"""Forwards of clients with pictures in some of their data, beside plain transformers, a datum at a time, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.sent_pictures import WORDS, photo, seeing
from tests.support.training_orders import filled, written_out
from threestep.plugins.tinker.adapters import AdaptedModel
from threestep.plugins.tinker.forward import ForwardJob, Forwards
from threestep.plugins.tinker.full_weights import vector_of
from threestep.plugins.tinker.losses import LOSSES
from threestep.plugins.tinker.records import ForwardOrder, GivenMedia, LoraSpec, TrainingDatum
from threestep.plugins.tinker.tests.test_forward import check, of_reference
from threestep.plugins.tinker.wire import RequestBounds, read_chunks

BIG, SMALL = photo(1, 84, 56), photo(2, 56, 28)  # of unequal numbers of tokens


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def family(request):
    return request.param


def words(seed, count):
    return torch.randint(2, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


INPUTS = [
    [[*words(1, 3), BIG, *words(2, 4)], [*words(3, 5)]],
    [[SMALL, *words(4, 2), BIG, *words(5, 3)]],
    [[*words(6, 7)], [*words(7, 2), SMALL]],
]


def chunks_of(parts):
    for part in parts:
        is_text = isinstance(part, int)
        yield ("encoded_text", [part]) if is_text else ("image", {"data": part, "format": "png"})


def order_of(seen, number, loss):
    data = []
    for place, parts in enumerate(INPUTS[number]):
        ids, media = read_chunks(chunks_of(parts), "here", RequestBounds(96, None, seen.media))
        assert ids.tolist() == seen.ids(parts)
        dice = torch.Generator().manual_seed(10 * number + place)
        inputs = {
            "weights": torch.rand(len(ids), 1, generator=dice),
            "logprobs": -3 - torch.rand(len(ids), 1, generator=dice),
            "advantages": torch.randn(len(ids), 1, generator=dice),
        }
        targets = torch.randint(2, WORDS, (len(ids), 1), generator=dice)
        given = {name: inputs[name] for name in LOSSES[loss].needs}
        data.append(TrainingDatum(torch.from_numpy(ids), targets, given, True, media))
    return ForwardOrder(tuple(data), loss)


def check_beside(seen, learned, job, number):
    """learned: the weights of the plain model."""
    known = of_reference(lambda place, datum: seen.logprobs(INPUTS[number][place], seen.model), learned, job.order)
    check(job, known, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("most_tokens", [10_000, 17])
def test_each_client_has_its_own_loss_and_gradient(family, most_tokens):
    seen = seeing(family)
    adapted = AdaptedModel(seen.model)
    assert not any("visual" in layer.name or "vision" in layer.name for layer in adapted.layers)
    layout = adapted.layout(LoraSpec(3, 0))
    orders = [order_of(seen, number, loss) for number, loss in enumerate(("cross_entropy", "ppo", "cross_entropy"))]
    jobs = [ForwardJob(order, filled(layout, place)) for place, order in enumerate(orders)]
    Forwards(adapted, 0, most_tokens, seen.media).run(jobs, layout, True)
    for number, job in enumerate(jobs):
        other = seeing(family)
        check_beside(other, written_out(other.model, layout, job.weights_P), job, number)


def test_all_weights_learn_from_pictures_the_tower_too(capsys):
    seen = seeing("qwen2_vl")
    adapted = AdaptedModel(seen.model)
    assert (
        "no adapters on layers named 0, 2, fc1, fc2, proj, qkv: they do not belong to the language"
        in capsys.readouterr().err
    )
    layout = adapted.layout(LoraSpec(0, 0))
    job = ForwardJob(order_of(seen, 0, "cross_entropy"), vector_of(seen.model, torch.float64))
    Forwards(adapted, 0, 10_000, seen.media).run([job], layout, True)
    other = seeing("qwen2_vl")
    check_beside(other, list(other.model.requires_grad_(True).parameters()), job, 0)
    assert any(weight.grad.abs().max() > 0 for name, weight in other.model.named_parameters() if "patch_embed" in name)


def test_a_text_is_computed_as_without_pictures_beside_it():
    """To the bit in one layout: the row beside it has as many tokens."""
    seen = seeing("qwen2_vl")
    adapted = AdaptedModel(seen.model)
    layout, forwards = adapted.layout(LoraSpec(3, 0)), Forwards(adapted, 0, 10_000, seen.media)
    text, pictured = order_of(seen, 2, "cross_entropy").data[:1], order_of(seen, 1, "cross_entropy").data
    ids_T = pictured[0].ids_T.masked_fill(pictured[0].ids_T == seen.media.placeholder_id, 5)
    plain = replace(pictured[0], ids_T=ids_T, media=GivenMedia())
    found = []
    for beside in (pictured, (plain,)):
        jobs = [ForwardJob(ForwardOrder(data, "cross_entropy"), filled(layout, 1)) for data in (text, beside)]
        forwards.run(jobs, layout, True)
        found.append(jobs[0])
    assert torch.equal(found[0].result.logprobs[0], found[1].result.logprobs[0])
    torch.testing.assert_close(found[0].gradient_P, found[1].gradient_P, rtol=1e-12, atol=1e-14)
