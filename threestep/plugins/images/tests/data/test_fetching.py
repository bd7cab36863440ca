"""Pictures behind addresses: what is asked of the web, and what is not."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from threestep.plugins.images.data import fetching
from threestep.plugins.images.data.fetching import fetched
from threestep.plugins.images.data.values import image_bytes
from training.utils.data.formats.media import BadConversation

HOSTS = {"a.org": ["93.184.216.34"], "inside": ["10.0.0.7"], "both": ["93.184.216.34", "127.0.0.1"],
         "six": ["::1"], "mapped": ["::ffff:192.168.0.1"], "meta": ["169.254.169.254"]}  # fmt: skip


class Answer:
    def __init__(self, status=200, body=b"PICTURE", location=None):
        self.status, self.reason, self._body, self._location = status, "said", body, location

    def getheader(self, name):
        return self._location

    def read(self, count):
        chunk, self._body = self._body[:count], self._body[count:]
        return chunk


@pytest.fixture
def web(monkeypatch):
    """The answers of (host, path); what is asked is noted with the address that is connected to."""
    asked, answers = [], {}

    def look_up(host, port, type):
        if host not in HOSTS:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, port)) for address in HOSTS[host]]

    class Connection:
        def __init__(self, host, address):
            self.host, self.address = host, address

        def request(self, method, path, headers):
            asked.append((method, self.host, self.address, path))
            self.path = path

        def getresponse(self):
            return answers[self.host, self.path]

        def close(self):
            pass

    monkeypatch.setattr(fetching.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetching, "_Pinned", Connection)
    return SimpleNamespace(asked=asked, answers=answers)


def test_a_picture_is_fetched_from_the_address_that_was_checked_and_through_redirects(web):
    web.answers["a.org", "/x.png?s=1"] = Answer(302, location="/y.png")
    web.answers["a.org", "/y.png"] = Answer(body=b"P" * 200_000)
    assert fetched("https://a.org/x.png?s=1", 200_000, "row 1") == b"P" * 200_000
    assert web.asked == [("GET", "a.org", "93.184.216.34", path) for path in ("/x.png?s=1", "/y.png")]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://a.org/x.png", "expected an address that begins with https:// and a public host"),
        ("https://a.org:8080/x.png", "begins with https://"),
        ("https://me:pass@a.org/x.png", "begins with https://"),
        ("ftp://a.org/x", "begins with https://"),
        ("https://a.org/a b", "percent-encoded"),
        ("https://[::1", "expected an address, got"),
        ("https://nowhere/x", "the host 'nowhere' is not found"),
        *((f"https://{host}/x", f"the host '{host}' has the address {HOSTS[host][-1]}, which is not public")
          for host in HOSTS if host != "a.org"),
    ],
)  # fmt: skip
def test_nothing_else_is_asked(url, sentence, web):
    with pytest.raises(BadConversation, match="row 1: ") as refused:
        fetched(url, 100, "row 1")
    assert sentence in str(refused.value) and web.asked == []


def test_a_redirect_inside_a_large_answer_and_a_missing_one_are_refused(web):
    web.answers["a.org", "/in"] = Answer(301, location="https://inside/x")
    web.answers["a.org", "/plain"] = Answer(307, location="http://a.org/x")
    web.answers["a.org", "/large"] = Answer(body=b"P" * 101)
    web.answers["a.org", "/gone"] = Answer(404)
    web.answers["a.org", "/round"] = Answer(302, location="/round")
    for path, sentence in (
        ("in", "the host 'inside' has the address 10.0.0.7"), ("plain", "begins with https://"),
        ("large", "at most 100 bytes"), ("gone", "the answer is 404 said"), ("round", "at most 3 redirects"),
    ):  # fmt: skip
        with pytest.raises(BadConversation, match=sentence):
            fetched(f"https://a.org/{path}", 100, "row 1")
    assert not any(host == "inside" for _, host, _, _ in web.asked)


def test_a_slow_answer_ends(web, monkeypatch):
    web.answers["a.org", "/slow"] = Answer(body=b"P" * 200_000)
    monkeypatch.setattr(fetching, "MOST_SECONDS", -1.0)
    with pytest.raises(BadConversation, match="took more than"):
        fetched("https://a.org/slow", 10**6, "row 1")


def test_rows_are_read_from_addresses_only_where_that_is_allowed(web, tmp_path):
    web.answers["a.org", "/x.png"] = Answer()
    with pytest.raises(BadConversation, match="no address is fetched without --allow_image_urls"):
        image_bytes("https://a.org/x.png", tmp_path, "row 1")
    assert web.asked == []
    assert image_bytes("https://a.org/x.png", tmp_path, "row 1", allow_urls=True) == b"PICTURE"
    web.answers["a.org", "/x.png"] = Answer()
    assert image_bytes({"path": "https://a.org/x.png"}, None, "row 1", allow_urls=True) == b"PICTURE"
    asked = list(web.asked)
    assert image_bytes("data:image/png;base64,AAAA", tmp_path, "row 1") == b"\0\0\0" and web.asked == asked
    with pytest.raises(BadConversation, match="begins with https://"):
        image_bytes("file:///etc/passwd", tmp_path, "row 1", allow_urls=True)
