"""The interface that gloo is given, compared with what the kernel's routing table says.

Each test names the one-line change under which it fails.
"""

import json
import shutil
import socket
import subprocess
import sys

import pytest

from toolkit.distributed.launch import Nodes, rank_environments
from toolkit.system.network import interface_toward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the interface isn't looked for")


def test_loopback_is_named_only_where_it_is_asked_for() -> None:
    """Fails when: a host name that /etc/hosts gives to loopback, as Debian's does, puts gloo on loopback."""
    assert interface_toward("127.0.0.1", 29500) == "lo"
    assert interface_toward("localhost", 29500) is None


def test_a_host_that_nobody_knows_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the launcher ends where torch would have said what is wrong."""

    def unknown(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket.socket, "connect", unknown)
    assert interface_toward("node0", 29500) is None


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2, to compare with")
def test_the_interface_is_that_of_the_route() -> None:
    """192.0.2.1 is reserved for documentation. Fails when: the first interface is taken, which is loopback."""
    found = subprocess.run(["ip", "-json", "route", "get", "192.0.2.1"], capture_output=True, text=True, timeout=10, check=False)
    if found.returncode != 0:
        pytest.skip("this machine has no route to anywhere")
    assert interface_toward("192.0.2.1", 29500) == json.loads(found.stdout)[0]["dev"]


def test_ranks_of_several_machines_are_told_unless_the_user_told_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: GLOO_SOCKET_IFNAME of the user is overwritten, or ranks of one machine are bound to an interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    two = Nodes(2, 1, "127.0.0.1", 1234)
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in rank_environments(2, two)} == {"lo"}
    assert not any("GLOO_SOCKET_IFNAME" in rank for rank in rank_environments(2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert not any("GLOO_SOCKET_IFNAME" in rank for rank in rank_environments(2, two))
