"""QUIC, by aioquic: the carrier of ``aqueduct://``."""

import logging

from aqueduct.carriers.certificates import ClientTls, ServerTls, dev_certificate

# Before all that imports aioquic: an error of this one says what to install.
from aqueduct.carriers.quic import aioquic_names  # noqa: F401
from aqueduct.carriers.quic.binding import bind
from aqueduct.carriers.quic.connect import connect, shown_chain
from aqueduct.carriers.quic.connection import QuicCarrier
from aqueduct.carriers.quic.listener import QuicListener, listen

__all__ = [
    "ClientTls",
    "QuicCarrier",
    "QuicListener",
    "ServerTls",
    "bind",
    "connect",
    "dev_certificate",
    "listen",
    "shown_chain",
]

# aioquic logs what peers do wrong, which this library reports by errors. Where nobody has
# configured logging, Python would write that to the terminal. Configured, it is as it was.
logging.getLogger("quic").addHandler(logging.NullHandler())
