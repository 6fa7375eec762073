"""``Service``: handlers for Arrow record batches, and what serves them.

::

    service = aqueduct.Service("words")

    @service.handler("lengths", input=WORDS, output=LENGTHS, concurrency=4)
    def lengths(batch):                       # a function of one batch: in threads
        return pa.record_batch({"length": pc.utf8_length(batch["word"])}, schema=LENGTHS)

    @service.handler("enrich", output=ENRICHED)
    async def enrich(batches, call):          # an async generator: on the event loop
        async for batch in batches:
            yield await look_up(batch, call.headers["region"])

    @service.handler("sort")
    def sort(batches, call):                  # a plain generator: in a thread of its own
        yield from pa.Table.from_batches(batches, schema=call.schema).sort_by("id").to_batches()

    service.run("aqueduct://0.0.0.0:4433", certificate="server.pem", key="server.key")

A handler without a name has that of its function: ``@service.handler`` and
``@service.handler(output=ENRICHED)`` do, too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast, overload

import pyarrow as pa

from aqueduct.address import Address
from aqueduct.admin.routes import admin_routes
from aqueduct.admin.thread import AdminThread
from aqueduct.arguments import UNGIVEN, Duration, checked
from aqueduct.carriers import certificates
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConfigError, LocalProtocolError
from aqueduct.escaping import logger_of
from aqueduct.rpc.benchmark import BENCHMARK
from aqueduct.rpc.describe import (
    DESCRIBE,
    DESCRIBE_SCHEMA,
    RESERVED_PREFIX,
    Description,
    HandlerDescription,
    SinkSummary,
    TableDescription,
)
from aqueduct.rpc.request import Kind
from aqueduct.rpc.threads import apart
from aqueduct.service.batching import Batching
from aqueduct.service.benchmark import benchmark_handler
from aqueduct.service.handlers import (
    EXCHANGE,
    SOURCE,
    Handler,
    OutputSchema,
    make_handler,
    object_of,
)
from aqueduct.service.lifetime import Lifetime, unless
from aqueduct.service.namespace import Namespace
from aqueduct.service.operated import as_operated
from aqueduct.service.reporting import ServiceReporter
from aqueduct.service.server import COUNTERS, Authorize, RunningService
from aqueduct.service.signals import Holders, ProcessDeadline, ServiceSignals, say, tell_state
from aqueduct.service.sinks import Sink
from aqueduct.service.tables import Filters, Table, TableSchema, make_table
from aqueduct.service.telemetry import CounterObserver, Observer
from aqueduct.settings.places import read_settings

__all__ = ["Service", "serve_until_signal"]

log = logger_of(__name__)

_SHOWN: Final = 5  # names of each kind in the repr of a service

Function = TypeVar("Function", bound=Callable[..., Any])
Declared = TypeVar("Declared")
File = str | PathLike[str] | bytes


class Service:
    """A name, some handlers, and the ways to serve them.

    - ``description``: what it is for, in a line or two; clients read it by ``describe``.
    - ``config``: limits, windows and timeouts of every connection.
    - ``authorize``: called with each ``Call`` before anything else is told about it; looks at
      ``token``, ``headers``, ``peer_identity`` or ``peer_credentials``. None and True allow the
      call. False refuses it, and so does raising ``Refused``, with a text for the client. Any other
      answer and any other exception refuse it too, with an error in the log. It may be a
      coroutine function; it runs on the event loop, so it must not block.
    - ``telemetry``: told of each call's beginning and end; ``aqueduct.OpenTelemetry()`` makes spans
      and metrics of them.
    - ``benchmark``: with the handler ``aqueduct.benchmark``, for ``aqueduct bench`` and ``doctor``.
      It does nothing but to answer, up to four calls at once, and ``authorize`` is asked.

    A service may be served more than once at a time, by ``serving`` or ``run``.
    """

    @checked()
    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        config: Config = DEFAULT,
        authorize: Authorize | None = None,
        telemetry: Observer | None = None,
        benchmark: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ConfigError(f"a service's name is {name!r}; it must be printable text")
        self.name = name
        self.description = description
        self.config = config
        self.authorize = authorize
        self.telemetry = telemetry
        self.state = Namespace(
            whose="service.state", hint="; an on_start function may set more, once it is served"
        )
        """Attributes of your own, for all calls: what ``on_start`` functions have made."""
        self._lifetime = Lifetime(name, config.timing, self)
        self._handlers: dict[str, Handler] = {}
        self._sinks: dict[str, Sink] = {}
        self._tables: dict[str, Table] = {}
        self._servings: list[RunningService] = []
        self._ended: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._describing = threading.Lock()
        self._described: tuple[tuple[object, ...], pa.RecordBatch] | None = None
        """The description as clients get it, and of what it was made."""
        self._add_description()
        self._offer_benchmark(benchmark)
        if isinstance(telemetry, CounterObserver):
            telemetry.serves(name, self.counters)

    @overload
    def handler(self, name: Function) -> Function: ...

    @overload
    def handler(
        self,
        name: str = ...,
        *,
        input: pa.Schema | None = None,
        output: OutputSchema = None,
        kind: Kind = EXCHANGE,
        concurrency: int = 1,
        idempotent: bool = False,
        max_calls: int | None = None,
        max_concurrency: int | None = None,
        queue: int | None = None,
        batch: Batching | None = None,
        description: str = "",
        numpy: bool | Literal["nan"] = False,
    ) -> Callable[[Function], Function]: ...

    @checked()
    def handler(
        self,
        name: Any = UNGIVEN,
        *,
        input: pa.Schema | None = None,
        output: OutputSchema = None,
        kind: Kind = EXCHANGE,
        concurrency: int = 1,
        idempotent: bool = False,
        max_calls: int | None = None,
        max_concurrency: int | None = None,
        queue: int | None = None,
        batch: Batching | None = None,
        description: str = "",
        numpy: bool | Literal["nan"] = False,
    ) -> Any:
        """Registers the decorated function, and returns it unchanged.

        - ``name``: what clients call it by; without one, the function's own name.
          ``@service.handler`` without parentheses does as well.
        - ``kind``: ``exchange`` (batches in and out), ``source`` (out alone) or ``sink`` (in
          alone; it may return a dict of counters). See the table in ``aqueduct.service.handlers``
          for how each may be written, and ``Call`` for the argument that may be left out.
        - ``input``: the schema of the batches it accepts, compared before it is called. None
          accepts any.
        - ``output``: the schema of the batches that it yields; a callable that makes it of the
          input's schema (for a source: of the Call); or None for the input's own.
        - ``concurrency``: how many batches of one call a function of one batch works on at once;
          the answers are put in order.
        - ``idempotent``: whether a batch may be handed to it a second time.
        - ``max_calls``: calls open at once; more are answered with ``busy``. The service's own
          limits (Calls.max_calls_connection, Calls.max_calls_process) hold beside it.
        - ``max_concurrency``: calls that run at once; of a function of one batch, the batches of
          all calls. Others wait for their turn: peers take turns, and the calls of each. None: any
          number runs.
        - ``queue``: calls that wait for their turn; more are answered with ``busy``. None:
          Calls.queue. One that has waited for Calls.queue_deadline ends with ``busy``, too.
        - ``batch``: an ``aqueduct.Batching``. It puts batches of different calls together for a
          function of one batch, which gives one row for each row. ``max_concurrency`` is 1 then,
          unless it is given. The function's second argument is a tuple of ``aqueduct.CallRows``.
        - ``description``: for ``describe``; by default the first paragraph of the docstring.
        - ``numpy``: the function of one batch is given a dict of numpy arrays, and returns one (or
          one array, if the output has one column); ``aqueduct.arrow.numpy_arrays`` says how
          columns become arrays. ``"nan"``: nulls of floats become NaN; other nulls fail the call.

        Raises ConfigError for what cannot work.
        """
        function, name = _apart(name, "handler", 256)

        def register(function: Function) -> Function:
            called = _own_name(function, "handler") if name is UNGIVEN else name
            if isinstance(called, str) and called.startswith(RESERVED_PREFIX):
                raise ConfigError(
                    f"handler {called!r}: names that begin with {RESERVED_PREFIX!r} are the "
                    "library's"
                )
            made = make_handler(
                function,
                name=called,
                kind=kind,
                input=input,
                output=output,
                concurrency=concurrency,
                idempotent=idempotent,
                max_calls=max_calls,
                description=description,
                max_concurrency=max_concurrency,
                queue=queue,
                batch=batch,
                numpy=numpy,
            )
            if called in self._handlers:
                raise ConfigError(f"the service {self.name!r} has a handler {called!r} already")
            self._handlers[called] = made
            return function

        return register if function is None else register(function)

    @overload
    def sink(self, name: type[Declared]) -> type[Declared]: ...

    @overload
    def sink(
        self,
        name: str = ...,
        *,
        schema: pa.Schema | None = None,
        time_to_live: Duration | None = None,
        description: str = "",
    ) -> Callable[[type[Declared]], type[Declared]]: ...

    @overload
    def sink(
        self,
        name: str,
        sink: Any,
        *,
        schema: pa.Schema | None = None,
        time_to_live: Duration | None = None,
        description: str = "",
    ) -> Sink: ...

    @checked(schema="")  # looked at with the rest, so that the error names the sink
    def sink(
        self,
        name: Any = UNGIVEN,
        sink: Any = UNGIVEN,
        *,
        schema: pa.Schema | None = None,
        time_to_live: Any = None,
        description: str = "",
    ) -> Any:
        """Registers a sink whose rows are written exactly once; see ``aqueduct.service.sinks``.

        It gives the registered Sink, or decorates a class and returns it unchanged:
        ``@service.sink``, ``@service.sink("store", schema=ROWS)``.

        - ``name``: what clients call it by; a decorated class without one gives its own.
        - ``sink``: an object with ``open``, ``commit`` and ``abort``, or a class that makes one.
          Without it this is a decorator.
        - ``schema``: of the batches that it takes; None: of any.
        - ``time_to_live``: seconds after the last sign of a write, until what it prepared and
          nobody committed is aborted; None: Sinks.time_to_live.
        - ``description``: by default the first paragraph of the docstring.

        Raises ConfigError for what cannot work.
        """
        declared, name = _apart(name, "sink", 200)

        def register(sink: Any) -> Sink:
            called = _own_name(sink, "sink") if name is UNGIVEN else name
            if isinstance(called, str) and called in self._sinks:
                raise ConfigError(f"the service {self.name!r} has a sink {called!r} already")
            made = Sink(
                called,
                sink,
                schema=schema,
                limits=self.config.sinks,
                time_to_live=time_to_live,
                description=description,
            )
            self._sinks[called] = made
            self._handlers.update({handler.name: handler for handler in made.handlers()})
            return made

        def decorate(declared: Any) -> Any:
            if inspect.isroutine(declared):
                raise ConfigError(
                    "a sink is a class, or an object, with open, commit and abort; a function that "
                    'takes batches is registered by @service.handler(kind="sink")'
                )
            register(declared)
            return declared

        if declared is not None:
            return decorate(declared)
        return decorate if sink is UNGIVEN else register(sink)

    @overload
    def table(self, name: Declared) -> Declared: ...

    @overload
    def table(
        self,
        name: str = ...,
        table: None = None,
        *,
        schema: TableSchema | None = None,
        splits: Any = None,
        filters: Filters = None,
        max_calls: int | None = None,
        max_concurrency: int | None = None,
        queue: int | None = None,
        description: str = "",
    ) -> Callable[[Function], Function]: ...

    @overload
    def table(
        self,
        name: str,
        table: Declared,
        *,
        schema: TableSchema | None = None,
        splits: Any = None,
        filters: Filters = None,
        max_calls: int | None = None,
        max_concurrency: int | None = None,
        queue: int | None = None,
        description: str = "",
    ) -> Declared: ...

    @checked(schema="")
    def table(
        self,
        name: Any = UNGIVEN,
        table: Any = None,
        *,
        schema: TableSchema | None = None,
        splits: Any = None,
        filters: Filters = None,
        max_calls: int | None = None,
        max_concurrency: int | None = None,
        queue: int | None = None,
        description: str = "",
    ) -> Any:
        """Registers a table, which is read in parts: the decorated generator, or ``table``.

        ``aqueduct.service.tables`` shows both forms. Returns what was registered, unchanged.

        - ``name``: the name that clients use; without one, the name of what is decorated.
        - ``table``: an object with the methods of a table, or a class that makes one. Without it
          this is a decorator.
        - ``schema``: of all columns; a callable makes it of the Call, for example by its headers.
          An object may have it as an attribute.
        - ``splits``: a list of JSON values, or a function that makes it of the ``Request``. Without
          it there is one split.
        - ``filters``: ``"applied"``: what Arrow can tell is applied to what is yielded; a function
          says of each ``Filter`` whether the table takes it (True, "partly", False), and the
          table applies it. Without it none is.
        - ``max_calls``: splits read, and questions answered, at once; more get ``busy``.
        - ``max_concurrency``: splits read at once; others wait for their turn, as many as ``queue``
          says. See ``handler``.
        - ``description``: for ``describe``; by default the first paragraph of the docstring.

        The calls are to the handlers ``aqueduct.table.plan.NAME`` and ``aqueduct.table.read.NAME``,
        which is what ``authorize`` sees. Raises ConfigError for what cannot work.
        """
        declared, name = _apart(name, "table", 200)

        def register(table: Any, called: Any = name) -> Any:
            if isinstance(called, str) and called in self._tables:
                raise ConfigError(f"the service {self.name!r} has a table {called!r} already")
            made, handlers = make_table(
                called,
                table,
                schema=schema,
                splits=splits,
                filters=filters,
                limits=self.config.tables,
                max_calls=max_calls,
                max_concurrency=max_concurrency,
                queue=queue,
                description=description,
            )
            self._tables[called] = made
            self._handlers.update((handler.name, handler) for handler in handlers)
            return table

        def decorate(table: Any) -> Any:
            called = _own_name(table, "table") if name is UNGIVEN else name
            register(object_of(table) if isinstance(table, type) else table, called)
            return table

        if declared is not None:
            return decorate(declared)
        return decorate if table is None else register(table)

    @checked()
    def on_start(self, function: Function) -> Function:
        """Registers a function that runs once in each process, before it takes the first call.

        A decorator, or a plain call; it gives the function back. A coroutine function runs on the
        event loop, and others in a thread. It may take the service as its argument. Several run in
        the order of their registration, one after the other.

        If one raises, or all take longer than Timing.start_timeout, serving fails with StartFailed.
        Then those ``on_stop`` functions run that were registered before it, but none if it was the
        first start. Servings of one process at the same time have one start: later ones wait.

        Raises ConfigError for what cannot run, and LocalProtocolError while it is served.
        """
        self._lifetime.on_start(function)
        return function

    @checked()
    def on_stop(self, function: Function) -> Function:
        """Registers a function that runs once in each process, after its last call has ended.

        See ``on_start``; several run in reverse order. An error is logged, and the others run. All
        together have Timing.stop_timeout.
        """
        self._lifetime.on_stop(function)
        return function

    @checked()
    def configure(self, config: Config, *, benchmark: bool | None = None) -> None:
        """Gives the service other settings in place of its ``config``.

        They hold for everything that is registered, and for what will be. ``benchmark``: with the
        handler ``aqueduct.benchmark``, or without; None: as it is. Raises LocalProtocolError while
        it is served.
        """
        with self._lock:
            if self._servings:
                raise LocalProtocolError(
                    f"the service {self.name!r} is served, and its settings are in use; configure "
                    "it before serving or run"
                )
        self.config = config
        self._lifetime.timing = config.timing
        for sink in self._sinks.values():
            sink.configure(config.sinks)
        for table in self._tables.values():
            table.limits = config.tables
        self._offer_benchmark(BENCHMARK in self._handlers if benchmark is None else benchmark)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by name."""
        return MappingProxyType(self._handlers)

    def describe(self) -> Description:
        """What clients are told of the service."""
        return Description(
            service=self.name,
            summary=self.description,
            library=_version(),
            handlers=tuple(
                HandlerDescription(
                    name=handler.name,
                    kind=handler.kind,
                    input=handler.input,
                    output=handler.output if isinstance(handler.output, pa.Schema) else None,
                    concurrency=handler.concurrency,
                    idempotent=handler.idempotent,
                    summary=handler.description,
                    max_concurrency=handler.max_concurrency,
                )
                for handler in self._handlers.values()
                if not handler.name.startswith(RESERVED_PREFIX)
            ),
            tables=tuple(
                TableDescription(
                    name=table.name,
                    schema=table.schema if isinstance(table.schema, pa.Schema) else None,
                    streams=table.streams,
                    summary=table.description,
                )
                for table in self._tables.values()
            ),
            sinks=tuple(
                SinkSummary(name=sink.name, schema=sink.schema, summary=sink.description)
                for sink in self._sinks.values()
            ),
        )

    def __repr__(self) -> str:
        offers = [
            text
            for what, names in (
                ("handler", [name for name in self._handlers if not name.startswith("aqueduct.")]),
                ("table", list(self._tables)),
                ("sink", list(self._sinks)),
            )
            if (text := _names_of(what, names))
        ]
        served = [at for serving in tuple(self._servings) for at in serving.addresses]
        where = f"served at {', '.join(served)}" if served else "not served"
        return f"<Service {self.name!r}: {'; '.join((*offers, where))}>"

    def counters(self) -> dict[str, int]:
        """What all servings of this service have counted; see ``RunningService.counters``.

        May be called from any thread.
        """
        with self._lock:
            total = Counter(self._ended)
            for serving in self._servings:
                total.update(serving.counters())
        return {name: total[name] for name in COUNTERS}

    @checked(tls="server_tls")
    @asynccontextmanager
    async def serving(
        self,
        *addresses: str | Bound | Sequence[str | Bound],
        certificate: File | None = None,
        key: File | None = None,
        key_password: str | None = None,
        dev_certificate: bool = False,
        client_ca: File | None = None,
        tls: ServerTls | None = None,
        origins: Sequence[str] = (),
        drain: Duration | None = None,
        admin: str | None = None,
    ) -> AsyncIterator[RunningService]:
        """Serves at ``addresses`` for as long as the block runs, then drains and ends.

        - ``addresses``: one or more, of any schemes, each an argument or all in a list.
        - ``certificate``, ``key``: certificate chain and private key, PEM (files, or bytes), and
          ``key_password`` of a key that is encrypted. ``dev_certificate`` makes a certificate on
          the spot instead, whose fingerprint the addresses then carry. ``client_ca``: the CAs of
          the certificates that clients must show, over TLS (a client's certificate cannot be had
          over QUIC). ``tls`` says the same in full.
          TCP without TLS, Unix sockets and memory have no use for them.
        - ``origins``: of the web pages that may connect to addresses of
          ``reactivesocket+ws://`` and ``reactivesocket+wss://``, such as
          ``"https://app.example.com"``. Others get 403. Programs that are no browser name none.
        - ``drain``: seconds that the end may take, of which open calls get all but the last;
          None: Timing.drain_timeout. See ``RunningService.close``.
        - ``admin``: ``"HOST:PORT"`` of the HTTP port for operators: the live page, health, metrics
          and the state of the service. It answers from the start to the end of the block, and needs
          the extra ``admin``. None: there is none.

        Raises ConfigError for addresses or certificates that cannot work, or that are taken, and
        StartFailed.
        """
        places = _flat(addresses)
        for given in places:
            if isinstance(given, str):
                Address.parse(given)  # its error need not wait for a start
        whole = self.config.timing.drain_timeout if drain is None else cast("float", drain)
        serving = RunningService(
            self.name,
            self.config,
            self.handlers,
            authorize=self.authorize,
            telemetry=self.telemetry,
            server_tls=_tls(
                places, certificate, key, key_password, dev_certificate, client_ca, tls
            ),
            kept=self._lifetime.kept,
        )
        async with AsyncExitStack() as stack:
            if admin is not None:
                await stack.enter_async_context(self._administered(serving, admin))
            async with self._serving(serving, places, origins, whole):
                yield serving

    @asynccontextmanager
    async def _administered(self, serving: RunningService, admin: str) -> AsyncIterator[None]:
        """Answers at the admin port for as long as the block runs. Raises ConfigError."""
        reporter = ServiceReporter(serving, asyncio.get_running_loop())
        thread = AdminThread(admin, admin_routes(reporter), self.config.admin)
        await thread.start()
        serving.admin_addresses = thread.addresses
        try:
            yield
        finally:
            await thread.close()

    @asynccontextmanager
    async def _serving(
        self,
        serving: RunningService,
        places: Sequence[str | Bound],
        origins: Sequence[str],
        whole: float,
    ) -> AsyncIterator[None]:
        """Serves for as long as the block runs; ``whole``: the seconds of its end."""
        await self._lifetime.begin()
        try:
            await serving.start(places, origins=origins)
            with self._lock:
                self._servings.append(serving)
            keepers = [asyncio.create_task(sink.keep()) for sink in self._sinks.values()]
            try:
                yield
            finally:
                for keeper in keepers:
                    keeper.cancel()
                try:
                    await serving.close(drain=whole)
                finally:
                    with self._lock:
                        self._servings.remove(serving)
                        self._ended.update(serving.counters())
        finally:
            await self._lifetime.end(self._lifetime.kept(whole))

    @checked(tls="server_tls")
    def run(
        self,
        *addresses: str | Sequence[str],
        certificate: File | None = None,
        key: File | None = None,
        key_password: str | None = None,
        dev_certificate: bool = False,
        client_ca: File | None = None,
        tls: ServerTls | None = None,
        origins: Sequence[str] = (),
        drain: float | None = None,
        admin: str | None = None,
        environment: bool = True,
        settings: str | PathLike[str] | None = None,
    ) -> None:
        """Serves until SIGINT or SIGTERM, then drains and returns.

        Prints the addresses, one to a line. A second signal ends the drain: calls that are open
        then fail. SIGUSR1 writes the state of the service to standard error, as a line of JSON.
        For programs that have nothing else to do; see ``serving`` for the other arguments and for
        all other programs.

        - ``environment``: what ``AQUEDUCT_*`` variables say counts more than the arguments and
          ``config``. False: no variable is read.
        - ``settings``: a TOML file, below the variables and above the arguments; None: the one that
          ``AQUEDUCT_CONFIG`` names.

        A handler may block the event loop, or leave threads that are no daemons, or processes of
        multiprocessing. Then the process ends with status 1, ``drain`` seconds (None:
        Timing.drain_timeout) after the signal. A plain handler that does not return holds up
        nothing. Raises LocalProtocolError where an event loop runs already, as in a notebook.
        """
        if asyncio._get_running_loop() is not None:
            raise LocalProtocolError(
                "Service.run runs an event loop of its own, and one runs in this thread already, "
                "as in a notebook or a coroutine; there, use: async with service.serving(...)"
            )
        operator = read_settings(environment=os.environ if environment else {}, file=settings)
        given = {
            "certificate": certificate,
            "key": key,
            "key_password": key_password,
            "dev_certificate": dev_certificate,
            "client_ca": client_ca,
            "tls": tls,
            "origins": origins,
            "admin": admin,
            "drain": drain,
        }
        places, options = as_operated(operator, addresses, given)
        config, benchmark = operator.config(self.config), operator.value("serve.benchmark")
        if config is not self.config or benchmark is not None:
            self.configure(config, benchmark=benchmark)
        holders, deadline = Holders(), ProcessDeadline()
        try:
            asyncio.run(serve_until_signal(self, places, deadline=deadline, quiet=True, **options))
        finally:
            if not (deadline.ordered and holders):
                deadline.cancel()  # what the program does now may take its time

    def _description(self) -> pa.RecordBatch:
        """What clients are told; it is long work for very many handlers, and done once."""
        offered = (
            self.name,
            self.description,
            len(self._handlers),
            len(self._tables),
            len(self._sinks),
        )
        with self._describing:
            if self._described is None or self._described[0] != offered:
                self._described = offered, self.describe().to_batch()
            return self._described[1]

    def _offer_benchmark(self, offered: bool) -> None:
        self._handlers.pop(BENCHMARK, None)
        self._described = None
        if offered:
            self._handlers[BENCHMARK] = benchmark_handler(self.config.calls.fragment_bytes)

    def _add_description(self) -> None:
        async def describe() -> AsyncIterator[pa.RecordBatch]:
            yield await apart(self._description)

        self._handlers[DESCRIBE] = make_handler(
            describe,
            name=DESCRIBE,
            kind=SOURCE,
            input=None,
            output=DESCRIBE_SCHEMA,
            concurrency=1,
            idempotent=True,
            max_calls=None,
            description="What this service offers.",
        )


async def serve_until_signal(
    service: Service,
    addresses: Sequence[Any],
    *,
    drain: float | None,
    deadline: ProcessDeadline,
    quiet: bool = False,
    **options: Any,
) -> int:
    """Serves until a signal, then drains; the exit status.

    0 after a drain, 1 when a second signal has cut calls. ``drain``: seconds; None:
    Timing.drain_timeout. ``deadline`` ends the process after them. ``quiet``: nothing is written
    about the drain. For the other options see ``Service.serving``.
    """
    first, second = asyncio.Event(), asyncio.Event()
    seconds = service.config.timing.drain_timeout if drain is None else drain
    with ServiceSignals(
        drain=first.set, force=second.set, seconds=seconds, deadline=deadline
    ) as signals:
        async with AsyncExitStack() as stack:
            started = stack.enter_async_context(
                service.serving(*addresses, drain=seconds, **options)
            )
            serving = await unless(first, started)
            if serving is None:  # told to end before it had begun
                return 0
            look = serving.state
            signals.look = lambda: tell_state(look())
            for address in serving.addresses:
                say(address if quiet else f"listening on {address}")
            for address in serving.admin_addresses:
                log.info("admin at %s", address)
            await first.wait()
            if not quiet:
                log.info("draining; a second signal ends at once")
            await serving.drain(second, seconds)
    if not second.is_set():
        return 0
    if not quiet:
        log.warning("ended by a second signal; calls were cut")
    return 1


def _apart(name: Any, what: str, limit: int) -> tuple[Any, Any]:
    """The function or class that a decorator without parentheses got, or None; and the name.

    Raises ConfigError for a name that is neither.
    """
    if name is UNGIVEN or isinstance(name, str):
        return None, name
    if callable(name) or any(hasattr(name, method) for method in ("read", "open")):
        return name, UNGIVEN
    raise ConfigError(f"a {what}'s name is {name!r}; it must be text of 1 to {limit} bytes")


def _names_of(what: str, names: Sequence[str]) -> str:
    """``handlers 'echo', 'score'``: a few of them; "" if there are none."""
    if not names:
        return ""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}{'s' if len(names) > 1 else ''} {shown}{more}"


def _own_name(declared: Any, what: str) -> str:
    """The name of a function or class. Raises ConfigError if it has none that can be used."""
    name = getattr(declared, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f'{declared!r} has no name of its own: write service.{what}("NAME")')
    return name


def _flat(addresses: Iterable[str | Bound | Sequence[str | Bound]]) -> list[str | Bound]:
    """Each an argument, all in a list, or both."""
    flat: list[str | Bound] = []
    for given in addresses:
        if isinstance(given, str | Bound):
            flat.append(given)
        else:
            flat += given
    return flat


def _tls(
    addresses: Sequence[str | Bound],
    certificate: File | None,
    key: File | None,
    key_password: str | None,
    dev_certificate: bool,
    client_ca: File | None,
    tls: ServerTls | None,
) -> ServerTls | None:
    """The one way in which a certificate was given. Raises ConfigError."""
    forms = {"certificate": certificate, "dev_certificate": dev_certificate or None, "tls": tls}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one certificate")
    if key is not None and certificate is None:
        raise ConfigError("key= was given without certificate=")
    if key_password is not None and certificate is None:
        raise ConfigError("key_password= was given without certificate=")
    if client_ca is not None and (tls is not None or (certificate is None and not dev_certificate)):
        raise ConfigError(
            "client_ca= was given with tls=: give ServerTls(client_ca=...)"
            if tls is not None
            else "client_ca= was given without a certificate of the service's own (certificate= "
            "and key=)"
        )
    if tls is not None:
        return tls
    if certificate is not None:
        return ServerTls(certificate, key, key_password, client_ca)
    if dev_certificate:
        places = [
            given.address if isinstance(given, Bound) else Address.parse(given)
            for given in addresses
        ]
        made = certificates.dev_certificate(place.host for place in places if place.host)
        return replace(made, client_ca=client_ca)
    return None


def _version() -> str:
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "unknown"
