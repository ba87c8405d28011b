"""A port that cannot be had is told before anything is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from service.errors import ListenError
from service.listening import check_port


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_is_refused_on_its_address_and_on_all(taken: int, host: str) -> None:
    with pytest.raises(ListenError, match=rf"{host}:{taken}: Address already in use"):
        check_port(host, taken)


def test_a_free_port_is_still_free_afterwards(taken: int) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
    check_port("127.0.0.2", port)
    socket.create_server(("127.0.0.2", port)).close()
    check_port("127.0.0.1", 0)


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1:0: Cannot assign requested address$"):
        check_port("192.0.2.1", 0)


def test_a_host_that_has_no_address_is_refused_by_name() -> None:
    with pytest.raises(ListenError, match=r"^no\.such\.invalid:8000: "):
        check_port("no.such.invalid", 8000)
