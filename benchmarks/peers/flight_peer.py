"""pyarrow Flight over TCP, a Unix socket or TLS: DoPut, DoGet, DoExchange; DoAction for a call."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.flight as fl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import common

DESCRIPTOR = fl.FlightDescriptor.for_path("bench")


class Server(fl.FlightServerBase):  # type: ignore[misc]
    """Serves the one measurement of its process."""

    def __init__(self, setup: common.Setup, location: str, certificates: Any = None) -> None:
        super().__init__(location, tls_certificates=certificates)
        self.setup = setup
        self.work = common.Work(setup)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for chunk in reader:
            self.work.arrived(chunk.data)
        writer.write(b"ok")

    def do_get(self, context: Any, ticket: Any) -> Any:
        return fl.GeneratorStream(common.SCHEMA, iter(self.work))

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        if self.setup.mode not in common.BULK:
            for chunk in reader:
                writer.write_metadata(chunk.app_metadata)
            return
        writer.begin(common.SCHEMA)
        for chunk in reader:
            self.work.arrived(chunk.data)
            writer.write_batch(chunk.data)

    def do_action(self, context: Any, action: Any) -> list[Any]:
        if action.type == "request":
            return [fl.Result(action.body)]
        theirs = json.loads(action.body.to_pybytes())
        ours = self.work.compare(self.setup.mode, False, theirs)
        return [fl.Result(json.dumps(ours).encode())]


class Client:
    """A blocking client; an echo needs a thread to send while this one reads."""

    def __init__(self, setup: common.Setup, location: str) -> None:
        options: dict[str, Any] = {}
        if setup.carrier == "tls":
            options["tls_root_certs"] = Path(setup.certificate).read_bytes()
            options["override_hostname"] = "localhost"
        self.client = fl.connect(location, **options)
        self.client.wait_for_available(10)

    def sink(self, work: common.Work) -> None:
        writer, reader = self.client.do_put(DESCRIPTOR, common.SCHEMA)
        for batch in work:
            writer.write_batch(batch)
        writer.done_writing()
        if reader.read().to_pybytes() != b"ok":
            raise AssertionError("the sink was not confirmed")
        writer.close()

    def source(self, work: common.Work) -> None:
        for chunk in self.client.do_get(fl.Ticket(b"bench")):
            work.arrived(chunk.data)

    def echo(self, work: common.Work) -> None:
        writer, reader = self.client.do_exchange(DESCRIPTOR)

        def send() -> None:
            writer.begin(common.SCHEMA)
            for batch in work:
                writer.write_batch(batch)
            writer.done_writing()

        sender = threading.Thread(target=send)
        sender.start()
        for chunk in reader:
            work.arrived(chunk.data)
        sender.join()
        writer.close()

    def requests(self, laps: common.Laps) -> None:
        for request in laps:
            (result,) = self.client.do_action(fl.Action("request", request))
            laps.answered(result.body)

    sync_requests = requests  # its client has no other

    def open_requests(self, laps: common.Laps) -> None:
        writer, reader = self.client.do_exchange(DESCRIPTOR)
        for request in laps:
            writer.write_metadata(request)
            laps.answered(reader.read_chunk().app_metadata)
        writer.close()

    def compare(self, totals: dict[str, int]) -> dict[str, int]:
        body = json.dumps(totals).encode()
        (result,) = self.client.do_action(fl.Action("compare", body))
        answer: dict[str, int] = json.loads(result.body.to_pybytes())
        return answer


def serve(setup: common.Setup, ready: common.Ready) -> None:
    if setup.carrier == "unix":
        location = f"grpc+unix://{setup.folder}/flight.sock"
        server = Server(setup, location)
        ready(location)
    else:
        scheme, certificates = f"grpc+{setup.carrier}", None
        if setup.carrier == "tls":
            pair = (Path(path).read_bytes() for path in (setup.certificate, setup.key))
            certificates = [tuple(pair)]
        server = Server(setup, f"{scheme}://127.0.0.1:0", certificates)
        ready(f"{scheme}://127.0.0.1:{server.port}")
    server.serve()


def connect(setup: common.Setup, address: str) -> Client:
    return Client(setup, address)


if __name__ == "__main__":
    common.main(serve, connect)
