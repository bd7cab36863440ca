"""Who is let in, ports, addresses and settings of asking, answers that are read, and deadlines for those that drip."""

from __future__ import annotations

import pytest

from tests.support.dripping_server import dripping, made_certificate, taking_at_most
from threestep.plugins.images.data import fetching
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.deadlines import EndingConnection, EndingTlsConnection, ending_context
from threestep.plugins.serving.ports import check_port, listening
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import free_port

pytestmark = pytest.mark.unit


TOKEN = "f" * 48
HOST = ("Host", "127.0.0.1:8900")


@pytest.fixture
def door() -> Door:
    return Door(TOKEN)


def cookie_of(door: Door) -> tuple[str, str]:
    refusal = door.judge("GET", f"/?token={TOKEN}", [HOST])
    return "Cookie", dict(refusal.headers)["Set-Cookie"].partition(";")[0]


def test_the_printed_address_becomes_a_cookie_and_is_let_in_by_it(door):
    assert door.address(8900) == f"http://127.0.0.1:8900/?token={TOKEN}"
    first = door.judge("GET", f"/?token={TOKEN}&theme=dark", [HOST])
    headers = dict(first.headers)
    assert (first.status, headers["Location"]) == (303, "/?theme=dark")
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Lax" in headers["Set-Cookie"]
    assert door.judge("GET", "/", [HOST, cookie_of(door)]) is None
    forwarded = ("Host", "localhost:9000")  # ssh -L 9000:127.0.0.1:8900
    assert door.judge("POST", "/x", [forwarded, cookie_of(door), ("Origin", "http://localhost:9000")]) is None
    assert door.judge("GET", "/?token=wrong", [HOST, cookie_of(door)]) is None  # an old address in the same browser


def test_every_server_has_a_token_and_a_cookie_of_its_own():
    doors = [Door() for _ in range(8)]
    assert len({each.address(1) for each in doors}) == len({each._cookie for each in doors}) == 8
    assert len(doors[0].address(1).partition("token=")[2]) == 48


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([], "this page is only served to 127.0.0.1"),
        ([("Host", "evil.example:8900")], "this page is only served to 127.0.0.1"),
        ([("Host", "127.0.0.1.evil.example")], "this page is only served to 127.0.0.1"),
        ([("Host", "evil.example:127.0.0.1")], "this page is only served to 127.0.0.1"),
        ([("Host", "127.0.0.1:8900@evil.example")], "this page is only served to 127.0.0.1"),
        ([HOST, ("host", "evil.example")], "this page is only served to 127.0.0.1"),
        ([HOST, ("Origin", "http://evil.example")], "this page does not answer requests from other sites"),
        ([HOST, ("Origin", "null")], "this page does not answer requests from other sites"),
        ([HOST, ("Origin", "http://127.0.0.1:3000")], "this page does not answer requests from other sites"),
        (
            [HOST, ("Origin", "http://127.0.0.1:8900"), ("Origin", "http://evil.example")],
            "does not answer requests from other sites",
        ),
    ],
)
def test_others_are_refused_though_they_have_the_cookie(door, headers, text):
    refusal = door.judge("GET", "/", [*headers, cookie_of(door)])
    assert refusal.status == 403 and text in refusal.text
    assert dict(refusal.headers)["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("method", "target", "cookie", "status"),
    [
        ("GET", "/", None, 403),
        ("GET", "/?token=", None, 403),
        ("GET", "/?token=" + "e" * 48, None, 403),
        ("GET", "/?token=" + TOKEN[:-1], None, 403),
        ("GET", "/?token=" + TOKEN + "f", None, 403),
        ("GET", "/?token=\udcff\u0663", None, 403),
        ("GET", "/?x=" + TOKEN, None, 403),
        ("POST", f"/?token={TOKEN}", None, 403),
        ("GET", "/?" + "a=1&" * 100, None, 400),
        ("GET", "//[", None, 400),
        ("GET", "/", "threestep=" + TOKEN, 403),
        ("GET", "/", "{name}=wrong", 403),
        ("GET", "/", "{name}=\x00; ;;=", 403),
        ("GET", f"//evil.example/?token={TOKEN}", None, 303),
    ],
)
def test_without_the_token_nobody_is_let_in(door, method, target, cookie, status):
    headers = [HOST] if cookie is None else [HOST, ("Cookie", cookie.replace("{name}", door._cookie))]
    refusal = door.judge(method, target, headers)
    assert refusal.status == status and TOKEN not in refusal.text
    assert "evil" not in dict(refusal.headers).get("Location", "/")


def test_a_socket_is_of_this_machine_alone_and_its_port_is_free():
    with listening(0) as first:
        address, port = first.getsockname()
        first.listen()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening(port)


def test_a_port_that_is_in_use_is_a_sentence_and_one_that_is_free_stays_free():
    with listening(0) as taken:
        with pytest.raises(ThreestepError, match="^--port [0-9]+: Address already in use; choose another port$"):
            check_port("--port", taken.getsockname()[1])
    port = free_port()
    check_port("--port", port)
    check_port("--port", 0)
    listening(port).close()


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
