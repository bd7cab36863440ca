"""A server whose base reads pictures, by the released client: losses, samples and refusals beside plain transformers'
own forward. Skipped without the package tinker."""

from __future__ import annotations

import pytest
import torch

from tests.support.sent_pictures import WORDS, photo, seeing
from tests.support.training_orders import written_out
from tests.support.training_server import KEY, Running
from tests.support.vision_models import IMAGE_ID
from threestep.plugins.ragged import ragged_rows
from threestep.plugins.tinker.opening import ServerSettings, service_of
from threestep.plugins.tinker.store import Store, load_weights
from threestep.plugins.tinker.wire import RequestBounds
from training.utils.models.own_forward import read_own_forward

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")

BIG, SMALL = photo(1, 84, 56), photo(2, 56, 28, "JPEG")
OTHER = photo(3, 84, 56)  # as many tokens as BIG


class Pictured(Running):
    """A server of a tiny Qwen2-VL."""

    def opened(self, folder, is_full):
        self.seen = seeing("qwen2_vl")
        read_own_forward(self.seen.model, media=self.seen.media.run)
        self.store = Store(folder, {"name": "tiny"})
        return service_of(
            self.seen.model, self.store, ServerSettings(1000, 8, 64, is_full), tokenizer=str(folder), name="tiny",
            bounds=RequestBounds(96, 128, self.seen.media), decode=lambda ids: "", ends=frozenset([1]),
        )  # fmt: skip

    def adapted(self, path):
        """Another model with the adapters of a checkpoint."""
        folder, spec = self.store.checkpoint(path)
        layout, model = self.service.base.layout_of(spec), seeing("qwen2_vl").model
        written_out(model, layout, load_weights(folder, layout))
        return model


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    running = Pictured(tmp_path_factory.mktemp("served"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def service_client(running):
    return tinker.ServiceClient(base_url=running.url, api_key=KEY)


@pytest.fixture
def client(service_client):
    return service_client.create_lora_training_client(base_model="tiny", rank=3, seed=5).result()


def words(seed, count):
    return torch.randint(2, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk_of(seen, picture):
    form = "jpeg" if picture[:2] == b"\xff\xd8" else "png"
    return tinker.types.ImageChunk(data=picture, format=form, expected_tokens=seen.tokens(picture))


def input_of(seen, parts):
    """As renderers make it: runs of tokens, and pictures between them."""
    chunks = []
    for part in parts:
        if isinstance(part, bytes):
            chunks.append(chunk_of(seen, part))
        elif chunks and isinstance(chunks[-1], tinker.EncodedTextChunk):
            chunks[-1].tokens.append(part)
        else:
            chunks.append(tinker.EncodedTextChunk(tokens=[part]))
    return tinker.ModelInput(chunks=chunks)


def datum_of(seen, parts, answer):
    """A loss on the answer alone; targets of pictures are 0, as the cookbook's."""
    ids = [0 if each == IMAGE_ID else each for each in [*seen.ids(parts), *answer]]
    inputs = {"target_tokens": ids[1:], "weights": [0.0] * (len(ids) - 1 - len(answer)) + [1.0] * len(answer)}
    return tinker.Datum(model_input=input_of(seen, [*parts, *answer[:-1]]), loss_fn_inputs=inputs)


def logprobs_of(seen, parts, answer, model):
    read_TV = seen.logprobs([*parts, *answer], model)[-1 - len(answer) : -1]
    return read_TV.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)


EXAMPLES = [([*words(1, 3), BIG, *words(2, 2)], words(3, 3)), ([SMALL, *words(4, 1), OTHER, *words(5, 2)], words(6, 2)),
            (words(7, 4), words(8, 3))]  # fmt: skip


def test_a_loop_learns_from_pictures_and_its_numbers_are_those_of_the_model(running, client):
    data, losses = [datum_of(running.seen, *example) for example in EXAMPLES], []
    assert [datum.model_input.length for datum in data] == [len(datum.loss_fn_inputs["weights"].data) for datum in data]
    for _ in range(4):
        told = client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        losses.append(told.result().metrics["loss:sum"])
    assert losses[-1] < 0.9 * losses[0]
    model = running.adapted(client.save_state("learned").result().path)
    told = client.forward(data, "cross_entropy").result()
    for (parts, answer), output in zip(EXAMPLES, told.loss_fn_outputs, strict=True):
        found = output["logprobs"].to_torch().double()[-len(answer) :]
        torch.testing.assert_close(found, logprobs_of(running.seen, parts, answer, model), rtol=1e-6, atol=1e-6)


def sampled(sampler, prompt, **more):
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    return sampler.sample(prompt, more.pop("num_samples", 1), params, **more)


@pytest.mark.parametrize("mask", [1 << 25, 30])
def test_the_likeliest_tokens_are_the_models_own_continuation(running, client, service_client, mask, monkeypatch):
    """mask: small enough for prompts to be read in parts, of which none cuts a picture."""
    monkeypatch.setattr(ragged_rows, "_MASK_NUMBERS", mask)
    client.forward_backward([datum_of(running.seen, *EXAMPLES[0])], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    path = client.save_weights_for_sampler(f"drawn{mask}").result().path
    sampler, model = service_client.create_sampling_client(model_path=path).result(), running.adapted(path)
    prompts = [[*words(1, 3), BIG, *words(2, 2)], [*words(1, 3), OTHER, *words(2, 2)], words(9, 5),
               [SMALL, *words(4, 1), OTHER], [BIG]]  # fmt: skip
    futures = [sampled(sampler, input_of(running.seen, parts), num_samples=2) for parts in prompts]
    for parts, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            assert sequence.tokens == running.seen.greedy(parts, 6, model)
            known = logprobs_of(running.seen, parts, sequence.tokens, model)
            assert sequence.logprobs == pytest.approx(known.tolist(), abs=2e-5)
    assert len({tuple(future.result().sequences[0].tokens) for future in futures[:2]}) == 2  # they saw their pictures


def test_a_prompt_has_log_probabilities_but_for_its_pictures(running, service_client):
    sampler = service_client.create_sampling_client(base_model="tiny").result()
    parts = [*words(1, 3), BIG, *words(2, 3)]
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    found = sampled(sampler, input_of(running.seen, parts), **asked).result()
    ids = running.seen.ids(parts)
    known = running.seen.logprobs(parts)[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()
    for place, (token, own) in enumerate(zip(ids, [None, *known], strict=True)):
        is_none = place == 0 or token == IMAGE_ID
        assert found.prompt_logprobs[place] == (None if is_none else pytest.approx(own, abs=1e-6))
        assert is_none == (not found.topk_prompt_logprobs[place])


def test_the_token_of_pictures_is_never_drawn(running, service_client):
    sampler = service_client.create_sampling_client(base_model="tiny").result()
    head = running.seen.model.lm_head
    bias = head.register_forward_hook(lambda module, given, logits: logits.index_fill(-1, torch.tensor(IMAGE_ID), 90.0))
    try:
        found = sampled(sampler, input_of(running.seen, words(1, 3))).result()
    finally:
        bias.remove()
    assert IMAGE_ID not in found.sequences[0].tokens


def test_what_cannot_be_read_is_the_clients_error_and_nothing_is_lost(running, client, service_client):
    seen = running.seen
    good = datum_of(seen, *EXAMPLES[0])
    before = client.forward([good], "cross_entropy").result().metrics["loss:sum"]
    cases = [
        ({"data": b"x"}, "datum 0: model_input, chunk 1: expected an image .*, got other bytes"),
        ({"format": "jpeg"}, "format must be png or jpeg, matching the image, got 'jpeg' for a PNG image"),
        ({"expected_tokens": 5}, "expected_tokens must be 6, .* an image of 84 x 56 pixels, got 5"),
    ]
    for change, sentence in cases:
        bad = datum_of(seen, *EXAMPLES[0])
        bad.model_input.chunks[1] = bad.model_input.chunks[1].model_copy(update=change)
        with pytest.raises(tinker.RequestFailedError, match=sentence) as raised:
            client.forward_backward([bad], "cross_entropy").result()
        assert raised.value.category == "user"
        sampler = service_client.create_sampling_client(base_model="tiny").result()
        with pytest.raises(tinker.BadRequestError, match=sentence.replace("datum 0: model_input", "prompt")):
            sampled(sampler, bad.model_input).result()
    pointer = tinker.types.ImageAssetPointerChunk(format="png", location="file:///etc/passwd", expected_tokens=6)
    with pytest.raises(tinker.BadRequestError, match="prompt, chunk 0: an image_asset_pointer is not supported"):
        sampled(sampler, tinker.ModelInput(chunks=[pointer])).result()
    with pytest.raises(tinker.RequestFailedError, match="in this model, the token 90 stands for images; send them as"):
        client.forward([datum_of(seen, [IMAGE_ID, 5], [6])], "cross_entropy").result()
    assert client.forward([good], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(before, rel=1e-12)


def test_requests_with_pictures_are_computed_again_after_a_restart(tmp_path):
    first = Pictured(tmp_path)
    client = tinker.ServiceClient(base_url=first.url, api_key=KEY).create_lora_training_client("tiny", rank=2, seed=1)
    client = client.result()
    data = [datum_of(first.seen, *example) for example in EXAMPLES]
    client.forward_backward(data, "cross_entropy").result()
    port = first.server.port
    first.close()
    second = Pictured(tmp_path, port)
    try:
        told = client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        other = tinker.ServiceClient(base_url=second.url, api_key=KEY).create_lora_training_client("tiny", 2, seed=1)
        other = other.result()
        other.forward_backward(data, "cross_entropy").result()
        again = other.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        assert told.metrics["grad_norm"] == pytest.approx(again.metrics["grad_norm"], rel=1e-9)
    finally:
        second.close()
