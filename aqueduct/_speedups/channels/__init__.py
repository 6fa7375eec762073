"""The compiled parts of channels; by the name of the package, their codec (AQ-9 to AQ-24).

That is the decoder, the encoders and the frames. Halves and streams are in modules of their own.
"""

from __future__ import annotations

from typing import TypeAlias

from aqueduct._speedups.channels.decoder import FrameDecoder
from aqueduct._speedups.channels.encoder import (
    ACK_VERSION,
    CANCEL_SENDER,
    CLOSE_RECEIVER,
    COALESCE,
    FORGET_CHANNEL,
    VERSION,
    encode_ack_nack_unreliable,
    encode_ack_reliable,
    encode_connection_headers,
    encode_finish_sender,
    encode_message,
    encode_route_to,
    encode_sent_unreliable,
)
from aqueduct._speedups.channels.frames import (
    FRAME_NAMES,
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    Frame,
    MessageFrame,
    MessageHead,
    RouteTo,
    SentUnreliable,
    Version,
)

__all__ = [
    "ACK_VERSION",
    "CANCEL_SENDER",
    "CLOSE_RECEIVER",
    "COALESCE",
    "FORGET_CHANNEL",
    "FRAME_NAMES",
    "VERSION",
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "CancelSender",
    "CloseReceiver",
    "ConnectionHeaders",
    "FinishSender",
    "ForgetChannel",
    "Frame",
    "FrameDecoder",
    "Headers",
    "MessageFrame",
    "MessageHead",
    "RouteTo",
    "SentUnreliable",
    "Version",
    "encode_ack_nack_unreliable",
    "encode_ack_reliable",
    "encode_connection_headers",
    "encode_finish_sender",
    "encode_message",
    "encode_route_to",
    "encode_sent_unreliable",
]

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""(key, value) pairs; order and repeats survive (AQ-5)."""
