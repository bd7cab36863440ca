from __future__ import annotations

import pytest

from threestep.plugins.vllm.servers.addresses import listed_servers, server_key
from training.utils.base.errors import ThreestepError


def test_a_list():
    assert listed_servers("http://a:8000, http://10.0.0.2:8001/,http://a:8000") == [
        "http://a:8000",
        "http://10.0.0.2:8001",
    ]
    assert listed_servers("http://[::1]:8000") == ["http://[::1]:8000"]


@pytest.mark.parametrize(
    "given", ["", "a:8000", "https://a:8000", "http://a", "http://a:99999", "http://a:1/v1", "http://user:word@a:1"]
)
def test_other_addresses(given):
    with pytest.raises(ThreestepError, match="http://HOST:PORT") as problem:
        listed_servers(given)
    assert "word" not in str(problem.value).replace("password", "")


def test_a_file(tmp_path):
    place = tmp_path / "servers"
    place.write_text("# ours\nhttp://a:1\n\nhttp://b:2  # the second\n", encoding="utf-8")
    assert listed_servers(f"@{place}") == ["http://a:1", "http://b:2"]
    place.write_text("", encoding="utf-8")
    assert listed_servers(f"@{place}") == []
    place.write_text("b:2", encoding="utf-8")
    with pytest.raises(ThreestepError, match="servers, which --vllm_servers names, expects http://HOST:PORT for each"):
        listed_servers(f"@{place}")
    with pytest.raises(ThreestepError, match="the file cannot be read"):
        listed_servers(f"@{tmp_path / 'none'}")


def test_the_key(tmp_path):
    place = tmp_path / "key"
    place.write_text("abc\n", encoding="utf-8")
    assert server_key({}) is None
    assert server_key({"VLLM_API_KEY_FILE": str(place)}) == "abc"
    assert server_key({"VLLM_API_KEY": "own", "VLLM_API_KEY_FILE": str(place)}) == "own"
    place.write_text("\n", encoding="utf-8")
    with pytest.raises(ThreestepError, match="which is empty; write the servers' key into it"):
        server_key({"VLLM_API_KEY_FILE": str(place)})
    with pytest.raises(ThreestepError, match="VLLM_API_KEY_FILE names a file that cannot be read"):
        server_key({"VLLM_API_KEY_FILE": str(tmp_path / "none")})
