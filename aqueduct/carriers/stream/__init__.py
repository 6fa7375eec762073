"""Byte streams, multiplexed by bpmux: the carriers ``aqueduct+tcp://``, ``+tls://``, ``+unix://``."""

from aqueduct.carriers.stream.binding import bind
from aqueduct.carriers.stream.connect import connect
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.carriers.stream.listener import StreamListener, listen

__all__ = ["StreamCarrier", "StreamListener", "bind", "connect", "listen"]
