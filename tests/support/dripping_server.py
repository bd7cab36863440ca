"""A server, with TLS or without, that sends the beginning of an answer and then a header now and then, without end."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def dripping(certificate: Path | None = None, drips: bool = True) -> Iterator[int]:
    """The port on 127.0.0.1. certificate: as `made_certificate` gives it. drips: False sends a whole answer, "ok"."""
    listening, ending = socket.create_server(("127.0.0.1", 0)), threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None:
        context.load_cert_chain(certificate)

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(10)
            sends = connection if certificate is None else context.wrap_socket(connection, server_side=True)
            with sends:
                sends.recv(2**16)
                sends.sendall(b"HTTP/1.1 200 OK\r\n" + (b"" if drips else b"Content-Length: 2\r\n\r\nok"))
                while drips and not ending.wait(0.05):
                    sends.sendall(b"X-More: 1\r\n")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listening.accept()[0]], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listening.getsockname()[1])
    finally:
        ending.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def made_certificate(folder: Path) -> Path:
    """A new certificate of localhost with its key, signed by itself. Skips the test where openssl is not installed."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate, and openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost".split()
    subprocess.run(["openssl", *words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    certificate.write_text(key.read_text() + certificate.read_text())
    return certificate


@contextlib.contextmanager
def taking_at_most(seconds: float) -> Iterator[None]:
    """Fails if what is inside takes longer."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds
