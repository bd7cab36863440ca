"""Rollouts by vLLM servers, on this machine or others. Tokens go there, tokens and log-probabilities come back.

Every sequence is a request with its own seed, the same as with `vllm` beside training, so that no response depends on
which server draws it; samples of a prompt, and turns of a conversation, go to one server, which has computed what they
begin with. Before a rollout the first rank looks at the servers and sends the weights to those that do not have them;
then all ranks draw. Log-probabilities are those after the temperature, before min-p, top-k and top-p (`worker`).

B sequences, P prompt tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.vllm.experts import rollout_of
from threestep.plugins.vllm.servers.addresses import server_key
from threestep.plugins.vllm.servers.arguments import ADAPTER, MERGED, VllmServerArguments
from threestep.plugins.vllm.servers.checks import WantedServer
from threestep.plugins.vllm.servers.client import ServerClient
from threestep.plugins.vllm.servers.drawing import ServerDrawing, SharesOfThreads
from threestep.plugins.vllm.servers.requests import RequestSettings
from threestep.plugins.vllm.servers.roster import Roster
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.contracts.drawing import DrawnTurn, NextTurn, Turns
from training.utils.contracts.rollout import Rollout, check_numbers
from training.utils.contracts.rollout_engine import (
    IN_ONE_PIECE,
    Decode,
    Drawing,
    PlannedActor,
    PlannedMemory,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
    Sampling,
    ServerShare,
)
from training.utils.engine.ranks.collectives import OwnRanks
from training.utils.generation.decoding.drawn import stop_strings

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from threestep.plugins.vllm.servers.groups import Way
    from training.utils.contracts.guests import ExpertRecord
    from training.utils.contracts.lending import Lender
    from training.utils.models.own_forward import OwnForward


class _Agreed(NamedTuple):
    """A decision of the first rank for all. problem: the sentence with which all end."""

    version: str = ""
    sends: bool = False
    with_base: bool = False
    servers: tuple[str, ...] = ()
    problem: str | None = None


class VllmServerRollout(RolloutEngine):
    """See RolloutEngine."""

    supports_bad_words = False
    supports_rollouts_ahead = True
    meets_other_ranks = True
    logprobs_are_trained_models = False
    for_training_only = True
    arguments = VllmServerArguments
    takes_weights = True
    records_experts = True

    def __init__(self, decode: Decode | None, flags: VllmServerArguments, longest_tokens: int) -> None:
        """longest_tokens: of a prompt with its response."""
        super().__init__(decode)
        self.longest_tokens: int = longest_tokens
        self._seconds, self._key = flags.rollout_timeout, server_key()
        self._roster = Roster(flags, self._key, log)
        self._ranks: OwnRanks | None = None
        self._drawing: ServerDrawing | None = None
        self._shares = SharesOfThreads()
        self._lora = flags.rollout_lora
        self._run = secrets.token_hex(4)  # with the updates, the version of the weights
        self._version, self._vocabulary = "", 0
        self._serving = 0
        self._homes = itertools.count()  # where the prompts of each call begin
        self._experts = False
        self._figures: dict[str, float] = {}

    @classmethod
    def refusals(cls, settings: RolloutSettings, drawing: Drawing) -> list[str]:
        if settings.own.vllm_servers is None:
            return [
                (
                    "--rollout_engine vllm_server needs --vllm_servers http://HOST:PORT,... or @FILE with servers "
                    "started by scripts/serve.sh"
                )
            ]
        return []

    @classmethod
    def planned_memory(cls, settings: RolloutSettings, actor: PlannedActor) -> PlannedMemory:
        """Nothing but weights on their way."""
        return ({"rollout: weights in transit to servers": actor.sent_bytes} if actor.sent_bytes else {}), {}

    @classmethod
    def create(cls, decode: Decode | None, settings: RolloutSettings) -> VllmServerRollout:
        return cls(decode, settings.own, settings.longest_tokens)

    def check(
        self, lent: contextlib.AbstractContextManager[PreTrainedModel], own: OwnForward, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        self._ranks = OwnRanks()
        return []

    def record_experts(self, record: ExpertRecord) -> None:
        self._experts = True

    @contextlib.contextmanager
    def lent(self, actor: Lender) -> Iterator[PreTrainedModel]:
        """Look at the servers and send them the weights that they do not have; yield the trained model as it is."""
        ranks = self._ranks
        assert ranks is not None, "`check` comes first"
        left_out = [] if self._drawing is None else list(self._drawing.left_out.values())
        failed = [each for own in ranks.gathered(left_out) for each in own]  # every rank's last rollout is over
        version = f"{self._run}-{actor.updates}"

        def look() -> _Agreed:
            sends = self._roster.look(self._wanted(actor.model), version, failed)
            return _Agreed(version, sends, sends and self._roster.needs_base)

        agreed = self._agree(ranks, look)
        if agreed.sends:
            self._send(actor, version, agreed.with_base)
        agreed = self._agree(ranks, lambda: _Agreed(version, servers=tuple(self._roster.ready())))
        clients = [ServerClient(address, self._key) for address in agreed.servers]
        self._drawing = ServerDrawing(clients, self._seconds, log, self._shares)
        self._version = agreed.version
        self._vocabulary = actor.model.config.get_text_config().vocab_size
        self._serving = len(clients)
        yield actor.model

    @staticmethod
    def _agree(ranks: OwnRanks, decide: Callable[[], _Agreed]) -> _Agreed:
        """Return what the first rank decides; raises its mistake on all."""
        decided = _Agreed()
        if ranks.is_first:
            try:
                decided = decide()
            except ThreestepError as problem:
                decided = _Agreed(problem=str(problem))
        agreed = ranks.from_first(decided)
        if agreed.problem is not None:
            raise ThreestepError(agreed.problem)
        return agreed

    def _wanted(self, model: PreTrainedModel) -> WantedServer:
        dtype = str(model.dtype).removeprefix("torch.")
        return WantedServer(
            type(model).__name__,
            model.config.to_dict(),
            dtype,
            self.longest_tokens,
            decode=self._decode,
            experts=self._experts,
        )

    def _send(self, actor: Lender, version: str, with_base: bool) -> None:
        """Send the weights from the first rank. A collective of the actor's."""
        dtype, alone = actor.model.dtype, actor.trains_adapters_alone and self._lora != MERGED
        if self._lora == ADAPTER and not alone:
            raise ThreestepError(
                f"--rollout_lora {ADAPTER} sends only adapters, but this run does not train adapters on frozen "
                "weights (LoRA without --use_dora, --only_optimize_lora false, --load_in_4bit, --load_in_8bit and "
                f"--rollouts_ahead); pass --rollout_lora {MERGED}, or remove the flag"
            )

        def take(parts: Any) -> None:
            started = time.perf_counter()
            sent = self._roster.send(parts, dtype, version, self._run if alone else "")
            self._add("time/weights_to_servers", time.perf_counter() - started)
            self._add("rollout/weight_megabytes_sent", sent.bytes / 1e6)

        if alone:
            actor.send_parts(take, with_base)
        else:
            actor.send(take)

    def _add(self, name: str, value: float) -> None:
        self._figures[name] = self._figures.get(name, 0.0) + value

    def ways(self) -> dict[str, Way]:
        """Return how weights went to each server."""
        return self._roster.ways

    def figures(self) -> dict[str, float]:
        figures, self._figures = self._figures, {}
        always = {"time/weights_to_servers": 0.0, "rollout/weight_megabytes_sent": 0.0}
        return {**always, "rollout/servers": float(self._serving), **figures}

    def shares(self) -> dict[str, ServerShare]:
        return self._shares.take()

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started = time.perf_counter()
        ids_BP, mask_BP = request.repeated()
        most, samples = request.sampling.max_new_tokens, request.samples_per_prompt
        rows = zip(ids_BP.cpu(), mask_BP.cpu(), request.seeds, strict=True)
        turns = [NextTurn(place, ids[mask].tolist(), seed, most) for place, (ids, mask, seed) in enumerate(rows)]
        self._check_lengths(turns, most)
        first = next(self._homes)
        drawn = self._drawn(turns, [first + place // samples for place in range(len(turns))], request.sampling)
        rollout = rollout_of(request, drawn, time.perf_counter() - started)
        check_numbers(rollout.sampled_logprobs_BR, type(model).__name__)
        return rollout

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns:
        first = next(self._homes)
        return ServerTurns(lambda turns, homes: self._drawn(turns, [first + home for home in homes], sampling))

    def _drawn(self, turns: Sequence[NextTurn], homes: Sequence[int], sampling: Sampling) -> list[DrawnTurn]:
        """homes: turns with equal numbers go to one server; each rank, and each call, begins with another one."""
        assert self._drawing is not None and self._ranks is not None, "the model is lent first"
        asked = RequestSettings(
            sampling,
            self._version,
            self._vocabulary,
            stop_strings(sampling, self._decode),
            experts=self._experts,
        )
        return self._drawing.draw(turns, [home + self._ranks.rank for home in homes], asked)

    def _check_lengths(self, turns: Sequence[NextTurn], most: int) -> None:
        longest = max(len(turn.ids) for turn in turns)
        if longest + most > self.longest_tokens:
            raise ThreestepError(
                f"a prompt of {longest} tokens leaves no room for a response of {most} tokens in sequences of "
                f"{self.longest_tokens} tokens (--max_prompt_seq_len and --max_answer_seq_len); raise these "
                "limits, or shorten the prompt"
            )


class ServerTurns(Turns):
    """Turns in rounds: each `advance` draws all that were added, those of a conversation on one server."""

    in_rounds = True

    def __init__(self, draw: Callable[[Sequence[NextTurn], Sequence[int]], list[DrawnTurn]]) -> None:
        """draw: turns, and numbers that are equal where one server is to draw."""
        self._draw = draw
        self._added: list[NextTurn] = []
        self._homes: dict[Any, int] = {}  # of conversations
        self._of_prompts: dict[tuple[int, ...], int] = {}  # of those that begin alike

    @property
    def is_drawing(self) -> bool:
        return bool(self._added)

    def add(self, turn: NextTurn) -> None:
        if turn.key not in self._homes:
            self._homes[turn.key] = self._of_prompts.setdefault(tuple(turn.ids), len(self._of_prompts))
        self._added.append(turn)

    def advance(self) -> list[DrawnTurn]:
        turns, self._added = self._added, []
        return self._draw(turns, [self._homes[turn.key] for turn in turns])

    def drop(self, key: Any) -> None:
        self._homes.pop(key, None)
