"""The address of a server, and its limits."""

import pytest

pytest.importorskip("uvicorn", reason="serving needs the extra serve")

from vitrail.errors import InvalidOption, ServingError
from vitrail.serve import Limits
from vitrail.serve.server import bound_socket


def test_two_servers_on_one_port() -> None:
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with (
            pytest.raises(ServingError, match=rf"port {port} of 127\.0\.0\.1 .* choose another port"),
            bound_socket("127.0.0.1", port),
        ):
            pass
    with bound_socket("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_addresses_that_are_none() -> None:
    with pytest.raises(ServingError, match="not an address"), bound_socket("no such host.invalid", 0):
        pass
    with pytest.raises(ServingError, match="address of this machine"), bound_socket("192.0.2.1", 0):
        pass
    with pytest.raises(InvalidOption, match="port=65536"), bound_socket("127.0.0.1", 65536):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("queue", 1.5), ("queue", 31), ("megabytes", 0), ("seconds", float("inf")), ("wait_ms", -1),
     ("upload_megabytes", 19)],
)  # fmt: skip
def test_wrong_limits(name: str, value: float) -> None:
    with pytest.raises(InvalidOption, match=name):
        Limits(**{name: value})
