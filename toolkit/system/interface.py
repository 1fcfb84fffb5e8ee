"""This machine on the network: the interface by which it reaches another one, and a free port."""

import contextlib
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def interface_toward(host: str, port: int) -> str | None:
    """The name of the interface, such as eth0, from which packets to a host leave; nothing is sent to find out.

    For gloo (torch 2.13), which takes the interface that this machine's own host name stands for. Debian and Ubuntu let that be
    loopback, in /etc/hosts: then every rank tells the others to look for it on themselves.

    None where it can't be said: not on Linux, an unknown host, IPv6 only, or a name of this machine that means loopback.
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
