"""Damaged files of a client: one sentence names the file, for this client alone, and the server goes on."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.training_server import Running
from threestep.plugins.tinker.records import LoadOrder, SaveOrder
from threestep.plugins.tinker.store import load_checkpoint, load_weights
from threestep.plugins.tinker.tests.test_trainer import SESSION, STEP, Server
from training.utils.base.errors import ThreestepError


@pytest.fixture
def served(tmp_path):
    """A folder with two clients, the first with a state and weights; and their adapted model."""
    server = Server(tmp_path)
    first, second = server.create(1), server.create(2)
    for seq, order in enumerate((STEP, SaveOrder("whole"), SaveOrder("drawn", for_sampling=True)), start=1):
        server.submit(first, seq, order)
    server.run()
    assert [server.answer(first, seq).get("error") for seq in (1, 2, 3)] == [None] * 3
    return tmp_path, server.adapted, first, second


def changed(path, notes=None, **tensors):
    save_file({**load_file(path), **tensors}, path, {"seq": "1", "steps": "1", "answer": "null", **(notes or {})})


FEW = torch.zeros(3, dtype=torch.float64)
DAMAGES = {
    "a folder": ("state.safetensors", lambda path: (path.unlink(), path.mkdir()), "and is no file"),
    "other content": ("state.safetensors", lambda path: path.write_bytes(b"x" * 99), "expects safetensors: "),
    "few weights": ("state.safetensors", lambda path: changed(path, weights=FEW), "must have vectors of .* floats"),
    "few moments": ("state.safetensors", lambda path: changed(path, first=FEW), "must have vectors of .* floats"),
    "another type": (
        "state.safetensors",
        lambda path: changed(path, gradient=load_file(path)["weights"].float()),
        "must have vectors of a single type, got torch.float32, torch.float64",
    ),
    "no number": ("state.safetensors", lambda path: changed(path, {"seq": "\u00b2"}), "expects JSON"),
    "a negative one": ("state.safetensors", lambda path: changed(path, {"steps": "-1"}), "steps must be a number from"),
    "no answer": ("state.safetensors", lambda path: changed(path, {"answer": "[1]"}), "answer: expects"),
    "a deep description": ("client.json", lambda path: path.write_text("[" * 100_000), "expects JSON"),
    "no seed": ("client.json", lambda path: path.write_text('{"rank": 2, "parts": []}'), "seed is missing"),
    "other parts": (
        "client.json",
        lambda path: path.write_text('{"rank": 2, "seed": 1, "parts": ["tail"]}'),
        "must have a non-negative rank and parts from attention, mlp, head",
    ),
    "a request that is a folder": (
        "requests",
        lambda path: (path / "00000009.any.json").mkdir(),
        "00000009.any.json expects a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_client_is_named_and_others_train(served, name):
    folder, adapted, first, second = served
    part, damage, sentence = DAMAGES[name]
    damage(folder / "sessions" / SESSION / "train_1" / part)
    server = Server(folder, adapted)
    with pytest.raises(ThreestepError, match=rf"train_1/{part}.*{sentence}.*; create a client from a saved state"):
        server.desk.client(first)
    server.submit(second, 1, STEP)
    server.run()
    assert "metrics" in server.answer(second, 1)


def test_files_that_are_no_requests_are_left_alone(served):
    folder, adapted, first, _ = served
    requests = folder / "sessions" / SESSION / "train_1" / "requests"
    for name in ("\u00b2.step.json", "00000009.step.json.bak", "9 (copy).pb", "notes.txt"):
        (requests / name).write_text("x")
    assert Server(folder, adapted).desk.client(first).next_seq == 2


def test_damaged_checkpoints_fail_the_request_that_reads_them(served):
    folder, adapted, first, _ = served
    place, server = folder / "sessions" / SESSION / "train_1", Server(folder, adapted)
    layout = server.desk.client(first).layout
    changed(place / "weights" / "whole" / "state.safetensors", second=FEW)
    server.submit(first, 4, LoadOrder(f"tinker://{first}/weights/whole", True))
    server.run()
    answer = server.answer(first, 4)
    assert answer["category"] == "server" and "whole/state.safetensors must have vectors of" in answer["error"]
    drawn = place / "sampler_weights" / "drawn"
    some = next(iter(load_file(drawn / "adapter_model.safetensors")))
    changed(drawn / "adapter_model.safetensors", **{some: FEW})
    for read in (load_weights, load_checkpoint):
        with pytest.raises(ThreestepError, match=r"adapter_model.safetensors: .* expects floats \["):
            read(drawn, layout)
    for content in ("", "[1]", json.dumps({"seq": 1}), json.dumps({"spec": {"rank": -1, "seed": 1, "parts": []}})):
        (drawn / "checkpoint.json").write_text(content)
        with pytest.raises(ThreestepError, match=r"drawn/checkpoint.json.*(expects|must)|spec is missing"):
            server.store.checkpoint(f"tinker://{first}/sampler_weights/drawn")
    for content in ("{}", '{"path": 1}', "x"):
        (place.with_name("sampler_7.json")).write_text(content)
        with pytest.raises(ThreestepError, match=r"sampler_7.json: "):
            server.store.sampler(SESSION, 7)
    (place / "results" / "00000002.json").write_text("[1]")
    with pytest.raises(ThreestepError, match=r"00000002.json: expects"):
        server.answer(first, 2)


def test_over_http_a_damaged_file_is_the_servers_failure_in_a_sentence(tmp_path):
    place = tmp_path / "sessions" / SESSION / "train_1"
    place.mkdir(parents=True)
    (place / "client.json").write_text("{")
    model_id, running = f"{SESSION}:train:1", Running(tmp_path)
    try:
        info, info_words = running.ask("get_info", {"model_id": model_id})
        answer, words = running.ask("retrieve_future", {"request_id": f"{model_id}:1"})
    finally:
        running.close()
    assert (info, answer) == (500, 500)
    for body in (info_words, words):
        assert "client.json: expects JSON" in json.loads(body)["error"]["message"]
