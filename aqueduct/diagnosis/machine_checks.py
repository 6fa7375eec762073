"""What of this machine matters: the kernel's buffers for UDP, the way's packet size, the clock."""

from __future__ import annotations

import ctypes
import socket
import sys
from typing import Final

from aqueduct.carriers.binding import SocketAddress
from aqueduct.diagnosis.findings import Finding, note, ok, warning

__all__ = ["LEAST_PACKET", "clock_here", "packet_size", "udp_buffers"]

LEAST_PACKET: Final = 1280
"""Bytes of an IP packet without which there is no QUIC: 1,200 of payload, and headers."""
_USUAL_PACKET: Final = 1500
_IP_MTU: Final = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (41, 24)}
_TIMEX_BYTES: Final = 512  # above the size of struct timex
_TIME_ERROR: Final = 5
_OPTIONS: Final = ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max"))


def udp_buffers(wanted: int, *, needed: bool) -> Finding:
    """Whether the kernel gives a UDP socket what QUIC asks for; ``needed``: QUIC is used."""
    check = "UDP buffers"
    got: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for option, name in _OPTIONS:
            try:
                sock.setsockopt(socket.SOL_SOCKET, option, wanted)
            except OSError:
                pass  # some systems refuse instead of giving less; what is there is read next
            size = sock.getsockopt(socket.SOL_SOCKET, option)
            # Linux reports twice of what was asked, for its own overhead.
            got[name] = size // 2 if sys.platform == "linux" else size
    short = {name: size for name, size in got.items() if size < wanted}
    if not short:
        return ok(check, f"the kernel gives the {wanted:,} bytes that QUIC asks for", **got)
    text = (
        f"the kernel gives {min(short.values()):,} of the {wanted:,} bytes that QUIC asks for "
        "(Quic.socket_buffer): bursts may be lost"
    )
    remedy = "sysctl -w " + " ".join(f"net.core.{name}={wanted}" for name in short)
    return (warning if needed else note)(check, text, remedy, **got)


def packet_size(family: int, where: SocketAddress, *, quic: bool) -> Finding:
    """The largest packet that this machine's kernel knows to fit the way there."""
    check = "path MTU"
    known = _IP_MTU.get(socket.AddressFamily(family))
    if sys.platform != "linux" or known is None:
        return note(check, "this system does not tell the packet size of a way")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(where)
            size = sock.getsockopt(*known)
    except OSError as error:  # there is no way for datagrams
        return note(check, f"this machine's kernel does not tell it: {error.strerror}")
    text = f"packets of {size:,} bytes, as far as this machine's kernel knows"
    if size >= _USUAL_PACKET:
        return ok(check, text, mtu=size)
    if size >= LEAST_PACKET or not quic:
        return warning(
            check,
            f"{text}: a tunnel or VPN is on the way, and each packet carries less",
            "ip link show (the MTU of the device that `ip route get` names)",
            mtu=size,
        )
    return warning(
        check,
        f"{text}; QUIC needs {LEAST_PACKET:,}",
        "use aqueduct+tls://, or raise the MTU: ip link set DEVICE mtu 1500",
        mtu=size,
    )


def clock_here(check: str) -> Finding:
    """Whether this machine's clock is kept by NTP, where the service's is not known."""
    unknown = (
        "the service does not tell its time. It does with aqueduct serve --benchmark, or "
        "Service(..., benchmark=True), to callers that may call aqueduct.benchmark"
    )
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (AttributeError, OSError):
        return note(check, unknown)
    if state == _TIME_ERROR:
        return note(
            check,
            f"{unknown}. The kernel says that nothing keeps this machine's clock right",
            "timedatectl set-ntp true",
            synchronized=False,
        )
    if state < 0:
        return note(check, unknown)
    return note(check, f"{unknown}. This machine's clock is kept by NTP", synchronized=True)
