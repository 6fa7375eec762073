"""Private names of other projects that this library uses: all of them, and what each is for.

A name stands here because no public one does the same; so do names that are not private, and that
nothing promises. ``require`` raises ``Missing`` where one is gone. Who uses it has another way
then, and tells of it once by ``warn_once``. QUIC has no other way than aioquic: its addresses are
refused then (``aqueduct.carriers.quic.aioquic_names``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aqueduct.escaping import logger_of

__all__ = ["NAMES", "Foreign", "Missing", "require", "warn_once"]

log = logger_of("aqueduct")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Some private names of one project, which stand or fall together."""

    project: str
    names: tuple[str, ...]
    purpose: str
    without: str
    """What happens where one of them is missing."""


AIOQUIC: Final[dict[str, tuple[str, ...]]] = {
    "aioquic._buffer": ("Buffer",),
    "aioquic._crypto:AEAD": (
        "_aead",
        "_iv",
    ),
    "aioquic._crypto:HeaderProtection": (
        "_is_chacha20",
        "_mask",
    ),
    "aioquic.quic.configuration": (
        "QuicConfiguration",
        "SMALLEST_MAX_DATAGRAM_SIZE",
    ),
    "aioquic.quic.congestion.base": (
        "QuicCongestionControl",
        "register_congestion_control",
    ),
    "aioquic.quic.congestion.cubic": ("CubicCongestionControl",),
    "aioquic.quic.congestion.cubic:CubicCongestionControl": ("_max_datagram_size",),
    "aioquic.quic.congestion.reno": ("RenoCongestionControl",),
    "aioquic.quic.congestion.reno:RenoCongestionControl": ("_max_datagram_size",),
    "aioquic.quic.connection": (
        "CONNECTION_LIMIT_FRAME_CAPACITY",
        "END_STATES",
        "Limit",
        "MAX_STREAM_DATA_FRAME_CAPACITY",
        "QuicConnection",
        "QuicConnectionError",
        "QuicConnectionState",
        "QuicNetworkPath",
        "QuicReceiveContext",
    ),
    "aioquic.quic.connection:QuicConnection": (
        "_ack_delay",
        "_ack_eliciting_sent_since_receipt",
        "_alpn_handler",
        "_close_at",
        "_close_begin",
        "_close_event",
        "_close_pending",
        "_configuration",
        "_crypto_streams",
        "_cryptos",
        "_datagrams_pending",
        "_events",
        "_get_or_create_stream",
        "_get_or_create_stream_for_send",
        "_handle_crypto_frame",
        "_handle_datagram_frame",
        "_handle_max_stream_data_frame",
        "_handle_stream_frame",
        "_handshake_complete",
        "_handshake_confirmed",
        "_handshake_done_pending",
        "_host_cids",
        "_idle_timeout",
        "_is_client",
        "_local_max_data",
        "_local_max_streams_bidi",
        "_local_max_streams_uni",
        "_local_next_stream_id_bidi",
        "_local_next_stream_id_uni",
        "_loss",
        "_max_datagram_size",
        "_network_paths",
        "_on_connection_limit_delivery",
        "_on_max_stream_data_delivery",
        "_on_path_challenge_delivery",
        "_pacing_at",
        "_packet_number",
        "_payload_received",
        "_peer_cid",
        "_ping_pending",
        "_probe_pending",
        "_remote_max_data",
        "_remote_max_data_used",
        "_remote_max_datagram_frame_size",
        "_remote_max_streams_bidi",
        "_remote_max_streams_uni",
        "_remote_preferred_address",
        "_retire_connection_ids",
        "_serialize_transport_parameters",
        "_spaces",
        "_state",
        "_streams",
        "_streams_queue",
        "_write_application",
        "_write_connection_limits",
        "_write_stream_limits",
    ),
    "aioquic.quic.events": ("ConnectionTerminated",),
    "aioquic.quic.packet": (
        "QuicErrorCode",
        "QuicFrameType",
        "QuicHeader",
        "QuicPacketType",
        "QuicResetStreamFrame",
        "decode_packet_number",
        "encode_quic_retry",
        "encode_quic_version_negotiation",
        "pull_quic_header",
    ),
    "aioquic.quic.packet_builder": (
        "QuicDeliveryState",
        "QuicPacketBuilder",
        "QuicSentPacket",
    ),
    "aioquic.quic.rangeset": ("RangeSet",),
    "aioquic.quic.recovery": (
        "MAX_ACK_RANGES",
        "QuicPacketPacer",
        "QuicPacketSpace",
    ),
    "aioquic.quic.recovery:QuicPacketNumberWindow": ("_received",),
    "aioquic.quic.recovery:QuicPacketPacer": ("_max_datagram_size",),
    "aioquic.quic.recovery:QuicPacketRecovery": (
        "_cc",
        "_pacer",
        "_rtt_smoothed",
        "_time_of_last_sent_ack_eliciting_packet",
    ),
    "aioquic.quic.retry": ("QuicRetryTokenHandler",),
    "aioquic.quic.stream": ("StreamFinishedError",),
    "aioquic.quic.stream:QuicStreamReceiver": (
        "_buffer",
        "_buffer_start",
        "_final_size",
        "_ranges",
    ),
    "aioquic.tls": (
        "AlertDescription",
        "CipherSuite",
        "Epoch",
        "ExtensionType",
        "SessionTicket",
    ),
    "aioquic.tls:Context": (
        "_peer_certificate",
        "_peer_certificate_chain",
    ),
}
"""Of each module or class (``MODULE:CLASS``): attributes of its objects count as its own."""

NAMES: Final = (
    Foreign(
        "asyncio",
        ("_get_running_loop", "_enter_task", "_leave_task"),
        "they are exported for authors of event loops: whether a loop runs here, and a call that "
        "begins in the turn that brings it",
        "none can be missing: asyncio exports them, and its own loops call them",
    ),
    Foreign(
        "asyncio",
        ("_asyncio_future_blocking",),
        "the mark by which a task knows that it is to wait for a future of another class",
        "none can be missing: asyncio.isfuture reads it",
    ),
    Foreign(
        "asyncio",
        ("_selector", "_ssock", "_csock"),
        "the descriptors of a loop, which a forked child shares with its parent",
        "a child of fork keeps them",
    ),
    Foreign(
        "nest_asyncio",
        ("_nest_patched",),
        "whether callbacks of a loop may run it again",
        "the loop is taken for one that does not nest",
    ),
    Foreign(
        "CPython",
        ("_current_frames", "_getframe"),
        "the socket of a Spark executor is a variable in a frame of pyspark.worker",
        "a task does not notice that its executor has hung up",
    ),
    Foreign(
        "pyspark",
        ("_active_spark_context", "_deserialized"),
        "the accumulator of a session that is active already, and whether it came by pickle",
        "the counters of tasks are not summed up on the driver",
    ),
    Foreign(
        "pyspark",
        ("_jsparkSession",),
        "Spark's queries, for the progress of files",
        "no progress is shown",
    ),
    Foreign(
        "argparse",
        ("_actions", "_option_string_actions"),
        "the commands and options of a parser",
        "no command or option is guessed, and names of files are not completed",
    ),
    Foreign(
        "pyarrow",
        ("_import_from_c", "_import_from_c_capsule"),
        "a record batch, or a schema, from the structs of Arrow's C data interface",
        "none can be missing: Arrow documents them for other libraries",
    ),
    Foreign(
        "cryptography",
        ("_openssl",),
        "OpenSSL's functions: records of TLS without copies, and a store of certificates with a "
        "purpose and a name",
        "TLS is by Python's ssl, and certificates over QUIC are checked by cryptography.x509",
    ),
    Foreign(
        "pyOpenSSL",
        ("_ssl", "_into_ssl", "_from_ssl", "_store"),
        "OpenSSL's objects behind a connection and a store",
        "TLS is by Python's ssl, and certificates over QUIC are checked by cryptography.x509",
    ),
    Foreign(
        "websockets",
        ("recv_frame", "max_message_size"),
        "the first message of a peer, which is to be small, before a larger one is taken",
        "a first message above the limit is refused once it is there, and not before",
    ),
    Foreign(
        "aioquic",
        tuple(sorted({n for names in AIOQUIC.values() for n in names if n.startswith("_")})),
        "the packets of streams are built and read here, and windows follow what was consumed",
        "an address of QUIC is refused with the version to install; the other carriers work",
    ),
)


class Missing(ImportError):
    """A private name of another project is gone."""


_told: set[str] = set()


def require(owner: object, *names: str) -> None:
    """Raises Missing if ``owner`` lacks one of ``names``."""
    gone = [name for name in names if not hasattr(owner, name)]
    if gone:
        called = getattr(owner, "__name__", type(owner).__name__)
        raise Missing(f"{called} has no {', '.join(gone)}")


def warn_once(reason: Exception, instead: str) -> None:
    """Says in the log, once for each ``instead``, what is done without a name."""
    if instead not in _told:
        _told.add(instead)
        log.warning("%s: %s", reason, instead)
