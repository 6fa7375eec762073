from asyncio import AbstractEventLoop
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.io.gather import IovecWriter
from aqueduct._speedups.io.tls_records import Records
from aqueduct._speedups.stream.socket_reader import SocketReader

__all__ = ["TransportBase"]

@disjoint_base
class TransportBase:
    _user: Any
    _mux: Any
    _loop: AbstractEventLoop
    _over: bool
    _closing: bool
    _established: bool
    _begun: bool
    _parting: bool
    _released: bool
    _intake: SocketReader
    _reading: bool
    _processing: bool
    _reported: bool
    _received: int
    _turns: Any
    _out: IovecWriter
    _records: Records | None
    _fd: int
    _secure: bool
    _dirty: bool
    _room_grew: bool
    _writing: bool
    _transmitting: bool
    _sent: int
    _turn: int
    _chunks: int
    _take: int
    _offered: int
    def flush(self) -> None: ...
    def _read_some(self, budget: int) -> int: ...
    def _read(self, budget: int) -> int: ...
    def _read_again(self) -> None: ...
    def _open_inlet(self, entity: Entity) -> None: ...
    def _close_inlet(self) -> None: ...
    def _transmit(self) -> None: ...
    def _write_out(self) -> None: ...
    def _report_written(self, written: list[tuple[Entity, int]]) -> None: ...
    def _settle(self) -> None: ...
