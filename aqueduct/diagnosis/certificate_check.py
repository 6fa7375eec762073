"""The certificate that a service shows: who it is for, who vouches for it, for how long."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from OpenSSL import SSL

from aqueduct.address import Address
from aqueduct.carriers.certificates import (
    ClientTls,
    certificates_of,
    client_tls,
    fingerprint_of,
    identity_of,
)
from aqueduct.carriers.stream.tls import ALPN, speaks_tls, spoken
from aqueduct.carriers.tls_library import Trust
from aqueduct.carriers.verify import ascii_name, ip_of
from aqueduct.config import Config
from aqueduct.diagnosis.findings import Finding, failed, ok, warning
from aqueduct.escaping import escape

__all__ = ["judge", "shown_over_quic", "shown_over_tls"]

CHECK: Final = "certificate"
_SOON: Final = 14
"""Days before its end from which on a certificate is warned of."""
_ATTEMPT: Final = 0.25
"""Seconds before the next address of a name is tried beside the one before."""
_PIECE: Final = 64 << 10


async def shown_over_tls(host: str, port: int, name: str) -> list[x509.Certificate]:
    """The chain that a server shows in a TLS handshake, which trusts anything and sends nothing.

    Raises OSError, and ValueError for a server that speaks no TLS.
    """
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_alpn_protos([ALPN.encode()])
    connection = SSL.Connection(context)
    if name and ip_of(name) is None:
        connection.set_tlsext_host_name(ascii_name(name).encode())
    connection.set_connect_state()
    reader, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=_ATTEMPT)
    first = b""
    try:
        while True:
            try:
                connection.do_handshake()
                break
            except SSL.WantReadError:
                pass
            except SSL.Error as error:
                if first and not speaks_tls(first):
                    raise ValueError(f"no TLS is spoken there ({spoken(first)})") from error
                raise ValueError(f"the TLS handshake failed ({error})") from error
            writer.write(connection.bio_read(_PIECE))
            data = await reader.read(_PIECE)
            if not data:
                raise ValueError("the server closed the connection in the TLS handshake")
            first = first or data[:16]
            connection.bio_write(data)
        return connection.get_peer_cert_chain(as_cryptography=True) or []
    finally:
        writer.transport.abort()


async def shown_over_quic(address: Address, config: Config) -> list[x509.Certificate]:
    """The chain that a server shows in a handshake of QUIC. Raises ConnectFailed."""
    from aqueduct.carriers import quic  # a tenth of a second that others need not wait

    return await quic.shown_chain(address, config)


def judge(
    address: Address, tls: ClientTls | None, chain: Sequence[x509.Certificate]
) -> list[Finding]:
    """What is to be said of a chain that was shown."""
    if not chain:
        remedy = "ask who runs it for a certificate: aqueduct serve --certificate FILE --key FILE"
        return [failed(CHECK, "the service shows no certificate", remedy)]
    wanted = client_tls(address, tls)
    own = chain[0]
    end = own.not_valid_after_utc
    days = (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)
    names = identity_of(own).names
    facts = {
        "names": [escape(name) for name in names],
        "subjects": [escape(each.subject.rfc4514_string()) for each in chain],
        "issuer": escape(own.issuer.rfc4514_string()),
        "until": end.isoformat(),
        "days": round(days, 1),
        "fingerprint": fingerprint_of(own),
    }
    problem, remedy = _problem(address, wanted, chain)
    if problem:
        return [failed(CHECK, problem, remedy, **facts)]
    held = "pinned by its fingerprint" if wanted.fingerprint else "trusted"
    if not wanted.verify and not wanted.fingerprint:
        held = "not checked, as verify=off says"
    text = (
        f"for {escape(', '.join(names)) or 'no name'}, {len(chain)} in the chain, "
        f"{held}, valid for {days:.0f} days"
    )
    if days < _SOON:
        return [warning(CHECK, text, f"renew it before {end:%Y-%m-%d %H:%M} UTC", **facts)]
    if not wanted.verify and not wanted.fingerprint:
        pin = f"?fingerprint={facts['fingerprint']}"
        return [warning(CHECK, text, f"pin it with {pin}, or give its CA with ?ca=FILE", **facts)]
    return [ok(CHECK, text, **facts)]


def _problem(
    address: Address, wanted: ClientTls, chain: Sequence[x509.Certificate]
) -> tuple[str, str]:
    """Why a client refuses the chain, and what mends it; empty: it does not."""
    found = fingerprint_of(chain[0])
    if wanted.fingerprint is not None:
        if found == wanted.fingerprint:
            return "", ""
        return (
            f"it is {found}, and the address pins {wanted.fingerprint}",
            f"?fingerprint={found}, if the service has a new certificate",
        )
    if not wanted.verify:
        return "", ""
    name = ascii_name(wanted.server_name or address.host)
    authorities = None if wanted.ca is None else certificates_of(wanted.ca, "ca")
    flaw = Trust(authorities, "server", name).verify(chain)
    if flaw is None:
        return "", ""
    text, _, remedy = flaw.explain("server", name).partition("; ")
    return text, remedy
