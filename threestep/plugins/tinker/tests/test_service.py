"""The whole server by the released client, in this process: losses, samples, states and errors beside the model's own
forward; and requests that no client sends. Skipped without the package tinker."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.support.training_server import KEY, Running

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("served"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def service_client(running):
    return tinker.ServiceClient(base_url=running.url, api_key=KEY)


@pytest.fixture(scope="module")
def client(service_client):
    return service_client.create_lora_training_client(base_model="tiny", rank=3, seed=5).result()


def data(seed, count=3):
    dice, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (int(torch.randint(3, 9, (), generator=dice)) + 1,), generator=dice).tolist()
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return found


def logprobs_of(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)


def test_a_loop_learns_and_its_numbers_are_those_of_the_model(running, client):
    losses = []
    for _ in range(5):
        told = client.forward_backward(data(1), "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        losses.append(told.result().metrics["loss:sum"])
    assert losses[-1] < 0.9 * losses[0]
    model = running.adapters(client.save_state("learned").result().path)
    told = client.forward(data(1), "cross_entropy").result()
    for datum, output in zip(data(1), told.loss_fn_outputs, strict=True):
        ids = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
        torch.testing.assert_close(
            output["logprobs"].to_torch().double(), logprobs_of(model, ids), rtol=1e-6, atol=1e-6
        )


def test_a_loss_of_the_clients_own_is_that_loss(client):
    def halves(given, logprobs):
        return sum((each**2).sum() for each in logprobs) / 2, {"count:sum": float(len(given))}

    plain = client.forward(data(2), "cross_entropy").result()
    wanted = sum(float((each["logprobs"].to_torch() ** 2).sum()) for each in plain.loss_fn_outputs) / 2
    told = client.forward_backward_custom(data(2), halves).result()
    assert told.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5) and told.metrics["count:sum"] == 3.0
    client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()


def sampled(sampler, **more):
    params = {name: more.pop(name) for name in ("max_tokens", "seed", "stop", "temperature") if name in more}
    prompt = tinker.ModelInput.from_ints([5, 6, 7])
    return sampler.sample(
        prompt, more.pop("num_samples", 1), tinker.SamplingParams(**{"max_tokens": 6, "stop": [], **params}), **more
    ).result()


def test_samples_have_the_log_probabilities_of_the_model(running, client, service_client):
    path = client.save_weights_for_sampler("first").result().path
    sampler = service_client.create_sampling_client(model_path=path).result()
    model = running.adapters(path)
    found = sampled(sampler, num_samples=4, seed=3, include_prompt_logprobs=True, topk_sample_logprobs=2)
    for sequence in found.sequences:
        whole = logprobs_of(model, [5, 6, 7, *sequence.tokens])
        torch.testing.assert_close(torch.tensor(sequence.logprobs).double(), whole[2:], rtol=1e-5, atol=1e-5)
        assert sequence.stop_reason == "length" and len(sequence.tokens) == 6
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) > 1
    assert found.prompt_logprobs[0] is None
    assert found.prompt_logprobs[1:] == pytest.approx(logprobs_of(model, [5, 6, 7]).tolist(), abs=1e-5)
    again = sampled(sampler, num_samples=4, seed=3)
    assert [each.tokens for each in again.sequences] == [each.tokens for each in found.sequences]
    first = found.sequences[0].tokens
    [stopped] = sampled(sampler, seed=3, stop=[first[-1]]).sequences
    assert stopped.tokens == first[: first.index(first[-1]) + 1] and stopped.stop_reason == "stop"
    [stopped] = sampled(sampler, seed=3, stop=chr(97 + first[0] % 26)).sequences
    assert stopped.tokens == first[:1] and stopped.stop_reason == "stop"


def test_samplers_of_several_clients_and_of_the_base_draw_at_once(running, client, service_client):
    other = service_client.create_lora_training_client(base_model="tiny", rank=3, seed=9).result()
    other.forward_backward(data(7), "cross_entropy").result()
    other.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    mine, theirs = (each.save_weights_and_get_sampling_client().result() for each in (client, other))
    base = service_client.create_sampling_client(base_model="tiny").result()
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=8, seed=1, stop=[])
    futures = [each.sample(prompt, 2, params) for each in (mine, theirs, base)]
    together = [[sequence.logprobs for sequence in future.result().sequences] for future in futures]
    for each, known in zip((mine, theirs, base), together, strict=True):
        alone = [sequence.logprobs for sequence in each.sample(prompt, 2, params).result().sequences]
        for one, two in zip(alone, known, strict=True):
            assert one == pytest.approx(two, abs=1e-5)
    assert together[0] != together[1] != together[2]
    scored = logprobs_of(running.model, [5, 6, 7]).tolist()
    assert base.compute_logprobs(prompt).result()[1:] == pytest.approx(scored, abs=1e-5)


def test_a_state_makes_a_client(client, service_client):
    client.forward_backward(data(3), "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    path = client.save_state("whole").result().path
    copy = service_client.create_training_client_from_state_with_optimizer(path).result()
    assert copy.get_info().lora_rank == 3 and copy.model_id != client.model_id
    figures = []
    for each in (client, copy):
        each.forward_backward(data(4), "cross_entropy").result()
        each.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        figures.append(each.forward(data(4), "cross_entropy").result().metrics["loss:sum"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-12)


def test_clients_and_checkpoints_are_listed_and_a_session_ends(running):
    service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    client = service.create_lora_training_client("tiny", rank=2, user_metadata={"renderer": "plain"}).result()
    paths = [client.save_state("one").result().path, client.save_weights_for_sampler("two").result().path]
    rest = tinker.RestClient(base_url=running.url, api_key=KEY)
    run = rest.get_training_run_by_tinker_path(paths[0]).result()
    assert (run.base_model, run.is_lora, run.lora_rank) == ("tiny", True, 2)
    assert run.user_metadata == {"renderer": "plain"}
    assert [run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path] == paths
    assert rest.get_weights_info_by_tinker_path(paths[0]).result().lora_rank == 2
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    assert [each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints] == paths[1:]
    with pytest.raises(tinker.BadRequestError, match="this server has no weights"):
        rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    with pytest.raises(tinker.NotFoundError, match="there is no training client 'other' here"):
        rest.get_training_run("other").result()
    service.close("success").result()


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (lambda client, service: client.forward_backward(data(1), "gspo"), "loss_fn must be one of cross_entr"),
        (lambda client, service: client.save_state("a b"), "a checkpoint's name may have at most 200 letters"),
        (lambda client, service: service.create_lora_training_client(base_model="large"),
         "this server has no base model 'large', only 'tiny'"),
        (lambda client, service: service.create_training_client_from_state("tinker://a/weights/b"),
         "this server has no weights 'tinker://a/weights/b'"),
    ],
)  # fmt: skip
def test_mistakes_reach_the_client_in_words(client, service_client, work, sentence):
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        work(client, service_client).result()
    assert client.forward(data(1), "cross_entropy").result().metrics["loss:sum"] > 0


def test_requests_that_no_client_sends_are_refused(running, client):
    ask, own = running.ask, {"model_id": client.model_id, "seq_id": 10**9}
    cases = [
        (ask("healthz", b"", {"x-api-key": "tml-other"}, "GET"), 401, "this server needs the key that it printed"),
        (ask("nowhere", {}), 404, "there is no nowhere here"),
        (ask("../nowhere", {}, method="GET"), 404, "here"),
        (ask("create_session", [1]), 400, "the body must be an object"),
        (ask("create_session", b"{"), 400, "the body must be JSON"),
        (ask("forward_backward", {}), 415, "forward_backward needs an uncompressed application/x-protobuf body"),
        (
            ask("optim_step", b"x", {"Content-Type": "application/x-protobuf"}),
            415,
            "optim_step needs an uncompressed JSON body",
        ),
        (ask("forward_backward", b"\xff", {"Content-Type": "application/x-protobuf"}), 400, "in protobuf"),
        (ask("optim_step", {**own, "seq_id": 0}), 400, "seq_id must be a whole number of at least 1, got 0"),
        (ask("optim_step", own), 400, "the next one, got 1000000000; number requests in order"),
        (ask("optim_step", {"model_id": "a/../b", "seq_id": 1}), 404, "there is no training client 'a/../b' here"),
        (ask("create_model", {"session_id": "0" * 32}), 410, "there is no session"),
        (ask("session_heartbeat", {"session_id": "x"}), 410, "there is no session 'x' here"),
        (ask("asample", {"sampling_session_id": "x", "seq_id": 1}), 404, "there is no sampling session 'x' here"),
        (ask("retrieve_future", {"request_id": "x"}), 410, "there is no request 'x' here"),
        (ask("retrieve_future", {"request_id": f"{client.model_id}:99999"}), 410, "there is no request 99999 of"),
    ]
    for (status, body), wanted, sentence in cases:
        assert (status, sentence in json.loads(body)["error"]["message"]) == (wanted, True), body
    assert client.forward(data(1), "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_server_that_starts_again_goes_on(tmp_path):
    first = Running(tmp_path)
    port = first.server.port
    client = tinker.ServiceClient(base_url=first.url, api_key=KEY).create_lora_training_client("tiny", rank=2).result()
    client.forward_backward(data(1), "cross_entropy").result()
    first.close()
    second = Running(tmp_path, port)
    figures = client.optim_step(tinker.AdamParams(learning_rate=0.05)).result().metrics
    assert figures["grad_norm"] > 0
    assert client.forward(data(1), "cross_entropy").result().metrics["loss:sum"] > 0
    second.close()


def test_all_weights_are_trained_and_drawn_from(tmp_path):
    """Beside a plain loop on the model itself; a state goes into another client, and the base stays."""
    running = Running(tmp_path, is_full=True)
    service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    client, second = (service.create_lora_training_client("tiny", rank=2).result() for _ in range(2))
    assert client.get_info().is_lora is False and client.get_info().lora_rank is None
    model = tiny_causal_lm("llama", torch.float64)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(3):
        told = [each.forward_backward(data(step), "cross_entropy") for each in (client, second)]
        client.optim_step(tinker.AdamParams(learning_rate=0.01, eps=1e-8)).result()
        adam.zero_grad()
        total = 0.0
        for datum in data(step):
            ids = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
            loss = -logprobs_of(model, ids).sum()
            loss.backward()
            total += loss.item()
        adam.step()
        assert told[0].result().metrics["loss:sum"] == pytest.approx(total, rel=1e-12)
    model.requires_grad_(False)
    path = client.save_weights_for_sampler("full").result().path
    samplers = [
        service.create_sampling_client(model_path=path).result(),
        service.create_sampling_client(base_model="tiny").result(),
    ]
    futures = [each.sample(tinker.ModelInput.from_ints([5, 6, 7]), 2, tinker.SamplingParams(max_tokens=4, stop=[]))
               for each in samplers]  # fmt: skip
    for future, known in zip(futures, (model, running.model), strict=True):
        for sequence in future.result().sequences:
            whole = logprobs_of(known, [5, 6, 7, *sequence.tokens])
            torch.testing.assert_close(torch.tensor(sequence.logprobs).double(), whole[2:], rtol=1e-5, atol=1e-5)
    loaded = type(model).from_pretrained(running.store.checkpoint(path)[0], dtype=torch.float64)
    for own, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(own, theirs.detach(), rtol=1e-10, atol=1e-12)
    copy = service.create_training_client_from_state(client.save_state("whole").result().path).result()
    figures = [each.forward(data(9), "cross_entropy").result().metrics["loss:sum"] for each in (client, copy)]
    assert figures[0] == figures[1]
    running.close()
