"""Groups that are learned from as they end, drawn by servers: these hold one version for all groups that are drawn at a
time, and the schedule repeats the run to the bit, also where another server draws."""

from __future__ import annotations

import random
import threading
import time

import pytest

from threestep.plugins.ahead.tests.test_free import GROUPS, free_trainer, lines_of, train
from threestep.plugins.ahead.tests.test_pipeline import SAMPLES, STEPS, made_trainer, same, trained, weights
from threestep.plugins.report.figures.rollout_account import rollout_account
from threestep.plugins.vllm.servers import drawing
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer
from training.utils.run.run_folder import read_rollouts


class Late(FakeServer):
    """Its answers take a time that no seed decides. cut: answers that were being given while weights changed."""

    def __init__(self, says) -> None:
        super().__init__(says)
        self.answering = self.at_once = self.cut = 0
        self.versions: list[str] = []
        self.lock = threading.Lock()

    def on_inference_v1_generate(self, body):
        with self.lock:
            self.answering += 1
            self.at_once = max(self.at_once, self.answering)
        time.sleep(random.SystemRandom().uniform(0.0, 0.03))
        self.versions.append(self.version)
        try:
            return super().on_inference_v1_generate(body)
        finally:
            with self.lock:
                self.answering -= 1

    def on_start_weight_update(self, body):
        self.cut += self.answering
        return super().on_start_weight_update(body)


@pytest.fixture
def served():
    """served() -> two servers, and an engine that draws by them."""
    says, found = {"architectures": [type(made_trainer(0).roles.actor_model).__name__]}, []

    def start():
        servers = [Late(says) for _ in range(2)]
        found.extend(servers)
        return servers, engine_of(servers)

    yield start
    for server in found:
        server.stop()


def engine_of(servers) -> VllmServerRollout:
    engine = VllmServerRollout(None, VllmServerArguments(",".join(each.address for each in servers), 20.0), 64)
    engine.check(None, None)
    return engine


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(drawing, "_PAUSE_SECONDS", 0.001)


def run(folder, servers, *, steps=range(1, STEPS + 1), trainer=None, **given):
    """Return a run's trainer and the greatest age of each step."""
    folder.mkdir(exist_ok=True)
    trainer = trainer or free_trainer(folder, engine_of(servers), **given)
    return trainer, train(trainer, steps)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_timing_and_failing_servers_decide_nothing(served, ahead):
    """Of `--rollouts_ahead K`, whose servers draw while training goes on."""
    found, versions = [], set[int]()
    for dies in (False, False, True):
        servers, engine = served()
        if dies:
            servers[0].faults["die_after"] = 7
        trainer = made_trainer(ahead, engine)
        trained(trainer, range(1, STEPS + 1))
        found.append(weights(trainer))
        versions |= {int(version.partition("-")[2]) for server in servers for version in server.versions}
    assert all(same(each, found[0]) for each in found)
    assert sorted(versions) == list(range(0, 2 * (STEPS - ahead), 2)), "step s: the weights of step s - 1 - K"


def test_each_prompt_once_and_the_schedule_repeats_the_run(tmp_path, served):
    servers, _ = served()
    first, ages = run(tmp_path / "first", servers)
    (account,) = rollout_account(read_rollouts(tmp_path / "first"))
    assert account.is_whole and account.learned == STEPS * GROUPS and max(ages) <= 2
    assert all(server.at_once > 2 and server.cut == 0 and server.drawn for server in servers)
    shares = [line["servers"] for line in read_rollouts(tmp_path / "first")[:STEPS]]
    assert [sum(own["responses"] for own in each.values()) for each in shares] == [GROUPS * SAMPLES] * STEPS
    assert {address for each in shares for address in each} == {server.address for server in servers}
    schedule = str(tmp_path / "first" / "rollouts.jsonl")
    servers[0].faults["die_after"] = 9
    again, _ = run(tmp_path / "again", servers, schedule=schedule)
    assert same(weights(again), weights(first))
    assert lines_of(tmp_path / "again") == lines_of(tmp_path / "first")
    assert servers[1].cut == 0
    servers[1].faults["die_after"] = 5
    with pytest.raises(Exception, match="no rollout server in --vllm_servers is left"):
        run(tmp_path / "left", servers[1:])


def test_a_resumed_run_sends_the_weights_that_draw_next(tmp_path, served):
    servers, _ = served()
    first, _ = run(tmp_path, servers, steps=range(1, 4))
    saved = first.state_dict()
    second, _ = run(tmp_path, servers, steps=range(0))
    second.roles.actor_model.load_state_dict(first.roles.actor_model.state_dict())
    second.load_state_dict(saved)
    run(tmp_path, servers, steps=range(4, STEPS + 1), trainer=second)
    (account,) = rollout_account(read_rollouts(tmp_path))
    assert account.is_whole and account.learned == STEPS * GROUPS
    again, _ = run(tmp_path / "again", servers, schedule=str(tmp_path / "rollouts.jsonl"))
    assert same(weights(again), weights(second))
