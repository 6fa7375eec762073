"""Where and how ``Service.run`` serves, once its operator's settings are taken into account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from aqueduct.errors import ConfigError
from aqueduct.settings.in_force import ServiceSettings
from aqueduct.settings.table import Serve

__all__ = ["as_operated"]

_CERTIFICATE: Final = ("certificate", "key", "key_password", "client_ca")


def as_operated(
    operator: ServiceSettings, addresses: Sequence[Any], given: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The addresses and options to serve with: ``given`` by a program, or set by its operator.

    Raises ConfigError for settings that one process cannot follow.
    """
    workers = operator.given.get("serve.workers")
    if workers is not None and workers.value > 1:
        raise ConfigError(
            f"{workers.where} is {workers.value}, but Service.run serves by one process; aqueduct "
            "serve MODULE:SERVICE serves by several"
        )
    places = operator.value("serve.listen") or addresses
    options = dict(given)
    if "serve.origins" in operator.given:
        options["origins"] = operator.value("serve.origins")
    if "timing.drain_timeout" in operator.given:
        options["drain"] = None  # it is that of the service's settings
    if "serve.admin" in operator.given:
        options["admin"] = operator.value("serve.admin")
    names = (*_CERTIFICATE, "dev_certificate")
    if not any(f"serve.{name}" in operator.given for name in names):
        return places, options
    tls = given["tls"]
    code = Serve(
        **{name: given[name] if tls is None else getattr(tls, name) for name in _CERTIFICATE},
        dev_certificate=given["dev_certificate"],
    )
    if "serve.certificate" in operator.given:  # to which the program's key does not belong
        code = replace(code, key=None, key_password=None)
    serve = operator.serve(code)
    for name in ("key", "key_password", "client_ca"):
        told = operator.given.get(f"serve.{name}")
        if told is not None and not (serve.certificate or serve.dev_certificate):
            raise ConfigError(f"{told.where} was given without a certificate of the service's own")
    if tls is not None and serve.certificate is tls.certificate:
        found = {name: getattr(serve, name) for name in _CERTIFICATE}
        return places, {**options, "tls": replace(tls, **found)}
    return places, {**options, "tls": None, **{name: getattr(serve, name) for name in names}}
