"""Bodies of the Tinker API: what is read of them, what is refused and in which words."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
import torch

from threestep.plugins.tinker import wire
from threestep.plugins.tinker.records import (
    AdamOrder,
    ForwardResult,
    LoadOrder,
    LoraSpec,
    PromptReading,
    SampledPrompt,
    SampledSequence,
    SaveOrder,
    StopRule,
    WrongRequest,
)
from threestep.plugins.tinker.store import StoredMessage

BOUNDS = wire.RequestBounds(100, 16)
HEAD = {"model_id": "m", "seq_id": 1}


def read(kind, /, **body):
    return wire.read_order(StoredMessage(json.dumps({**HEAD, **body}).encode(), False, kind), BOUNDS)


def sample(**body):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return wire.sample_of(wire.Fields({"prompt": prompt, "sampling_params": {}, **body}, "asample"), BOUNDS)


def test_requests_in_json_are_records():
    assert read(wire.STEP, adam_params={}) == AdamOrder()
    given = {"learning_rate": 1, "beta1": 0.5, "beta2": 0.6, "eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 2}
    assert read(wire.STEP, adam_params=given, type="optim_step") == AdamOrder(1.0, 0.5, 0.6, 1e-3, 0.1, 2.0)
    assert read(wire.SAVE, path="a", overwrite=True) == SaveOrder("a", overwrite=True)
    assert read(wire.SAVE_SAMPLER, path="a", kind="snapshot") == SaveOrder("a", for_sampling=True)
    unnamed = read(wire.SAVE_SAMPLER, sampling_session_seq_id=4)
    assert unnamed == SaveOrder(None, for_sampling=True, session_number=4)
    assert read(wire.LOAD, path="tinker://x", optimizer=True) == LoadOrder("tinker://x", True)
    assert wire.lora_of({"rank": 8}, lambda: 9) == LoraSpec(8, 9)
    assert wire.lora_of({"rank": 8, "seed": 3, "train_mlp": False}, lambda: 9) == LoraSpec(8, 3, ("attention", "head"))


@pytest.mark.parametrize("body", [b"", b"\x00", b"[" * 100_000, b"9" * 6000, b"\xff"])
def test_a_stored_request_that_is_no_json_is_a_mistake(body):
    with pytest.raises(WrongRequest, match="expects JSON|expects an object"):
        wire.read_order(StoredMessage(body, False, wire.STEP), BOUNDS)


def test_requests_for_sequences_are_records():
    plain = sample()
    assert (plain.prompt.ids, plain.samples, plain.most_tokens, plain.stop) == ((5, 6), 1, 14, StopRule())
    params = {"max_tokens": 3, "seed": 7, "temperature": 0, "top_k": 4, "top_p": 0.5, "stop": "x"}
    full = sample(sampling_params=params, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=2,
                  topk_sample_logprobs=3, prompt_logprobs_last_n=1, prompt_alt_tokens_k=0)  # fmt: skip
    assert (full.samples, full.most_tokens, full.temperature, full.top_k, full.top_p) == (2, 3, 0.0, 4, 0.5)
    assert (full.seed, full.stop, full.read, full.top_sample) == (7, StopRule((), ("x",)), PromptReading(True, 1, 2), 3)
    assert sample(sampling_params={"stop": [], "top_k": -1}).stop == StopRule(())
    assert sample(sampling_params={"stop": [3, 4]}).stop == StopRule((3, 4))


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (lambda: read(wire.STEP, adam_params={"beta1": 1}), "'beta1' expects a number from 0 to 1, got 1"),
        (lambda: read(wire.STEP, adam_params={"eps": "x"}), "'eps' expects a finite number, got 'x'"),
        (lambda: read(wire.STEP, adam_params={"speed": 1}), "adam_params: 'speed' is not supported; leave it out"),
        (lambda: read(wire.STEP, optimizer_params={"type": "dimuon"}), "'optimizer_params' is not supported"),
        (lambda: read(wire.STEP, adam_params=[1]), "adam_params must be an object, got list"),
        (lambda: read(wire.SAVE), "'path' expects a text, got nothing"),
        (lambda: read(wire.SAVE, path="a", overwrite=1), "'overwrite' expects true or false, got 1"),
        (lambda: read(wire.SAVE_SAMPLER, path="a", kind="inflight"), "'kind' must be 'snapshot', got 'inflight'"),
        (lambda: read(wire.LOAD, path="a", optimizer=True, weights_access_token="x"), "'weights_access_token' is not"),
        (lambda: wire.check_optimizer({"type": "dimuon"}), "optimizer_config must have type 'adamw', got 'dimuon'"),
        (lambda: wire.lora_of({"rank": 0}, int), "'rank' expects a number from 1 to 1024, got 0"),
        (lambda: wire.lora_of({"rank": True}, int), "'rank' expects a whole number, got True"),
        (lambda: sample(num_samples=0), "'num_samples' expects a number from 1 to 4096, got 0"),
        (lambda: sample(sampling_params={"max_tokens": 15}), "leaves room for 14 tokens, not 15; shorten"),
        (lambda: sample(sampling_params={"stop": [True]}), r"stop must be texts or token ids, got \[True\]"),
        (lambda: sample(sampling_params={"top_p": 0}), "'top_p' expects a number from 1e-06 to 1, got 0"),
        (lambda: sample(prompt={"chunks": [{"tokens": [1.5]}]}), "encoded_text chunks with lists of token ids"),
        (lambda: sample(prompt={"chunks": [{"tokens": [100]}]}), "prompt must be ids from 0 to 99, got 100"),
        (lambda: sample(prompt={"chunks": [{"tokens": []}]}), "prompt must have at least one token, got none"),
        (lambda: sample(prompt={"chunks": [{"type": "dmel"}]}),
         "prompt, chunk 0: expected encoded_text, got dmel; only text is trained on"),
        (lambda: sample(prompt_alt_tokens_k=3), "'prompt_alt_tokens_k' is not supported"),
        (lambda: sample(record_stability_info=True), "'record_stability_info' is not supported"),
        (lambda: sample(target_prompt_logprobs={"data": []}), "'target_prompt_logprobs' is not supported"),
    ],
)  # fmt: skip
def test_wrong_requests_are_told_in_a_sentence(work, sentence):
    with pytest.raises(WrongRequest, match=sentence):
        work()


# --- protobuf, by the released client's messages


@pytest.fixture
def messages():
    pytest.importorskip("tinker", reason="the package tinker is not installed")
    return wire.messages()


def tensor(messages, values, kind=1):
    values = np.asarray(values, {1: np.float32, 2: np.int64}[kind])
    return messages.Tensor(dense=values.tobytes(), dtype=kind, shape=values.shape)


def request(messages, ids=(5, 6, 7), loss="cross_entropy", **inputs):
    body = messages.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn=loss)
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(ids, np.int32).tobytes()
    for name, value in inputs.items():
        datum.loss_fn_inputs[name].CopyFrom(value)
    return body


def forward(body):
    return wire.read_order(StoredMessage(body.SerializeToString(), True, wire.FORWARD), BOUNDS)


def test_data_in_protobuf_are_records(messages):
    body = request(messages, target_tokens=tensor(messages, [6, 7, 8], 2), weights=tensor(messages, [0, 1, 0.5]))
    body.data[0].model_input.add().encoded_text.tokens = b""
    order = forward(body)
    [datum] = order.data
    assert (order.loss, order.has_backward, datum.is_flat) == ("cross_entropy", True, True)
    assert datum.ids_T.tolist() == [5, 6, 7] and datum.targets_TK.tolist() == [[6], [7], [8]]
    assert datum.inputs["weights"].tolist() == [[0.0], [1.0], [0.5]]
    sparse = messages.Tensor(dtype=2, shape=[3, 2])
    sparse.sparse_csr.values = np.asarray([9, 4], np.int64).tobytes()
    sparse.sparse_csr.crow_indices = np.asarray([0, 1, 1, 2], np.int64).tobytes()
    sparse.sparse_csr.col_indices = np.asarray([1, 0], np.int64).tobytes()
    body = request(messages, target_tokens=sparse, weights=tensor(messages, np.ones((3, 2))))
    body.forward_only = True
    order = forward(body)
    assert order.data[0].targets_TK.tolist() == [[0, 9], [0, 0], [4, 0]] and not order.has_backward


def test_settings_of_a_loss_are_read(messages):
    numbers = tensor(messages, [1, 2, 3])
    body = request(
        messages, loss="ppo", target_tokens=tensor(messages, [6, 7, 8], 2), logprobs=numbers, advantages=numbers
    )
    body.loss_fn_config["clip_low_threshold"] = 0.5
    assert forward(body).config == {"clip_low_threshold": 0.5}
    body.loss_fn_config_v2["clip_high_threshold"].number = 1.5
    assert forward(body).config == {"clip_high_threshold": 1.5}
    body.loss_fn_config_v2["kind"].text = "x"
    with pytest.raises(WrongRequest, match="loss_fn_config of ppo takes clip_low_threshold, clip_high_threshold"):
        forward(body)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": "gspo"}, "loss_fn must be one of cross_entropy, .*, got 'gspo'"),
        ({"ids": (5, 6, 100)}, "datum 0: model_input must be ids from 0 to 99, got 100"),
        ({"ids": (5, 6)}, r"target_tokens must be whole numbers of shape \[2\] or \[2, K\]"),
        ({"ids": ()}, "model_input must have 1 to 16 tokens, got 0"),
        ({"ids": range(17)}, "model_input must have 1 to 16 tokens, got 17"),
        ({"weights": [1.0, 2.0]}, r"weights expects the shape of target_tokens, \[3\], got \[2\]"),
        ({"weights": [1.0, math.nan, 1.0]}, "weights expects finite numbers, got some that are not"),
        ({"mask": [1.0, 1.0, 1.0]}, "cross_entropy takes target_tokens, weights; 'mask' is not supported"),
        ({"target_tokens": None}, "cross_entropy takes target_tokens, weights; 'target_tokens' is missing"),
    ],
)
def test_wrong_data_are_told_in_a_sentence(messages, change, sentence):
    change = dict(change)
    own = {name: change.pop(name) for name in ("ids", "loss") if name in change}
    inputs = {"target_tokens": tensor(messages, [6, 7, 8], 2), "weights": tensor(messages, [1, 1, 1])}
    inputs |= {name: value if value is None else tensor(messages, value) for name, value in change.items()}
    with pytest.raises(WrongRequest, match=sentence):
        forward(request(messages, **own, **{name: value for name, value in inputs.items() if value is not None}))


def test_bodies_that_make_no_request_are_refused(messages):
    for body in (b"\xff\xff\xff", b"{}"):
        with pytest.raises(WrongRequest):
            wire.read_order(StoredMessage(body, True, wire.FORWARD), BOUNDS)
    body = request(messages, target_tokens=tensor(messages, [6, 7, 8], 2))
    body.data[0].loss_fn_inputs["target_tokens"].dense = b"abc"
    with pytest.raises(WrongRequest, match="must be numbers of 8 bytes each, got 3 bytes"):
        forward(body)
    body.data[0].loss_fn_inputs["target_tokens"].CopyFrom(messages.Tensor(dtype=9, dense=b"x" * 8))
    with pytest.raises(WrongRequest, match="must have dtype float32, int64, int32 or bfloat16, got 9"):
        forward(body)
    sparse = messages.Tensor(dtype=2, shape=[3, 2**40])
    sparse.sparse_csr.crow_indices = np.zeros(4, np.int64).tobytes()
    body.data[0].loss_fn_inputs["target_tokens"].CopyFrom(sparse)
    with pytest.raises(WrongRequest, match="may have sparse tensors of at most 16,777,216 numbers in total"):
        forward(body)
    for shape in ([3, 0], [3, -(2**40)], [-1, 2], [1] * 100, [3, 2, 1], [2, 2]):
        body.data[0].loss_fn_inputs["target_tokens"].shape[:] = shape
        with pytest.raises(
            WrongRequest, match="in total|must be a sparse matrix of shape|must have a shape of one or two"
        ):
            forward(body)


def test_a_short_request_takes_little_memory(messages):
    """Of many sparse tensors, each within the bound."""
    rows = 16
    sparse = messages.Tensor(dtype=2, shape=[rows, wire.MOST_SPARSE // rows])
    sparse.sparse_csr.crow_indices = np.zeros(rows + 1, np.int64).tobytes()
    body = messages.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(20):
        body.data.append(request(messages, ids=range(rows), target_tokens=sparse, weights=sparse).data[0])
    assert len(body.SerializeToString()) < 11_000
    tracemalloc.start()
    with pytest.raises(WrongRequest, match="may have sparse tensors of at most 16,777,216 numbers in total"):
        forward(body)
    del body.data[1:], body.data[0].loss_fn_inputs["weights"]
    forward(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 600 << 20


def test_answers_are_read_by_the_client(messages):
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    logprobs = (torch.tensor([-1.0, -2.0]), torch.tensor([[-3.0, -4.0]]), torch.tensor([[-5.0, -6.0], [-7.0, -8.0]]))
    read_back = deserialize_forward_backward_output(wire.forward_answer(ForwardResult(2.5, logprobs)))
    assert read_back.metrics == {"loss:sum": 2.5}
    assert [each["logprobs"].tolist() for each in read_back.loss_fn_outputs] == [part.tolist() for part in logprobs]
    sequences = [SampledSequence([3, 4], [-0.5, -1.5], True, [[(3, -0.5)], [(4, -1.5), (5, -2.0)]])]
    sampled = SampledPrompt(sequences, [math.nan, -1.0], [[], [(6, -1.0), (7, -2.0)]])
    order = sample(topk_sample_logprobs=2, topk_prompt_logprobs=2)
    back = deserialize_sample_response(wire.sample_answer(sampled, order))
    [sequence] = back.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([3, 4], [-0.5, -1.5], "stop")
    assert back.prompt_logprobs == [None, -1.0]
