"""What a TLS handshake over a byte stream means: the protocol within it, and why it failed."""

from __future__ import annotations

from typing import Final

from aqueduct.carriers.verify import TlsError

__all__ = ["ALPN", "LINK_ALPN", "REFUSAL", "explain", "speaks_tls", "spoken"]

ALPN: Final = "aqueduct-bpmux"
LINK_ALPN: Final = "aqueduct-relink"
"""bpmux on a link, which can be resumed."""
_HANDSHAKE: Final = 22  # record types of TLS
_ALERT: Final = 21
REFUSAL: Final = bytes((_ALERT, 3, 3, 0, 2, 2, 70))
"""A fatal alert, protocol_version: what a server says in TLS to who does not speak it."""


def speaks_tls(data: bytes) -> bool:
    """Whether these first bytes of a peer are TLS: a handshake or an alert."""
    return len(data) >= 2 and data[0] in (_HANDSHAKE, _ALERT) and data[1] == 3


def explain(error: TlsError, first: bytes, server_name: str, *, server: bool) -> str:
    """What a failed handshake means, and what to do about it."""
    who = "the client" if server else "the server"
    if first and not speaks_tls(first):
        plain = "aqueduct+tcp://" if not server else "aqueduct+tls:// there"
        return f"{who} does not speak TLS ({spoken(first)}); use {plain}"
    if error.flaw is not None:
        return error.flaw.explain("client" if server else "server", server_name)
    reason = error.reason.lower()
    if "certificate required" in reason or "did not return a certificate" in reason:
        if server:
            return "the client shows no certificate, which ServerTls.client_ca demands"
        return "the server demands a certificate: give one in ClientTls.certificate"
    if "alert" in reason:
        return f"{who} ended the handshake: {reason[reason.index('alert') :]}"
    if "eof" in reason:
        return f"{who} closed the connection in the handshake"
    return f"the handshake failed: {reason}"


def spoken(first: bytes) -> str:
    """What a peer speaks, by its first bytes."""
    if speaks_tls(first):
        return "it speaks TLS"
    if first.startswith((b"GET ", b"PUT ", b"POST", b"HEAD", b"HTTP/", b"PRI * ", b"OPTIONS ")):
        return "it speaks HTTP"
    if first.startswith(b"SSH-"):
        return "it speaks SSH"
    if first[:2] == bytes((0xA8, 0)):
        return "it speaks Aqueduct without TLS"
    return f"its first bytes are {first[:8]!r}"
