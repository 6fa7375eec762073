"""All checks of ``aqueduct doctor``: what stands between this machine and a service."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.binding import SocketAddress, host_port, resolve
from aqueduct.carriers.certificates import ClientTls, client_tls
from aqueduct.client.client import Client
from aqueduct.config import DEFAULT, Config
from aqueduct.diagnosis.certificate_check import judge, shown_over_quic, shown_over_tls
from aqueduct.diagnosis.findings import Finding, Severity, failed, note, ok, warning, within
from aqueduct.diagnosis.machine_checks import clock_here, packet_size, udp_buffers
from aqueduct.endpoint import connect
from aqueduct.errors import AqueductError, CallError, ConfigError, ConnectionLost, Refused
from aqueduct.escaping import escape, one_line
from aqueduct.rpc import keys
from aqueduct.rpc.benchmark import BENCHMARK, question

__all__ = ["CARRIERS", "examine"]

CARRIERS: Final[Mapping[str, str]] = {
    "quic": "aqueduct",
    "tls": "aqueduct+tls",
    "tcp": "aqueduct+tcp",
}
"""Carriers with a port, and the schemes of their addresses."""
_Check = Callable[[], Awaitable[list[Finding]]]
_UNIX: Final = "aqueduct+unix"
_PINGS: Final = 10
_SKEWED: Final = 5.0
"""Seconds between two clocks from which on tokens and certificates suffer."""
_UNSTEADY: Final = 0.05
"""Seconds between the fastest and a slow round trip that are worth a word."""


async def examine(
    address: str,
    *,
    tls: ClientTls | None = None,
    token: str | None = None,
    ports: Mapping[str, int] | None = None,
    timeout: float = 5.0,
) -> list[Finding]:
    """Examines the way to ``address``. No check stops another, and each ends in time.

    ``ports``: where the other carriers of ``CARRIERS`` are looked for, by default at the port of
    the address. ``timeout``: seconds for each handshake. Raises ConfigError for an address of
    another kind.
    """
    place = Address.parse(address)
    if place.scheme not in (*CARRIERS.values(), _UNIX):
        raise ConfigError(
            f"{address}: only services at aqueduct:// and aqueduct+tls, +tcp and +unix are examined"
        )
    if not place.certified and tls is not None:
        raise ConfigError(f"{address}: there is no certificate on this carrier")
    client_tls(place, tls)  # options that contradict each other are an error of usage
    config = replace(DEFAULT, timing=replace(DEFAULT.timing, connect_timeout=timeout))
    return await _Examination(place, tls, token, ports or {}, config).run()


@dataclass(frozen=True, slots=True)
class _Examination:
    place: Address
    tls: ClientTls | None
    token: str | None
    ports: Mapping[str, int]
    config: Config

    async def run(self) -> list[Finding]:
        """All findings, in the order in which people look."""
        own = partial(self._reach, self.place.scheme, self.place.port)
        if self.place.unix:
            return [
                *_socket_file(self.place.path),
                *await self._all([own]),
                *await self._all([self._service]),
            ]
        quic = self.place.scheme == "aqueduct"
        names, found = await self._resolved()
        last = [udp_buffers(DEFAULT.quic.socket_buffer, needed=quic)]
        if not names:
            return [*found, *last]
        family, where = names[0]
        # Nothing else goes on beside the round trips.
        found += await self._all([own])
        checks: list[_Check] = [
            partial(self._reach, scheme, self.ports.get(name, self.place.port))
            for name, scheme in CARRIERS.items()
            if scheme != self.place.scheme
        ]
        if self.place.certified:
            checks.append(self._certificate)
        if len(names) > 1 and not quic:
            checks.append(partial(self._each_address, [where for _, where in names]))
        checks.append(partial(self._packet_size, family, where, quic))
        checks.append(self._service)
        found += await self._all(checks)
        return [*self._advised(found), *last]

    async def _all(self, checks: Sequence[_Check]) -> list[Finding]:
        seconds = 2 * self._timeout + 1
        several = await asyncio.gather(
            *(within(seconds, _name_of(check), check) for check in checks)
        )
        return [finding for findings in several for finding in findings]

    @property
    def _timeout(self) -> float:
        return self.config.timing.connect_timeout

    async def _resolved(self) -> tuple[list[tuple[int, SocketAddress]], list[Finding]]:
        check, host = "name", self.place.host
        try:
            async with asyncio.timeout(self._timeout):
                found = await resolve(host, self.place.port, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            slow = isinstance(error, TimeoutError)
            why = "was not resolved in time" if slow else f"does not resolve ({one_line(error)})"
            return [], [failed(check, f"{host!r} {why}", f"getent ahosts {escape(host)}")]
        names = list(dict.fromkeys((int(family), where) for family, _, _, _, where in found))
        hosts = [str(where[0]) for _, where in names]
        return names, [ok(check, f"{host} is {', '.join(hosts)}", addresses=hosts)]

    # each carrier

    async def _reach(self, scheme: str, port: int) -> list[Finding]:
        own = scheme == self.place.scheme
        place = self.place if own else Address(scheme, self.place.host, port)
        # Certificates are another check, and must not hide that there is a way.
        tls = None
        if place.certified:
            shown = self.tls if own and self.tls is not None else ClientTls()
            tls = replace(shown, verify=False, ca=None, fingerprint=None)
            keep = {"dialect", "server_name", "datagram_size"}
            options = {name: text for name, text in place.options.items() if name in keep}
            place = Address(scheme, place.host, place.port, options)
        check = f"reach {scheme}"
        began = time.perf_counter()
        try:
            connection = await connect(place, tls=tls, config=self.config)
        except (AqueductError, OSError) as error:
            reason = _reason(error)
            if not own:
                return [note(check, f"not at {_where(place)}: {reason}", port=port)]
            return [failed(check, reason, _way(place, reason), port=port)]
        handshake = time.perf_counter() - began
        try:
            text = f"{connection.peer} answers, handshake {_ms(handshake)}"
            found = [ok(check, text, port=port, handshake=handshake)]
            if own:
                found.append(await _round_trips(connection.ping, self.place.host))
                size = connection.snapshot().transport.get("datagram_size")
                if scheme == "aqueduct" and isinstance(size, int):
                    found.append(
                        ok("datagrams", f"QUIC sends {size:,} bytes in a datagram", size=size)
                    )
            return found
        finally:
            await connection.close()

    def _advised(self, found: list[Finding]) -> list[Finding]:
        """The same, and a carrier that works where the address's own does not."""
        reached = [
            each.check.partition(" ")[2]
            for each in found
            if each.check.startswith("reach ") and each.status is Severity.OK
        ]
        made = []
        for each in found:
            if each.check == f"reach {self.place.scheme}" and each.status is Severity.FAILED:
                others = " or ".join(f"{scheme}://" for scheme in reached)
                if others:
                    advice = "; ".join(filter(None, (each.remedy, f"{others} works")))
                    each = replace(each, remedy=advice)
            made.append(each)
        return made

    async def _certificate(self) -> list[Finding]:
        wanted = client_tls(self.place, self.tls)
        name = wanted.server_name or self.place.host
        try:
            if self.place.scheme == "aqueduct":
                named = {"server_name": wanted.server_name} if wanted.server_name else {}
                bare = Address(self.place.scheme, self.place.host, self.place.port, named)
                chain = await shown_over_quic(bare, self.config)
            else:
                async with asyncio.timeout(self._timeout):
                    chain = await shown_over_tls(self.place.host, self.place.port, name)
        except TimeoutError:
            return [note("certificate", "not known: the server did not show it in time")]
        except (OSError, ValueError, AqueductError) as error:
            reason = _reason(error)
            return [note("certificate", f"not known: {reason}")]
        return judge(self.place, self.tls, chain)

    async def _each_address(self, places: list[SocketAddress]) -> list[Finding]:
        """Clients take the first address that answers, so one that does not is easily missed."""

        async def tried(where: SocketAddress) -> str:
            try:
                async with asyncio.timeout(self._timeout):
                    _, writer = await asyncio.open_connection(where[0], where[1])
            except TimeoutError:
                return "no answer"
            except OSError as error:
                return one_line(error)
            writer.transport.abort()
            return ""

        outcomes = await asyncio.gather(*map(tried, places))
        bad = {host_port(where): why for where, why in zip(places, outcomes, strict=True) if why}
        if not bad:
            return [ok("addresses", f"all {len(places)} take TCP connections")]
        some = "; ".join(f"{where}: {why}" for where, why in bad.items())
        text = f"{len(bad)} of {len(places)} do not answer: {some}"
        remedy = "remove it from the name's records, or let the service listen there, too"
        return [warning("addresses", text, remedy, bad=bad)]

    async def _packet_size(self, family: int, where: SocketAddress, quic: bool) -> list[Finding]:
        return [packet_size(family, where, quic=quic)]

    # the service

    async def _service(self) -> list[Finding]:
        check = "service"
        ours = _version()
        try:
            client = await Client.connect(
                str(self.place), tls=self.tls, token=self.token, config=self.config
            )
        except (AqueductError, OSError) as error:
            return [failed(check, one_line(error))]
        async with client:
            try:
                told = await client.describe()
            except CallError as error:
                if isinstance(error, Refused) and error.draining:
                    found = failed(check, one_line(error), library_here=ours)
                    return [found, clock_here("clock")]
                if self.token is not None or not isinstance(error, Refused):
                    told_no = f"it does not answer this token: {one_line(error)}"
                    remedy = "show a token that the service knows: --token-file FILE"
                    if not isinstance(error, Refused):
                        remedy = ""
                    found = failed(check, told_no, remedy, library_here=ours)
                    return [found, clock_here("clock")]
                remedy = "show a token: --token-file FILE"
                text = f"it speaks our protocol, and does not tell its version: {one_line(error)}"
                return [note(check, text, remedy, library_here=ours), clock_here("clock")]
            facts = {
                "service": escape(told.service),
                "library": escape(told.library),
                "library_here": ours,
                "convention": told.convention,
                "convention_here": keys.VERSION,
            }
            text = (
                f"{told.service}, aqueduct-arrow {told.library} and call convention "
                f"{told.convention}; here {ours} and {keys.VERSION}"
            )
            same = told.library == ours
            found = Finding(check, Severity.OK if same else Severity.NOTE, text, facts=facts)
            return [found, await _clock(client)]


async def _clock(client: Client) -> Finding:
    check = "clock"
    try:
        best: tuple[float, float] | None = None
        for _ in range(3):
            before = time.time()
            answer = await client.call(BENCHMARK, question(0))
            trip = time.time() - before
            skew = answer["time"][0].as_py() - (before + trip / 2)
            best = min(best or (trip, skew), (trip, skew))
    except (CallError, ConnectionLost):
        return clock_here(check)
    assert best is not None
    trip, skew = best
    facts = {"skew": skew, "uncertainty": trip / 2}
    side = "ahead of" if skew > 0 else "behind"
    if abs(skew) <= trip / 2:
        return ok(check, f"both clocks agree, within {_ms(trip / 2)}", **facts)
    text = f"the service's clock is {abs(skew):.3f} s {side} ours, within {_ms(trip / 2)}"
    if abs(skew) > _SKEWED:
        remedy = "timedatectl set-ntp true, on the machine whose clock is wrong"
        return warning(check, f"{text}: tokens and certificates expire by it", remedy, **facts)
    return ok(check, text, **facts)


def _is_here(host: str) -> bool:
    """Whether a host of an address is this machine; it is empty for a socket file."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("", "localhost")


async def _round_trips(ping: Callable[[], Awaitable[float]], host: str) -> Finding:
    """``host``: of the service; empty: it is on this machine."""
    check = "round trip"
    try:
        trips = sorted([await ping() for _ in range(_PINGS)])
    except (ConnectionLost, TimeoutError) as error:
        return failed(check, one_line(error) or "a ping was not answered")
    middle, spread = statistics.median(trips), trips[-1] - trips[0]
    text = f"{_ms(middle)}, from {_ms(trips[0])} to {_ms(trips[-1])} in {_PINGS} pings"
    facts = {"median": middle, "least": trips[0], "most": trips[-1]}
    if spread > max(_UNSTEADY, 5 * middle):
        remedy = "look for what else takes this machine's processors: top"
        if not _is_here(host):
            remedy = f"look for a full queue or a bad link on the way: mtr {escape(host)}"
        return warning(check, f"{text}: it varies much", remedy, **facts)
    return ok(check, text, **facts)


def _socket_file(path: str) -> list[Finding]:
    check = "socket file"
    try:
        found = os.stat(path)
    except OSError as error:
        why = f"{path} cannot be looked at ({error.strerror})"
        remedy = "start the service, or correct the path; its directory must let clients through"
        return [failed(check, why, remedy)]
    mode = stat.S_IMODE(found.st_mode)
    text = f"{path}, mode {mode:04o}, user {found.st_uid}, group {found.st_gid}"
    facts = {"mode": f"{mode:04o}", "uid": found.st_uid, "gid": found.st_gid}
    if not stat.S_ISSOCK(found.st_mode):
        return [failed(check, f"{text}: it is no socket", "correct the path", **facts)]
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        text = f"{text}: this user ({os.getuid()}) may not connect"
        remedy = "listen at ...?mode=0660, and join its group; or run as the service's user"
        return [failed(check, text, remedy, **facts)]
    return [ok(check, text, **facts)]


def _way(place: Address, reason: str) -> str:
    """What lets packets through to a place that cannot be reached."""
    if place.unix:
        return "start the service there" if "no server listens" in reason else ""
    kind = "udp" if place.scheme == "aqueduct" else "tcp"
    if "refused" in reason:
        option = "-lun" if kind == "udp" else "-ltn"
        return f"start the service there; `ss {option}` on its machine shows what listens"
    if "reached" not in reason and ("within" in reason or "time" in reason):
        return f"let {kind.upper()} port {place.port} through the firewalls on the way"
    if "it speaks" in reason:
        return "correct the scheme or the port: something else is served there"
    return ""


def _reason(error: BaseException) -> str:
    """Why something failed, without the address, which the reader knows."""
    if isinstance(error, ConnectionLost) and error.reason:
        return escape(error.reason)
    return one_line(error)


def _where(place: Address) -> str:
    return host_port((place.host, place.port))


def _name_of(check: _Check) -> str:
    if isinstance(check, partial) and check.func.__name__ == "_reach":
        return f"reach {check.args[0]}"
    function = check.func if isinstance(check, partial) else check
    return function.__name__.strip("_").replace("_", " ")


def _version() -> str:
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "(not installed)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"
