"""The network: offline mode without a connection to the Hub, a free port, the interface toward another machine."""

import contextlib
import os
import socket
import struct
import sys
from urllib.parse import urlparse

CONNECT_SECONDS = 3.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def stay_offline_without_network() -> None:
    """Put the Hub's libraries into their offline mode when no connection to the Hub can be made within three seconds.

    The Hub's client would try five times before it looks into its cache. Behind a proxy nothing is checked: it resolves names.
    """
    if os.environ.get("HF_HUB_OFFLINE") or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or {"http": 80}.get(address.scheme, 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        import datasets
        import huggingface_hub.constants

        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def interface_toward(host: str, port: int) -> str | None:
    """The name of the interface, such as eth0, from which packets to a host leave; nothing is sent to find out.

    For gloo (torch 2.13), which takes the interface of this machine's own host name. Debian and Ubuntu let that be
    loopback, in /etc/hosts: then every rank sends the others to themselves.

    None where it is not known: not on Linux, an unknown host, IPv6 only, or a name of this machine that means loopback.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address = probe.getsockname()[0]
        if address.startswith("127.") and host != address:
            return None
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None
