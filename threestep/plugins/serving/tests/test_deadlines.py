"""An answer whose headers drip is left at its deadline, with TLS and without, and whole ones are read."""

from __future__ import annotations

import pytest

from tests.support.dripping_server import dripping, made_certificate, taking_at_most
from threestep.plugins.images.data import fetching
from threestep.plugins.serving.deadlines import EndingConnection, EndingTlsConnection, ending_context

SECONDS = 0.5


@pytest.fixture(params=["plain", "tls", "pinned"])
def connected(request, tmp_path, monkeypatch):
    """(certificate, a function that opens a connection to a port)"""
    if request.param == "plain":
        return None, lambda port: EndingConnection("127.0.0.1", port, timeout=SECONDS)
    certificate = made_certificate(tmp_path)
    if request.param == "tls":
        context = ending_context()
        context.load_verify_locations(certificate)
        return certificate, lambda port: EndingTlsConnection("localhost", port, timeout=SECONDS, context=context)
    monkeypatch.setattr(fetching, "MOST_SECONDS", SECONDS)

    def pinned(port):
        connection = fetching._Pinned("localhost", "127.0.0.1")
        connection.port = port
        connection._checked_context.load_verify_locations(certificate)
        return connection

    return certificate, pinned


def test_headers_that_drip_are_left_at_the_deadline(connected):
    certificate, connect = connected
    with dripping(certificate) as port:
        connection = connect(port)
        connection.request("GET", "/")
        with taking_at_most(10 * SECONDS), pytest.raises(TimeoutError):
            connection.getresponse()
        connection.close()


def test_a_whole_answer_is_read(connected):
    certificate, connect = connected
    with dripping(certificate, drips=False) as port:
        connection = connect(port)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"ok"
        connection.close()
