"""What an error of a connection means, in words."""

from __future__ import annotations

import ssl

from aqueduct.carriers.stream.sockets import why
from aqueduct.carriers.stream.tls import explain
from aqueduct.carriers.verify import Flaw, TlsError

__all__ = ["reason_of"]


def reason_of(error: OSError, server_name: str = "", *, server: bool = False) -> str:
    """Of an error of TLS or of the network. ``server``: whether this side is the server."""
    if not isinstance(error, ssl.SSLError):
        return why(error)
    flaw = None
    if isinstance(error, ssl.SSLCertVerificationError):
        flaw = Flaw(error.verify_code, 0, reason=error.verify_message)
    text = (error.reason or str(error)).replace("_", " ").lower()
    return explain(TlsError(text, flaw), b"", server_name, server=server)
