"""TLS inside QUIC: from what client and server demand and show to the library's settings.

The library's own check of certificates is off: ``trust_of`` says what is demanded instead.
"""

from __future__ import annotations

import ssl
from typing import Final

from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import CipherSuite
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from aqueduct.address import Address
from aqueduct.carriers.certificates import ClientTls, ServerTls, certificates_of, chain_of
from aqueduct.carriers.tls_library import Trust
from aqueduct.carriers.verify import ascii_name
from aqueduct.config import Config
from aqueduct.errors import ConfigError

__all__ = ["ALPN", "BIDI_ALPN", "client_configuration", "server_configuration", "trust_of"]

ALPN = "aqueduct"
BIDI_ALPN = "aqueduct-cs"
"""With bidirectional streams."""
DATAGRAM_FRAME_SIZE = 65_535  # announced to the peer: as large as packets can be

# AES-128 first: it is the fastest where the processor has AES instructions.
_SUITES = (
    CipherSuite.AES_128_GCM_SHA256,
    CipherSuite.AES_256_GCM_SHA384,
    CipherSuite.CHACHA20_POLY1305_SHA256,
)

# What aioquic can do as a server.
_CURVES: Final = ("secp256r1", "secp384r1")
_CHAIN: Final = 15 << 10  # bytes: its 16 KiB for a handshake hold some other messages, too


def client_configuration(
    address: Address, config: Config, tls: ClientTls, *, bidi: bool = False
) -> QuicConfiguration:
    """The QUIC library's settings for a client. Raises ConfigError."""
    if tls.certificate is not None:
        raise ConfigError(
            "ClientTls.certificate: a client cannot show a certificate over QUIC (aioquic has no "
            "call for it); use aqueduct+tls://, or a token"
        )
    configuration = _configuration(config, BIDI_ALPN if bidi else ALPN, is_client=True)
    configuration.server_name = ascii_name(tls.server_name or address.host)
    configuration.verify_mode = ssl.CERT_NONE
    return configuration


def trust_of(address: Address, tls: ClientTls) -> Trust | None:
    """What a client demands of the server's certificate; None: nothing of its issuer and name.

    Raises ConfigError.
    """
    if tls.fingerprint is not None or not tls.verify:
        return None
    authorities = None if tls.ca is None else certificates_of(tls.ca, "ca")
    return Trust(authorities, "server", ascii_name(tls.server_name or address.host))


def server_configuration(
    config: Config, tls: ServerTls, *, bidi: bool = False
) -> QuicConfiguration:
    """The QUIC library's settings for a server. Raises ConfigError."""
    if tls.client_ca is not None:
        raise ConfigError(
            "ServerTls.client_ca: a client certificate cannot be demanded over QUIC (aioquic has "
            "no call for it); authorize clients by a token instead, or serve aqueduct+tls://"
        )
    protocols = (ALPN, BIDI_ALPN) if bidi else (ALPN,)
    configuration = _configuration(config, *protocols, is_client=False)
    chain, key = chain_of(tls)
    if isinstance(key, EllipticCurvePrivateKey) and key.curve.name not in _CURVES:
        raise ConfigError(
            f"a key on the curve {key.curve.name} signs no handshake over QUIC (aioquic has "
            f"{' and '.join(_CURVES)}); take another key, or serve aqueduct+tls://"
        )
    size = sum(len(one.public_bytes(Encoding.DER)) for one in chain)
    if size > _CHAIN:
        raise ConfigError(
            f"the certificate and those that vouch for it are {size} bytes; over QUIC they may "
            f"be {_CHAIN} (aioquic); take one with fewer names, or serve aqueduct+tls://"
        )
    configuration.certificate = chain[0]
    configuration.certificate_chain = chain[1:]
    configuration.private_key = key
    return configuration


def _configuration(config: Config, *protocols: str, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=list(protocols),
        cipher_suites=list(_SUITES),
        idle_timeout=config.timing.idle_timeout,
        max_data=config.flow.initial_window * config.flow.streams,
        max_stream_data=config.flow.initial_window,
        max_datagram_frame_size=DATAGRAM_FRAME_SIZE,
    )
