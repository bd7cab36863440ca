"""HTTP of the Tinker API: the key as the client sends it, bodies of JSON and protobuf, answers of both."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keyed import KeyedHandler, KeyedServer, parsed
from threestep.plugins.serving.refusals import RefusedRequest
from threestep.plugins.tinker.service import HOLD_SECONDS

if TYPE_CHECKING:
    from threestep.plugins.tinker.service import TrainingService

PREFIX = "/api/v1/"
PROTOBUF = "application/x-protobuf"
MOST_CONNECTIONS = 1024
_FORWARD, _RETRIEVE = "forward_backward", "retrieve_future"


class TrainingServer(KeyedServer):
    """Serves training clients that have the key."""

    def __init__(
        self, port: int, service: TrainingService, key: str, most_bytes: int, *, address: str = ADDRESS
    ) -> None:
        """port 0 takes a free one. OSError where it is taken."""
        super().__init__(port, _TrainingHandler, key, most_bytes, most_connections=MOST_CONNECTIONS, address=address)
        self.service = service


class _TrainingHandler(KeyedHandler):
    server: TrainingServer
    key_form = "x-api-key: KEY (TINKER_API_KEY)"

    def given_key(self) -> str:
        return str(self.headers.get("x-api-key", "")).strip()

    def get(self, path: str) -> None:
        self.send(200, self.unfailing(partial(self.server.service.get, self._name(path))))

    def do_DELETE(self) -> None:
        service, path = self.server.service, self.path.partition("?")[0]
        self._guarded(lambda: self.send(200, self.unfailing(lambda: service.delete(self._name(path)))))

    def post(self, path: str) -> None:
        name, service = self._name(path), self.server.service
        if name not in (_FORWARD, _RETRIEVE):
            service.check_path(name)
        is_protobuf = self.headers.get("Content-Type", "").partition(";")[0].strip() == PROTOBUF
        if self.headers.get("Content-Encoding", "identity") != "identity" or is_protobuf != (name == _FORWARD):
            wanted = PROTOBUF if name == _FORWARD else "JSON"
            raise RefusedRequest(f"{name} needs an uncompressed {wanted} body", 415)
        body = self.body()
        if is_protobuf:
            self.send(200, self.unfailing(partial(service.forward_backward, body)))
            return
        given = parsed(body)
        if name != _RETRIEVE:
            self.send(200, self.unfailing(partial(service.post, name, given, body)))
            return
        self.server.allow(self.connection, 2 * HOLD_SECONDS)
        answer = self.unfailing(partial(service.retrieve, given))
        self.send_bytes(200, PROTOBUF if answer.is_proto else "application/json", answer.body)

    def _name(self, path: str) -> str:
        if not path.startswith(PREFIX):
            raise RefusedRequest(f"this server has no {path:.100}, only paths under {PREFIX}", 404)
        return path.removeprefix(PREFIX)
