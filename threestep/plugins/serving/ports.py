"""Ports, of the loopback address by default: taken by a page or an endpoint, and tried before a model is loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from threestep.plugins.serving.access import ADDRESS
from training.utils.base.errors import ThreestepError


def listening(port: int, address: str = ADDRESS) -> socket.socket:
    """A socket on an address, by default the loopback one. OSError where the port is taken; 0 takes a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()  # so that the port is taken
    except OSError:
        listener.close()
        raise
    return listener


def check_port(flag: str, port: int, address: str = ADDRESS) -> None:
    """ThreestepError where nothing can listen on `port`, the value of `flag`, at `address`, that of --host."""
    if not address.strip():  # the system takes it for all addresses
        raise ThreestepError(
            f"--host expects an address, got '{address}'; use {ADDRESS}, or 0.0.0.0 for all interfaces"
        )
    try:
        listening(port, address).close()
    except OSError as problem:
        if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
            raise ThreestepError(
                f"--host {address}: this machine has no such address; use one that it has"
            ) from problem
        raise port_refused(flag, port, problem) from problem


def port_refused(flag: str, port: int, problem: OSError) -> ThreestepError:
    """The mistake of a port that is in use, or closed to this user."""
    return ThreestepError(f"{flag} {port}: {problem.strerror}; choose another port")


@contextmanager
def taking_port(flag: str, port: int) -> Iterator[None]:
    """Open a server inside, on `port`, the value of `flag`; ThreestepError where that is refused."""
    try:
        yield
    except OSError as problem:
        raise port_refused(flag, port, problem) from problem
