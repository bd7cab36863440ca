"""The servers of a run, as its first rank sees them: which are there, which are the right ones, and which have the
weights that draw next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from threestep.plugins.vllm.servers.addresses import is_file, listed_servers
from threestep.plugins.vllm.servers.checks import WantedServer, prepared_workers
from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.drawing import no_server, weights_of
from threestep.plugins.vllm.servers.groups import Way, chosen_way, met, own_device, own_end
from threestep.plugins.vllm.servers.protocol import TCP
from threestep.plugins.vllm.servers.sending import Target, send_weights
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.vllm.servers.arguments import VllmServerArguments
    from threestep.plugins.vllm.servers.drawing import FailedServer
    from threestep.plugins.vllm.servers.groups import End, WeightGroup
    from threestep.plugins.vllm.servers.sending import Sent
    from training.utils.contracts.lending import LowRank

_SECONDS_TO_ANSWER = 30.0  # whether it is there
_PAUSE_SECONDS = 1.0  # between two looks for servers that are still starting


class _SeenServer(NamedTuple):
    """A server that was looked at. workers: empty of one that is not to be used. has_weights: those that draw next."""

    client: ServerClient
    workers: Sequence[End]
    has_weights: bool
    reason: str = ""
    is_passing: bool = False


class Roster:
    """flags: of the engine. key: of all servers. log: takes a sentence."""

    def __init__(self, flags: VllmServerArguments, key: str | None, log: Callable[[str], None]) -> None:
        assert flags.vllm_servers is not None, "checked with the flags"
        self._given, self._seconds, self._folder = (
            flags.vllm_servers,
            flags.rollout_timeout,
            flags.rollout_weights_folder,
        )
        self._key, self._log = key, log
        self._by = flags.rollout_weights_by
        self._workers: dict[str, Sequence[End]] = {}  # of servers that have been looked at closely
        self.ways: dict[str, Way] = {}  # of their weights, by address
        self._groups: dict[str, WeightGroup] = {}
        self._logged: dict[str, Way] = {}
        self._device = torch.device("cpu")
        self._version: dict[str, str] = {}  # of the weights that servers were sent
        self._has_base: set[str] = set()  # the weights below the adapters
        self._out: dict[str, str] = {}
        self._for_good: dict[str, str] = {}
        self._stale: list[ServerClient] = []
        self._ready: list[ServerClient] = []
        self._has_begun = False

    def look(self, wanted: WantedServer, version: str, failed: Iterable[FailedServer]) -> bool:
        """Look at all servers; return whether some need the weights `version`. failed: servers that ranks have left
        out. ThreestepError if none is there."""
        self._device = own_device()  # which another thread's current one need not be
        for each in failed:
            self._version.pop(each.address, None)
            self._out[each.address] = each.reason
            if not each.is_passing:
                self._for_good[each.address] = each.reason
        seen = self._seen(wanted, version) if self._has_begun else self._first_seen(wanted, version)
        self._has_begun = True
        for found in seen:
            self._note(found)
        used = [each for each in seen if each.workers]
        if not used:
            raise ThreestepError(no_server({each.client.address: each.reason for each in seen} | self._for_good))
        self._ready = [each.client for each in used if each.has_weights]
        self._stale = [each.client for each in used if not each.has_weights]
        return bool(self._stale)

    @property
    def needs_base(self) -> bool:
        """Return whether a server that needs adapters needs the weights below them too."""
        return any(client.address not in self._has_base for client in self._stale)

    def send(
        self, parts: Iterable[tuple[str, torch.Tensor | LowRank]], dtype: torch.dtype, version: str, base: str = ""
    ) -> Sent:
        """Send the weights to those that need them. base: see `StreamUpdate`."""
        with ThreadPoolExecutor(max(len(self._stale), 1)) as pool:
            targets = list(pool.map(self._target, self._stale))
        if self._folder is None:
            self._log_ways()
        sent = send_weights(targets, parts, dtype, version, seconds=self._seconds, base=base, folder=self._folder)
        for client in self._stale:
            reason = sent.failures.get(client.address)
            if reason is None:
                self._version[client.address] = version
                self._ready.append(client)
                if base:
                    self._has_base.add(client.address)
                else:
                    self._has_base.discard(client.address)
            else:
                self._has_base.discard(client.address)
                self._version.pop(client.address, None)
                self._forget(client.address)
                self._note(_SeenServer(client, (), False, f"weights: {reason}"))
        return sent

    def _target(self, client: ServerClient) -> Target:
        """Return where weights go, with a group where they go by one, which is met if it is not there yet."""
        address = client.address
        workers, way = self._workers[address], self.ways[address]
        if way.by == TCP or self._folder is not None:
            return Target(client, len(workers))
        if address not in self._groups:
            try:
                self._groups[address] = met(client, len(workers), way.by, self._device, seconds=self._seconds)
            except (ServerFailure, OSError) as problem:
                self.ways[address] = Way(TCP, f"not {way.by}, because {problem}")
        return Target(client, len(workers), self._groups.get(address))

    def _log_ways(self) -> None:
        """Log how weights go to servers that are new, a sentence for all that are alike."""
        of_way: dict[Way, list[str]] = {}
        for client in self._stale:
            way = self.ways[client.address]
            if self._logged.get(client.address) != way:
                self._logged[client.address] = way
                of_way.setdefault(way, []).append(client.address)
        for way, addresses in of_way.items():
            self._log(f"weights are sent to {', '.join(addresses)} over {way.by} ({way.why})")

    def _forget(self, address: str) -> None:
        """Forget what a server was, which may be another one when it is back."""
        self._workers.pop(address, None)
        group = self._groups.pop(address, None)
        if group is not None:
            group.close()

    def ready(self) -> list[str]:
        """Return the addresses of the servers that have the weights, in the order in which they are listed.
        ThreestepError if there are none."""
        found = {client.address for client in self._ready}
        if not found:
            raise ThreestepError(no_server(self._out))
        return [address for address in listed_servers(self._given) if address in found] or sorted(found)

    def _first_seen(self, wanted: WantedServer, version: str) -> list[_SeenServer]:
        """As `_seen`, at the start: servers may be starting too. All of a list must be right, of a file one."""
        end = time.monotonic() + self._seconds
        while True:
            seen = self._seen(wanted, version)
            wrong = [each for each in seen if not each.workers and not each.is_passing]
            if wrong and not is_file(self._given):
                raise ThreestepError(f"the rollout server {wrong[0].client.address}: {wrong[0].reason}")
            missing = [each for each in seen if not each.workers]
            if seen and (not missing or (is_file(self._given) and len(missing) < len(seen))):
                return seen
            if time.monotonic() > end:
                reasons = "; ".join(f"{each.client.address}: {each.reason}" for each in missing) or "none is listed"
                raise ThreestepError(
                    f"--vllm_servers {self._given}: {reasons} (no change for {self._seconds:g} seconds, "
                    "--rollout_timeout); start the servers with scripts/serve.sh, or remove them from the list"
                )
            time.sleep(min(_PAUSE_SECONDS, self._seconds))

    def _seen(self, wanted: WantedServer, version: str) -> list[_SeenServer]:
        addresses = [address for address in listed_servers(self._given) if address not in self._for_good]
        clients = [ServerClient(address, self._key) for address in addresses]
        with ThreadPoolExecutor(max(len(clients), 1)) as pool:
            return list(pool.map(lambda client: self._look_at(client, wanted, version), clients))

    def _look_at(self, client: ServerClient, wanted: WantedServer, version: str) -> _SeenServer:
        seconds = min(self._seconds, _SECONDS_TO_ANSWER)
        try:
            weights = weights_of(client, seconds)
            if client.address not in self._workers or weights != self._version.get(client.address):
                # New, or started again since.
                self._has_base.discard(client.address)
                self._forget(client.address)
                workers = prepared_workers(client, wanted, seconds)
                self.ways[client.address] = chosen_way(self._by, own_end(self._device), workers)
                self._workers[client.address] = workers
        except ServerFailure as problem:
            return _SeenServer(client, (), False, str(problem), problem.is_passing)
        has_weights = weights == version == self._version.get(client.address)
        return _SeenServer(client, self._workers[client.address], has_weights)

    def _note(self, seen: _SeenServer) -> None:
        """Log who comes and goes."""
        address = seen.client.address
        if seen.workers:
            if self._out.pop(address, None) is not None:
                self._log(f"rollout server {address} is back; sending it the weights")
        elif self._out.get(address) != seen.reason:
            self._out[address] = seen.reason
            self._log(f"warning: rollout server {address} dropped ({seen.reason}); other servers generate meanwhile")
