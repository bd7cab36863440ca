"""A server of the Tinker API in this process, for tests that ask it by the released client or by hand."""

from __future__ import annotations

import http.client
import json
import socket
import threading

import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.tinker.opening import ServerSettings, service_of
from threestep.plugins.tinker.store import Store, load_weights
from threestep.plugins.tinker.web import PREFIX, TrainingServer
from threestep.plugins.tinker.wire import RequestBounds

KEY = "tml-key-of-the-tests"


class Running:
    """A server on a folder. model: its base, in float64."""

    def __init__(self, folder, port=0, is_full=False):
        self.service, self.computing = self.opened(folder, is_full)
        self.server = TrainingServer(port, self.service, KEY, 2**20)
        self.computing.start()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def opened(self, folder, is_full):
        self.model = tiny_causal_lm("llama", torch.float64).requires_grad_(False)
        self.store = Store(folder, {"name": "tiny"})
        return service_of(
            self.model, self.store, ServerSettings(1000, 8, 64, is_full), tokenizer=str(folder), name="tiny",
            bounds=RequestBounds(VOCABULARY, 32), decode=lambda ids: "".join(chr(97 + each % 26) for each in ids),
            ends=frozenset([2]),
        )  # fmt: skip

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    def close(self):
        self.server.shutdown()
        self.computing.close()
        for connection in [*self.server._strangers, *self.server._let_in]:
            connection.shutdown(socket.SHUT_RDWR)
        self.server.server_close()

    def ask(self, path, body, headers=None, method="POST"):
        """Status and body, as they came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"x-api-key": KEY, "Content-Type": "application/json", **(headers or {})}
        connection.request(method, PREFIX + path, data, given)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def adapters(self, path):
        """The model with the weights of a checkpoint merged."""
        folder, spec = self.store.checkpoint(path)
        layout = self.service.base.layout_of(spec)
        model = tiny_causal_lm("llama", torch.float64).requires_grad_(False)
        for name, (down, up) in layout.pieces(load_weights(folder, layout).unsqueeze(0)).items():
            model.get_submodule(name).weight += layout.scale * up[0] @ down[0]
        return model
