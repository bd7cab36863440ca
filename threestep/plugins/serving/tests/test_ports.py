"""Ports that are taken, free, and tried before a model is loaded."""

from __future__ import annotations

import pytest

from threestep.plugins.serving.ports import check_port, listening
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import free_port


def test_a_socket_is_of_this_machine_alone_and_its_port_is_free():
    with listening(0) as first:
        address, port = first.getsockname()
        first.listen()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening(port)


def test_a_port_that_is_in_use_is_a_sentence_and_one_that_is_free_stays_free():
    with listening(0) as taken:
        with pytest.raises(ThreestepError, match="^--port [0-9]+: Address already in use; give another port$"):
            check_port("--port", taken.getsockname()[1])
    port = free_port()
    check_port("--port", port)
    check_port("--port", 0)
    listening(port).close()
