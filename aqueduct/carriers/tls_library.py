"""The library that TLS and the check of certificates are by: OpenSSL, or else Python's ``ssl``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqueduct.carriers.foreign import Missing, warn_once

__all__ = ["Context", "Tls", "Trust", "client_context", "server_context"]

if TYPE_CHECKING:
    from aqueduct.carriers.tls_openssl import Context, Tls, Trust, client_context, server_context
else:
    try:
        from aqueduct.carriers.tls_openssl import (
            Context,
            Tls,
            Trust,
            client_context,
            server_context,
        )
    except Missing as reason:
        warn_once(reason, "TLS is by Python's ssl from here on, which is slower")
        from aqueduct.carriers.tls_stdlib import Context, client_context, server_context
        from aqueduct.carriers.tls_stdlib import PlainTls as Tls
        from aqueduct.carriers.tls_stdlib import PlainTrust as Trust
