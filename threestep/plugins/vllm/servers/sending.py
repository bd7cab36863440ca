"""Weights to servers: the trainer's side of `stream`, by vLLM's interface for weight transfer.

Over TCP, by a group of the trainer and a server's workers (NCCL between GPUs), or by a file in a folder of both.

All servers take the weights as they are gathered, tensor by tensor. Each keeps them apart until it has them all and has
compared their sums; then those that have put them in place serve by them. A server that fails does not hold up the
others, and has the weights that it had before.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.stream import SECRET_CHARACTERS, Frame, data_of, end_frame, framed, header_of
from threestep.plugins.vllm.weights import BitSums
from training.utils.base.errors import ThreestepError
from training.utils.contracts.lending import LowRank

if TYPE_CHECKING:
    import torch

    from threestep.plugins.vllm.servers.groups import WeightGroup

_A_DAY = 86400.0  # as long as it takes to gather weights: silence is what ends a transfer
_A_MINUTE = 60.0
_POLL_SECONDS = 0.05
_MOST_STRANGERS = 256  # connections whose secret has not come yet


class Target(NamedTuple):
    """A server with so many workers. group: with them, by which tensors go; None where they go over TCP."""

    client: ServerClient
    workers: int
    group: WeightGroup | None = None


@dataclass
class Sent:
    """bytes: to all servers together. failures: sentences by the address of the server."""

    bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Receiver:
    """A server, the connections of its workers, and the request in which it takes the weights."""

    client: ServerClient
    workers: int
    group: WeightGroup | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_CHARACTERS // 2))
    connections: list[socket.socket] = field(default_factory=list)
    request: threading.Thread | None = None
    failure: str | None = None

    @property
    def is_going(self) -> bool:
        return self.failure is None

    @property
    def is_connected(self) -> bool:
        return len(self.connections) == self.workers

    def fail(self, sentence: str) -> None:
        self.failure = self.failure or sentence
        self.close()

        if self.group is not None:
            self.group.close()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def begin(self, port_at: Callable[[str], int], seconds: float, base: str) -> None:
        """Announce a transfer, and have the server connect for it."""
        try:
            _start(self.client, seconds)
            host = self.client.local_address()
            port = port_at(host)
        except (ServerFailure, OSError) as problem:
            return self.fail(str(problem))
        # It waits while others do not take theirs in time, which are then left out.
        patience = 2.0 * seconds + _A_MINUTE
        where = {"host": host, "port": port, "secret": self.secret, "seconds": patience, "base": base}
        self._ask({**where, "by_group": self.group is not None})

    def read(self, path: Path, seconds: float, base: str) -> None:
        """Have the server read a file."""
        try:
            _start(self.client, seconds)
        except ServerFailure as problem:
            return self.fail(str(problem))
        self._ask({"path": str(path), "base": base})

    def _ask(self, where: dict[str, object]) -> None:
        self.request = threading.Thread(target=self._take, args=[where], name="weights to a server", daemon=True)
        self.request.start()

    def _take(self, where: dict[str, object]) -> None:
        try:
            self.client.post("/update_weights", {"update_info": where}, _A_DAY)
        except ServerFailure as problem:
            self.fail(str(problem))

    def send(self, header: bytes, data: torch.Tensor | None = None, seconds: float = 0.0) -> None:
        """data: uint8, where this server's group has its tensors, or on the CPU."""
        try:
            for connection in self.connections:
                connection.sendall(header)
            if data is None:
                return
            if self.group is not None:
                self.group.broadcast(data, seconds)
                return
            for connection in self.connections:
                connection.sendall(data.numpy().data)
        except OSError as problem:
            reason = (
                "stopped receiving weights for too long"
                if isinstance(problem, TimeoutError)
                else ("broke off the transfer")
            )
            self.fail(f"it {reason} ({problem.strerror or type(problem).__name__})")
        except RuntimeError as problem:  # a group's
            self.fail(
                f"it broke off the transfer, or stopped receiving weights for too long ({type(problem).__name__})"
            )

    def finish(self, version: str, seconds: float) -> None:
        """Have the server put the weights in place, and forget what it computed by the old ones."""
        assert self.request is not None
        self.request.join(seconds)
        if self.request.is_alive():
            self.fail(f"it did not receive the weights within {seconds:g} seconds")
        if not self.is_going:
            return
        try:
            self.client.post("/finish_weight_update", {"weight_version": version}, seconds)
            answer = self.client.post("/reset_prefix_cache", None, seconds)
        except ServerFailure as problem:
            return self.fail(f"it could not load the weights: {problem}")
        if not (isinstance(answer, dict) and answer.get("success")):
            self.fail("it keeps results computed with the old weights, because something else is generating on it")


def send_weights(
    servers: Sequence[Target],
    parts: Iterable[tuple[str, torch.Tensor | LowRank]],
    dtype: torch.dtype,
    version: str,
    *,
    seconds: float,
    base: str = "",
    folder: str | None = None,
) -> Sent:
    """Send every part to servers; those that end without a failure serve by them, as `version`.

    dtype: of the servers' weights. seconds: that a server may take for any part of it. base: see `StreamUpdate`.
    folder: where a file takes them; None sends them over TCP.
    """
    receivers = [_Receiver(*target) for target in servers]
    if folder is not None:
        return _by_file(
            receivers, _frames(parts, dtype), Path(folder) / f"{version}.weights", seconds=seconds, base=base
        )
    sent, ports, lock = Sent(), dict[str, socket.socket](), threading.Lock()

    def port_at(host: str) -> int:
        with lock:
            if host not in ports:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                ports[host] = socket.create_server((host, 0), family=family)
            return int(ports[host].getsockname()[1])

    with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
        try:
            list(pool.map(lambda each: each.begin(port_at, seconds, base), receivers))
            _accept(receivers, list(ports.values()), seconds)
            sums = BitSums()
            for frame in _frames(parts, dtype, _device_of(receivers)):
                going = [each for each in receivers if each.is_going]
                if not going:
                    break
                sums.add(frame.name, frame.tensor)
                header, data = header_of(frame), data_of(frame.tensor)
                host = data if all(each.group for each in going) else data.cpu()

                def pass_on(each: _Receiver, head: bytes = header, own: Any = data, host: Any = host) -> None:
                    each.send(head, host if each.group is None else own.to(each.group.device), seconds)

                list(pool.map(pass_on, going))
                sent.bytes += (len(header) + len(data)) * sum(each.workers for each in going)
            end = end_frame({layer or "": own for layer, own in sums.by_layer.items()})
            list(pool.map(lambda each: each.send(end) if each.is_going else None, receivers))
            list(pool.map(lambda each: each.finish(version, seconds), [each for each in receivers if each.is_going]))
        finally:
            for port in ports.values():
                port.close()
            for receiver in receivers:
                receiver.close()
    return _with_failures(sent, receivers)


def _by_file(receivers: Sequence[_Receiver], frames: Iterable[Frame], path: Path, *, seconds: float, base: str) -> Sent:
    """Write a file that all servers read, and remove it. ThreestepError if it cannot be written."""
    sums, version = BitSums(), path.stem
    with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
        try:
            with open(path, "xb", opener=_for_its_owner) as file:
                for frame in frames:
                    sums.add(frame.name, frame.tensor)
                    file.writelines(framed(frame))
                file.write(end_frame({layer or "": own for layer, own in sums.by_layer.items()}))
                file.flush()
                os.fsync(file.fileno())
            sent = Sent(path.stat().st_size)
            list(pool.map(lambda each: each.read(path, seconds, base), receivers))
            list(pool.map(lambda each: each.finish(version, seconds), [each for each in receivers if each.is_going]))
        except OSError as problem:
            raise ThreestepError(
                f"--rollout_weights_folder {path.parent} needs a writable folder with room for the weights, got "
                f"{problem.strerror}; create it or free space, or remove --rollout_weights_folder"
            ) from problem
        finally:
            path.unlink(missing_ok=True)
    return _with_failures(sent, receivers)


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _with_failures(sent: Sent, receivers: Sequence[_Receiver]) -> Sent:
    sent.failures = {each.client.address: each.failure for each in receivers if each.failure is not None}
    return sent


def _device_of(receivers: Sequence[_Receiver]) -> torch.device | str:
    """Return where tensors are sent from: the GPU, if a server gets them from there."""
    devices = [each.group.device for each in receivers if each.group is not None]
    return next((device for device in devices if device.type != "cpu"), "cpu")


def _frames(
    parts: Iterable[tuple[str, torch.Tensor | LowRank]], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[Frame]:
    """Yield the tensors on a device; weights in `dtype`, adapters in their own."""
    for name, part in parts:
        if isinstance(part, LowRank):
            for which, tensor in (("down", part.down_RI), ("up", part.up_OR)):
                yield Frame(name, tensor.detach().to(device), (which, part.scale, part.transposed))
        else:
            yield Frame(name, part.detach().to(device, dtype if part.is_floating_point() else part.dtype))


def _start(client: ServerClient, seconds: float) -> None:
    """Begin an update; end one that a trainer has left open, by a part of it that fails."""
    try:
        client.post("/start_weight_update", None, seconds)
    except ServerFailure as problem:
        if "already active" not in str(problem):
            raise
        try:
            client.post("/update_weights", {"update_info": {}}, seconds)
        except ServerFailure:
            client.post("/start_weight_update", None, seconds)


def _accept(receivers: Sequence[_Receiver], ports: Sequence[socket.socket], seconds: float) -> None:
    """Take the connections of the servers' workers. Nobody else knows the secrets, and who is silent holds up
    nobody."""
    end = time.monotonic() + seconds
    said: dict[socket.socket, bytes] = {}  # by connections whose secret has not come yet, the oldest first
    with selectors.DefaultSelector() as events:
        for port in ports:
            port.setblocking(False)
            events.register(port, selectors.EVENT_READ)
        while time.monotonic() < end and any(each.is_going and not each.is_connected for each in receivers):
            for key, _ in events.select(_POLL_SECONDS):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection in ports:
                    _admit(connection, said, events)
                elif connection in said and _has_said_all(connection, said):
                    events.unregister(connection)
                    _let_in(receivers, connection, said.pop(connection), seconds)
    for connection in said:
        connection.close()
    for each in receivers:
        if each.is_going and not each.is_connected:
            each.fail(
                f"it did not connect to receive the weights within {seconds:g} seconds; if it cannot, but shares a "
                "folder with the training host, give --rollout_weights_folder"
            )


def _admit(port: socket.socket, said: dict[socket.socket, bytes], events: selectors.BaseSelector) -> None:
    """Accept a connection, in place of the oldest silent one where there are too many."""
    try:
        connection, _ = port.accept()
    except OSError:  # it has gone
        return
    connection.setblocking(False)
    if len(said) >= _MOST_STRANGERS:
        oldest = next(iter(said))
        del said[oldest]
        events.unregister(oldest)
        oldest.close()
    said[connection] = b""
    events.register(connection, selectors.EVENT_READ)


def _has_said_all(connection: socket.socket, said: dict[socket.socket, bytes]) -> bool:
    """Read what has come of a secret; True at its end, and at the connection's."""
    try:
        part = connection.recv(SECRET_CHARACTERS - len(said[connection]))
    except OSError:
        part = b""
    said[connection] += part
    return not part or len(said[connection]) == SECRET_CHARACTERS


def _let_in(receivers: Sequence[_Receiver], connection: socket.socket, secret: bytes, seconds: float) -> None:
    receiver = next((each for each in receivers if hmac.compare_digest(each.secret.encode(), secret)), None)
    if receiver is None or receiver.is_connected or not receiver.is_going:
        return connection.close()
    connection.settimeout(seconds)
    receiver.connections.append(connection)
