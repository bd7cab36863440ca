"""Who is let in: hosts, origins and tokens, forged in every way that a request allows."""

from __future__ import annotations

import pytest

from threestep.plugins.serving.access import Door

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
        ([], "this page is served to 127.0.0.1 alone"),
        ([("Host", "evil.example:8900")], "this page is served to 127.0.0.1 alone"),
        ([("Host", "127.0.0.1.evil.example")], "this page is served to 127.0.0.1 alone"),
        ([("Host", "evil.example:127.0.0.1")], "this page is served to 127.0.0.1 alone"),
        ([("Host", "127.0.0.1:8900@evil.example")], "this page is served to 127.0.0.1 alone"),
        ([HOST, ("host", "evil.example")], "this page is served to 127.0.0.1 alone"),
        ([HOST, ("Origin", "http://evil.example")], "this page answers no other site"),
        ([HOST, ("Origin", "null")], "this page answers no other site"),
        ([HOST, ("Origin", "http://127.0.0.1:3000")], "this page answers no other site"),
        ([HOST, ("Origin", "http://127.0.0.1:8900"), ("Origin", "http://evil.example")], "answers no other site"),
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
