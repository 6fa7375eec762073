"""One core of the control-stream draft, and a peer whose frames a test writes."""

from __future__ import annotations

from typing import Any

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.config import DEFAULT, Config
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import Event, HeadersReceived
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.control_streams.bidi_streams import BIDI
from aqueduct.protocol.control_streams.connection import ControlConnection

__all__ = ["GREETING", "Lone", "end_of", "frames_of", "message", "mine", "peers", "written"]

GREETING = VERSION + encoder.encode_connection_control(())


def mine(k: int) -> int:
    """The k-th bidirectional stream that the core opened."""
    return BIDI | k << 1


def peers(k: int) -> int:
    """The k-th that its peer opened."""
    return BIDI | k << 1 | 1


def message(channel: int, number: int = 0, payload: Any = b"", attached: Any = ()) -> bytes:
    """A Message as bytes; ``attached`` are ids."""
    return b"".join(map(bytes, encoder.encode_control_message(channel, number, payload, attached)))


def written(applied: list[effects.Effect], number: int) -> bytes:
    """All bytes of one stream."""
    return b"".join(
        bytes(memoryview(buffer))
        for effect in applied
        if effect[:2] == (effects.WRITE, number)
        for buffer in effect[2]
    )


def end_of(applied: list[effects.Effect], number: int) -> int | str | None:
    """How a stream ended: "fin", the code of its reset, or None."""
    end: int | str | None = None
    for effect in applied:
        if effect[:2] == (effects.WRITE, number) and effect[3]:
            end = "fin"
        elif effect[:2] == (effects.RESET, number):
            end = effect[2]
    return end


def frames_of(
    applied: list[effects.Effect], number: int, *, server: bool, channel: int = -1
) -> list[Any]:
    """The frames of one stream; ``server`` wrote it, ``channel``: of an answer on its stream."""
    if number < BIDI:
        carrier = "uni"
    else:
        carrier = "answer" if number & 1 else "opener"
    decoder = codec.ControlFrameDecoder(
        from_server=server, carrier=carrier, channel=channel if carrier == "answer" else -1
    )
    decoder.feed(written(applied, number))
    found = []
    while (frame := decoder.next()) is not None:
        found.append(frame)
    assert decoder.between_frames
    return found


class Lone:
    """A core; the test speaks for its peer."""

    def __init__(
        self,
        to: str = "client",
        config: Config = DEFAULT,
        *,
        greet: bool = True,
        accept: bool = True,
        slots: int = 1000,
        bidi_slots: int = 1000,
        datagrams: int = 1200,
        reads: bool = True,
        header_blocks: bool = False,
        early: bool = False,
    ) -> None:
        """``to``: what the core is; ``reads``: its bytes leave at once; ``early``: see Carrier."""
        self.now = 0.0
        self.core = ControlConnection(
            is_client=to == "client", config=config, header_blocks=header_blocks
        )
        self.applied: list[effects.Effect] = []
        self.events: list[Event] = []
        self.reads = reads
        self.accept = accept
        self.controls: dict[int, int] = {}
        self._uni = self._bidi = 0
        self.core.start(0.0, datagrams, early)
        self.core.openable_changed(slots, 0.0)
        self.core.bidi_openable_changed(bidi_slots, 0.0)
        self.apply()
        if greet and not early:
            self.greet()

    def decided(self, accepted: bool = True, slots: int = 1000, bidi_slots: int = 1000) -> None:
        """The transport has decided on early data; the slots are those from now on."""
        self.core.early_decided(accepted, self.now)
        self.core.openable_changed(slots, self.now)
        self.core.bidi_openable_changed(bidi_slots, self.now)
        self.apply()

    def greet(self) -> None:
        """The peer's headers."""
        if self.core.is_client:
            self.on(mine(0), GREETING)
        else:
            self.open(GREETING)

    # What the peer does

    def say(self, *parts: bytes, fin: bool = True) -> int:
        """A unidirectional stream."""
        self._uni += 1
        self.on(self._uni - 1, *parts, fin=fin)
        return self._uni - 1

    def open(self, *parts: bytes, fin: bool = False) -> int:
        """A bidirectional stream."""
        number = peers(self._bidi)
        self._bidi += 1
        self.on(number, *parts, fin=fin)
        return number

    def control(self, channel: int, *parts: bytes, fin: bool = False) -> int:
        """The control stream of a channel that the core created."""
        number = peers(self._bidi)
        self.controls[number] = channel
        return self.open(encoder.encode_channel_control(channel), *parts, fin=fin)

    def on(self, number: int, *parts: bytes, fin: bool = False) -> None:
        """More of a stream."""
        self.core.receive_stream(number, b"".join(parts), fin, self.now)
        self.apply()

    def reset(self, number: int, code: int) -> None:
        self.core.receive_reset(number, code, self.now)
        self.apply()

    def datagram(self, *parts: bytes) -> None:
        self.core.receive_datagram(b"".join(parts), self.now)
        self.apply()

    # What the application does

    def send(self, half: Any, payload: bytes = b"", *attached: Attach, **options: Any) -> int:
        number = self.core.send(half, payload, self.now, attachments=attached, **options)
        self.apply()
        return number

    def lossy(self, half: Any, payload: bytes = b"", *attached: Attach) -> int:
        """A message in a datagram."""
        return self.send(half, payload, *attached, mode=Mode.UNRELIABLE)

    def create(self, *, keep_sender: bool, is_oneshot: bool = False) -> Any:
        """A channel, attached to a message on the entrypoint of a client."""
        attach = Attach(keep_sender=keep_sender, is_oneshot=is_oneshot)
        self.send(self.sender, b"", attach)
        return attach.half

    def finish(self, half: Any) -> None:
        self.core.finish(half, self.now)
        self.apply()

    def cancel(self, half: Any) -> None:
        self.core.cancel(half, self.now)
        self.apply()

    def close(self, half: Any) -> None:
        self.core.close_receiver(half, self.now)
        self.apply()

    def take(self, half: Any) -> Received | None:
        found = self.core.receive(half, self.now)
        self.apply()
        return found

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.core.handle_deadline(self.now)
            self.apply()
        self.now = until

    @property
    def sender(self) -> SenderHalf:
        half = self.core.entrypoint
        assert isinstance(half, SenderHalf)
        return half

    @property
    def receiver(self) -> ReceiverHalf:
        half = self.core.entrypoint
        assert isinstance(half, ReceiverHalf)
        return half

    # What came of it

    def frames(self, number: int) -> list[Any]:
        """What the core said on a stream."""
        return frames_of(
            self.applied,
            number,
            server=not self.core.is_client,
            channel=self.controls.get(number, -1),
        )

    def end(self, number: int) -> int | str | None:
        return end_of(self.applied, number)

    @property
    def code(self) -> int | None:
        """The code that the core closed with."""
        return next((e[1] for e in self.applied if e[0] == effects.CLOSE), None)

    def written(self, number: int) -> bytes:
        return written(self.applied, number)

    def leaves(self) -> None:
        """What was written leaves now."""
        self.reads = True
        for effect in list(self.applied):
            if effect[0] == effects.WRITE:
                self.core.written(effect[1], sum(len(memoryview(b)) for b in effect[2]))
        self.apply()

    def apply(self) -> None:
        while True:
            for event in self.core.events_received():
                self.events.append(event)
                if isinstance(event, HeadersReceived) and not self.core.is_client and self.accept:
                    self.core.accept_headers((), self.now)
            wanted = self.core.effects_to_apply()
            if not wanted:
                return
            self.applied += wanted
            if self.reads:
                for effect in wanted:
                    if effect[0] == effects.WRITE:
                        self.core.written(effect[1], sum(len(memoryview(b)) for b in effect[2]))
