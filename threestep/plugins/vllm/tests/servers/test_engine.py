"""Rollouts by servers with faults: whoever draws, the responses are the same; addresses, keys and the guard."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts, responses, spelt
from threestep.plugins.vllm.servers import drawing
from threestep.plugins.vllm.servers.addresses import listed_servers, server_key
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.servers.guard import KeyGuard
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, VOCABULARY, FakeServer, drawn_choice, experts_of
from threestep.plugins.vllm.weights import BitSums
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.documents import UNKNOWN
from training.utils.contracts.drawing import NextTurn
from training.utils.contracts.rollout_engine import IN_ONE_PIECE, Ends, RolloutRequest, RolloutSettings

SECONDS = 5.0


class Lent:
    """A trained model whose weights `step` changes."""

    is_sharded = trains_adapters_alone = False

    def __init__(self) -> None:
        self.model, self.updates, self.sends = tiny_causal_lm("llama"), 0, 0

    def step(self) -> None:
        self.updates += 1
        with torch.no_grad():
            self.model.lm_head.weight += 0.01

    def send(self, take) -> None:
        self.sends += 1
        take(iter(self.model.named_parameters()))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(drawing, "_PAUSE_SECONDS", 0.001)


@pytest.fixture
def servers():
    found = [FakeServer(), FakeServer()]
    yield found
    for server in found:
        server.stop()


def engine_of(servers, decode=None, seconds: float = SECONDS, given: str | None = None, by=None) -> VllmServerRollout:
    given = given or ",".join(server.address for server in servers)
    flags = VllmServerArguments(vllm_servers=given, rollout_timeout=seconds, rollout_weights_by=by)
    engine = VllmServerRollout(decode, flags, 64)
    engine.check(None, None)
    return engine


def drawn(engine: VllmServerRollout, actor: Lent, how=PLAIN, samples: int = 2):
    ids_BP, mask_BP = prompts((3, 5, 2))
    request = RolloutRequest(ids_BP, mask_BP, how, range(3 * samples), samples)
    with engine.lent(actor) as model:
        return engine.roll_out(model, request)


def sum_of(tensors) -> int:
    """As a server sums up the bits of its weights."""
    sums = BitSums()
    for name, tensor in tensors:
        sums.add(name, tensor)
    return sums.total


def expected(actor: Lent, how=PLAIN, samples: int = 2) -> list[list[int]]:
    weights = sum_of(actor.model.named_parameters())
    ids_BP, mask_BP = prompts((3, 5, 2))
    found = []
    for place, (ids, mask) in enumerate(zip(ids_BP, mask_BP, strict=True)):
        for sample in range(samples):
            words = {
                "seed": place * samples + sample,
                "temperature": how.temperature,
                "max_tokens": how.max_new_tokens,
                "stop_token_ids": [how.end_token_id] if 0 <= how.end_token_id < VOCABULARY else [],
            }
            choice = drawn_choice({"token_ids": ids[mask].tolist(), "sampling_params": words}, weights)
            found.append(choice["token_ids"])
    return found


def test_weights_go_where_they_are_not_and_samples_of_a_prompt_to_one_server(servers):
    engine, actor = engine_of(servers), Lent()
    rollout = drawn(engine, actor)
    assert responses(rollout) == expected(actor)
    tokens = rollout.response_ids_BR[rollout.response_mask_BR]
    torch.testing.assert_close(rollout.sampled_logprobs_BR[rollout.response_mask_BR], -(tokens + 1) / 100)
    assert sorted(len(server.drawn) for server in servers) == [2, 4]
    for server in servers:
        assert all(server.drawn.count(prompt) == 2 for prompt in server.drawn)
    figures = engine.figures()
    shares = engine.shares()
    assert {name: own.responses for name, own in shares.items()} == {each.address: len(each.drawn) for each in servers}
    assert all(0 < own.slowest <= own.seconds <= own.responses * own.slowest for own in shares.values())
    assert not engine.shares()
    megabytes = 2 * sum(weight.numel() for weight in actor.model.parameters()) * 4 / 1e6
    assert megabytes < figures["rollout/weight_megabytes_sent"] < 1.2 * megabytes
    assert figures["rollout/servers"] == 2 and figures["time/weights_to_servers"] > 0
    drawn(engine, actor)
    assert engine.figures()["rollout/weight_megabytes_sent"] == 0 and actor.sends == 1, "nothing has changed"
    actor.step()
    assert responses(drawn(engine, actor)) == expected(actor) and actor.sends == 2
    assert [(server.transfers, server.resets) for server in servers] == [(2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"die_after": 1}, "no answer"),
        ({"slow": 0.6}, "no answer within 0.3 seconds"),
        ({"nonsense": "token"}, "it generated the token 64"),
        ({"nonsense": "nan"}, "the log-probability -9999.0"),
        ({"nonsense": "lengths"}, "8 tokens but 7 log-probabilities"),
        ({"nonsense": "short"}, "it returned 1 tokens and the finish reason 'abort'"),
        ({"nonsense": "version"}, "with different weights from those it was sent"),
        ({"nonsense": "nothing"}, "it returned 0 tokens and the finish reason 'None'"),
    ],
)
def test_what_a_failing_server_had_is_drawn_elsewhere(servers, capsys, fault, reason):
    how = replace(PLAIN, max_new_tokens=8, end_token_id=VOCABULARY)
    engine, actor = engine_of(servers, seconds=0.3 if "slow" in fault else SECONDS), Lent()
    drawn(engine, actor, how)
    engine.shares()
    servers[0].faults |= fault
    assert responses(drawn(engine, actor, how)) == expected(actor, how)
    said = capsys.readouterr().out
    assert said.count(" dropped (") == 1 and reason in said and KEY not in said
    shares = engine.shares()
    failed, other = (shares[each.address] for each in servers)
    assert failed.responses + other.responses == 6 and failed.slowest > fault.get("slow", 0) / 2
    actor.step()
    assert responses(drawn(engine, actor, how)) == expected(actor, how)
    assert servers[0].transfers == 1, "it gets no weights any more"
    assert engine.figures()["rollout/servers"] == 1


@pytest.mark.parametrize("stop", [None, "stop"])
def test_experts_come_with_each_response(servers, stop, capsys):
    how = PLAIN if stop is None else replace(PLAIN, ends=Ends((spelt([5]),)))
    engine, actor = engine_of(servers, spelt), Lent()
    engine.record_experts(None)
    for fault in ({}, {"experts": "short"}):
        servers[0].faults = fault
        rollout = drawn(engine, actor, how)
        for sequence in rollout.sequences():
            ids = sequence.input_ids.tolist()
            assert torch.equal(sequence.experts[: len(ids) - 1], experts_of(ids))
            assert (sequence.experts[-1] == UNKNOWN).all()
    assert "dropped (it sent experts for" in capsys.readouterr().out
    assert not any(server.experts for server in servers[1:]), "they are taken once"
    servers[1].faults = {"experts": "none"}
    with pytest.raises(ThreestepError, match="it has no experts for a response that it generated"):
        drawn(engine, actor, how)


def test_a_server_that_cannot_record_experts(servers):
    servers[1].says["no_experts"] = "it runs on a GPU"
    drawn(engine_of(servers), Lent())
    engine = engine_of(servers)
    engine.record_experts(None)
    with pytest.raises(ThreestepError, match="--replay_routers needs the experts of each token: it runs on a GPU; use"):
        drawn(engine, Lent())


def test_no_server_is_left(servers):
    engine, actor = engine_of(servers), Lent()
    drawn(engine, actor)
    for server in servers:
        server.faults["nonsense"] = "nan"
    with pytest.raises(ThreestepError, match="no rollout server in --vllm_servers is left .*-9999.*--resume"):
        drawn(engine, actor)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("die_in_transfer", "weights: "),
        ("refuse_finish", "weights: it could not load the weights: it answered 500: no room"),
    ],
)
def test_a_transfer_that_fails_leaves_the_old_weights(servers, capsys, fault, reason):
    engine, actor = engine_of(servers), Lent()
    drawn(engine, actor)
    old = servers[0].version, servers[0].weights
    servers[0].faults[fault] = True
    actor.step()
    assert responses(drawn(engine, actor)) == expected(actor)
    assert (servers[0].version, servers[0].weights) == old
    assert reason in capsys.readouterr().out


def test_a_trainer_that_was_killed_in_a_transfer_leaves_nothing_behind(servers):
    servers[0].updating = True
    actor = Lent()
    assert responses(drawn(engine_of(servers), actor)) == expected(actor)
    assert [server.transfers for server in servers] == [1, 1]


def test_a_server_that_was_started_again_gets_the_weights(servers, capsys):
    engine, actor = engine_of(servers), Lent()
    drawn(engine, actor)
    servers[0].stop()
    assert responses(drawn(engine, actor)) == expected(actor)
    servers[0] = FakeServer(port=servers[0].port)
    assert responses(drawn(engine, actor)) == expected(actor)
    assert servers[0].transfers == 1 and servers[0].drawn
    assert "is back; sending it the weights" in capsys.readouterr().out


def test_a_server_that_was_started_again_in_a_rollout(servers, capsys):
    """Its answers by weights that it was not sent are not taken; it gets the weights for the next rollout."""
    engine, actor = engine_of(servers), Lent()
    ids_BP, mask_BP = prompts((3, 5, 2))
    with engine.lent(actor) as model:
        servers[0].version, servers[0].weights = "default", 0
        got = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, PLAIN, range(6), 2))
    assert responses(got) == expected(actor)
    assert "dropped (it was restarted and does not have the weights)" in capsys.readouterr().out
    assert responses(drawn(engine, actor)) == expected(actor) and servers[0].transfers == 2
    assert engine.figures()["rollout/servers"] == 2


def test_servers_of_a_file_join_and_leave(servers, tmp_path):
    place = tmp_path / "servers"
    place.write_text(f"# one\n{servers[0].address}\n", encoding="utf-8")
    engine, actor = engine_of(servers, given=f"@{place}"), Lent()
    assert responses(drawn(engine, actor)) == expected(actor)
    assert not servers[1].transfers
    place.write_text(f"{servers[0].address}\n{servers[1].address} # two\n", encoding="utf-8")
    assert responses(drawn(engine, actor)) == expected(actor)
    assert servers[1].transfers == 1 and servers[1].drawn and servers[0].transfers == 1
    place.write_text(f"{servers[1].address}\n", encoding="utf-8")
    before = len(servers[0].drawn)
    assert responses(drawn(engine, actor)) == expected(actor)
    assert len(servers[0].drawn) == before


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"protocol": 0}, "another version of Threestep"),
        ({"vllm": "0.33.1"}, "it runs vLLM 0.33.1, but this version of Threestep supports 0.32"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "it serves Qwen3ForCausalLM, but the run trains LlamaForCausalLM"),
        ({"config": {"hidden_size": 4096}}, "it serves another model: hidden_size 4096 there, 32 here"),
        ({"dtype": "bfloat16"}, "start it with --dtype float32"),
        ({"longest_tokens": 32}, "start it with --max-model-len 64"),
        ({"tokenizer": True}, "it has another tokenizer: it decodes 64 tokens as"),
        ({"tempers": False}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_a_server_that_is_not_the_right_one(servers, says, reason):
    servers[1].says |= says
    with pytest.raises(ThreestepError, match=f"the rollout server {servers[1].address}: .*{reason}"):
        drawn(engine_of(servers, decode=spelt), Lent())
    if "tokenizer" in says:  # the same one
        drawn(engine_of(servers, decode=lambda ids: " ".join(f"t{token}" for token in ids)), Lent())


def test_servers_that_do_not_come_and_another_key(servers, monkeypatch):
    gone = FakeServer()
    gone.stop()
    with pytest.raises(
        ThreestepError, match=r"no answer \(.*no change for 0.2 seconds, --rollout_timeout\); start the servers with"
    ):
        drawn(engine_of([*servers, gone], seconds=0.2), Lent())
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(ThreestepError, match="it refuses the key"):
        drawn(engine_of(servers), Lent())


def test_stop_strings_end_a_response_with_the_token_that_completes_them(servers):
    how, actor = replace(PLAIN, end_token_id=VOCABULARY), Lent()
    free = expected(actor, how)
    text = spelt(free[2][2:4])
    stopped = replace(how, ends=Ends((text,)))
    rollout = drawn(engine_of(servers, decode=spelt), actor, stopped)
    assert responses(rollout)[2] == free[2][:4] and bool(rollout.ended_B[2])
    for got, whole in zip(responses(rollout), free, strict=True):
        assert got == whole[: len(got)] and (len(got) == len(whole) or text in spelt(got))


def test_turns_of_a_conversation_stay_on_their_server(servers):
    engine, actor = engine_of(servers), Lent()
    with engine.lent(actor) as model:
        turns = engine.turns_of(model, PLAIN)
        for key in range(4):
            turns.add(NextTurn(key, [5, 6, key // 2], key, 3))
        first = turns.advance()
        homes = {tuple(prompt): server for server in servers for prompt in server.drawn}
        assert {turn.key for turn in first} == set(range(4)) and not turns.is_drawing
        for turn in first:
            turns.add(NextTurn(turn.key, [5, 6, turn.key // 2, *turn.ids, 9], turn.key, 2))
        turns.advance()
    for server in servers:
        assert all(homes[tuple(prompt[:3])] is server for prompt in server.drawn)


def test_what_cannot_be_asked(servers):
    engine, actor = engine_of(servers), Lent()
    with pytest.raises(ThreestepError, match="a prompt of 5 tokens leaves no room for a response of 60 tokens in"):
        drawn(engine, actor, replace(PLAIN, max_new_tokens=60))
    engine = engine_of(servers)
    engine._lora = "adapter"
    with pytest.raises(
        ThreestepError, match="--rollout_lora adapter sends only adapters.*; pass --rollout_lora merged, or"
    ):
        drawn(engine, Lent())


def test_flags_and_no_servers():
    settings = RolloutSettings(64, VllmServerArguments())
    [sentence] = VllmServerRollout.refusals(settings, IN_ONE_PIECE)
    assert sentence.startswith("--rollout_engine vllm_server needs --vllm_servers http://HOST:PORT")
    assert not VllmServerRollout.refusals(RolloutSettings(64, VllmServerArguments("http://a:1")), IN_ONE_PIECE)
    mistakes = Mistakes()
    VllmServerArguments("http://a:1", rollout_lora="adapters").validate(mistakes)
    VllmServerArguments("http://a:1", rollout_weights_by="tcp", rollout_weights_folder="a").validate(mistakes)
    VllmServerArguments("a:1").validate(mistakes)
    assert [sentence.partition(",")[0] for sentence in mistakes.sentences] == [
        "--rollout_lora expects one of adapter",
        "--rollout_weights_by tcp and --rollout_weights_folder both choose how to send weights; remove one of them",
        "--vllm_servers a:1 expects http://HOST:PORT for each server",
    ]


class LentAdapters(Lent):
    """Adapters are trained, and nothing else."""

    trains_adapters_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.bases: list[bool] = []

    def send_parts(self, take, with_base: bool) -> None:
        self.bases.append(with_base)
        take(iter(self.model.named_parameters()) if with_base else iter(()))


def test_the_weights_below_adapters_go_to_those_that_lack_them(servers):
    engine, actor = engine_of(servers), LentAdapters()
    for _ in range(3):
        assert responses(drawn(engine, actor)) == expected(actor)
        actor.updates += 1
    servers[1].stop()
    drawn(engine, actor)
    servers[1] = FakeServer(port=servers[1].port)
    actor.updates += 1
    assert responses(drawn(engine, actor)) == expected(actor)
    assert actor.bases == [True, False, False, False, True] and servers[1].transfers == 1


def test_a_list_and_a_file_of_servers(tmp_path):
    two = ["http://a:8000", "http://10.0.0.2:8001"]
    assert listed_servers("http://a:8000, http://10.0.0.2:8001/,http://a:8000") == two
    assert listed_servers("http://[::1]:8000") == ["http://[::1]:8000"]
    place = tmp_path / "servers"
    place.write_text("# ours\nhttp://a:1\n\nhttp://b:2  # the second\n", encoding="utf-8")
    assert listed_servers(f"@{place}") == ["http://a:1", "http://b:2"]
    place.write_text("", encoding="utf-8")
    assert listed_servers(f"@{place}") == []
    place.write_text("b:2", encoding="utf-8")
    with pytest.raises(
        ThreestepError, match=r"servers \(given with --vllm_servers\) expects http://HOST:PORT for each"
    ):
        listed_servers(f"@{place}")
    with pytest.raises(ThreestepError, match="the file cannot be read"):
        listed_servers(f"@{tmp_path / 'none'}")


@pytest.mark.parametrize(
    "given", ["", "a:8000", "https://a:8000", "http://a", "http://a:99999", "http://a:1/v1", "http://user:word@a:1"]
)
def test_other_addresses(given):
    with pytest.raises(ThreestepError, match="http://HOST:PORT") as problem:
        listed_servers(given)
    assert "word" not in str(problem.value).replace("password", "")


def test_the_key(tmp_path):
    place = tmp_path / "key"
    place.write_text("abc\n", encoding="utf-8")
    assert server_key({}) is None
    assert server_key({"VLLM_API_KEY_FILE": str(place)}) == "abc"
    assert server_key({"VLLM_API_KEY": "own", "VLLM_API_KEY_FILE": str(place)}) == "own"
    place.write_text("\n", encoding="utf-8")
    with pytest.raises(ThreestepError, match="which is empty; write the servers' key to it"):
        server_key({"VLLM_API_KEY_FILE": str(place)})
    with pytest.raises(ThreestepError, match="VLLM_API_KEY_FILE names a file that cannot be read"):
        server_key({"VLLM_API_KEY_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weights", "/v1/completions", "/metrics", "/healthy"])
@pytest.mark.parametrize("given", [None, "Bearer wrong", "abc", "bearer abc"])
def test_nothing_but_health_answers_without_the_key(monkeypatch, path, given):
    assert status(monkeypatch, path, given) == 401
    assert status(monkeypatch, path, "Bearer abc") == status(monkeypatch, "/health", None) == 200


def test_no_web_socket(monkeypatch):
    asked = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", b"Bearer abc")]}
    assert sent(monkeypatch, asked) == [{"type": "websocket.close", "code": 1008}]


def status(monkeypatch, path, given) -> int:
    headers = [] if given is None else [(b"authorization", given.encode())]
    return sent(monkeypatch, {"type": "http", "path": path, "headers": headers})[0]["status"]


def sent(monkeypatch, scope) -> list:
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    found = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        found.append(message)

    asyncio.run(KeyGuard(app)(scope, receive, send))
    return found
