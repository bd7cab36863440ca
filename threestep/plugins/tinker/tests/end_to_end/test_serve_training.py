"""`threestep serve training` as a program, and the released client as it is: kills between requests, and clients at
once. Skipped without the package tinker."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.tinker.tests.test_service import data
from training.utils.base.machine import free_port

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
KEY = "tml-key-of-the-tests"
KILLS = 5  # one at each place; the lab book has 20


class Program:
    """The server, which can be killed and started again. The base has the tokenizer of the tests, in float64."""

    def __init__(self, place, tokenizer):
        size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        tiny_causal_lm("llama", torch.float64, **size).save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        self.place, self.port, self.kills = place, free_port(), 0
        self.start()

    def start(self):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "THREESTEP_API_KEY": KEY}
        words = [str(self.place / "base"), "--served_name", "tiny", "--output_dir", str(self.place / "state")]
        command = [sys.executable, "-m", "threestep", "serve", "training", *words, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=(self.place / "log").open("a"), stderr=subprocess.STDOUT
        )

    def kill(self, seconds=0.0):
        time.sleep(seconds)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        self.start()

    def client(self, **more):
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{self.port}", api_key=KEY)
        return service.create_lora_training_client("tiny", **more).result()

    def wait(self):
        deadline = time.monotonic() + 300
        while "TINKER_BASE_URL" not in (self.place / "log").read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.place / "log").read_text()
            time.sleep(0.2)


@pytest.fixture
def program(tmp_path, tiny_tokenizer):
    program = Program(tmp_path, tiny_tokenizer)
    program.wait()
    yield program
    program.process.terminate()
    assert program.process.wait(60) == 0


def weights_of(program, client):
    from safetensors.torch import load_file

    path = client.save_weights_for_sampler("end").result().path
    session, _, rest = path.removeprefix("tinker://").partition(":train:")
    number, part, name = rest.split("/")
    folder = program.place / "state" / "sessions" / session / f"train_{number}" / part / name
    tensors = load_file(folder / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def trained(program, kills):
    """The weights and losses of 20 steps of two forwards each, the server killed at another place of each."""
    client, dice, losses = program.client(rank=4, seed=7), random.Random(3), []
    for step in range(20):
        place = step % 5 if step < kills else -1
        batch = data(step, 4)
        told = [client.forward_backward(batch[:2], "cross_entropy")]
        if place == 0:
            program.kill(dice.random() * 0.05)
        told.append(client.forward_backward(batch[2:], "cross_entropy"))
        if place == 1:
            told[1].result()
            program.kill()
        stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1e-8))
        if place == 2:
            program.kill(dice.random() * 0.1)
        losses.append(sum(each.result().metrics["loss:sum"] for each in told))
        stepped.result()
        if place == 3:
            program.kill()
        if place == 4:
            saved = client.save_state(f"step{step}")
            program.kill(dice.random() * 0.05)
            saved.result()
    return weights_of(program, client), losses


def test_a_loop_whose_server_is_killed_ends_with_the_same_weights(program):
    whole, known = trained(program, kills=0)
    found, losses = trained(program, kills=KILLS)
    assert program.kills == KILLS
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)
    assert losses == pytest.approx(known, rel=1e-11)


def test_eight_clients_at_once_are_each_as_alone_and_faster_than_after_each_other(program):
    def loop(number, found):
        client = program.client(rank=8, seed=number)
        begin = time.monotonic()
        for step in range(20):
            told = client.forward_backward(data(100 * number + step, 2), "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
            told.result()
        found[number] = (time.monotonic() - begin, client)

    ratios = []
    for _ in range(3):
        alone, together = {}, {}
        for number in range(8):
            loop(number, alone)
        threads = [threading.Thread(target=loop, args=(number, together)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ratios.append(sum(seconds for seconds, _ in alone.values()) / max(seconds for seconds, _ in together.values()))
        for number in range(8):
            one, two = (weights_of(program, found[number][1]) for found in (alone, together))
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
    assert sorted(ratios)[1] > 3.0, ratios
