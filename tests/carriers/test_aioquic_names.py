"""What the QUIC carrier uses of aioquic that aioquic does not promise, name by name.

aioquic has a range of versions. Who widens it runs this first: a name that is gone or means
something else fails here, by itself, and not somewhere in a transfer.
"""

from __future__ import annotations

import ast
import collections
import dis
import hashlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from aioquic import _crypto, tls
from aioquic.quic import congestion, connection, packet, recovery, stream
from aioquic.quic.congestion import cubic, reno
from aioquic.quic.connection import Limit, QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from packaging.requirements import Requirement

from aqueduct.carriers import quic
from aqueduct.carriers.foreign import AIOQUIC, Missing
from aqueduct.carriers.quic import aioquic_names
from tests.carriers.wire import Wire, plain

SOURCES = sorted(Path(str(quic.__file__)).parent.glob("*.py"))
ROOT = Path(__file__).parents[2]
ONE_RTT = tls.Epoch.ONE_RTT


@pytest.fixture(scope="module")
def wire() -> Wire:
    """Two of aioquic's own connections after the handshake, with a stream each way."""
    made = Wire(plain)
    made.client.send_stream_data(2, b"from the client")
    made.server.send_stream_data(3, b"from the server")
    made.run()
    return made


OF_THE_CONNECTION: dict[str, Any] = {
    "_ack_delay": float,
    "_ack_eliciting_sent_since_receipt": bool,
    "_close_at": float,
    "_close_event": type(None),
    "_close_pending": bool,
    "_configuration": object,
    "_crypto_streams": dict,
    "_cryptos": dict,
    "_datagrams_pending": collections.deque,
    "_events": collections.deque,
    "_handshake_complete": bool,
    "_handshake_confirmed": bool,
    "_handshake_done_pending": bool,
    "_host_cids": list,
    "_is_client": bool,
    "_local_max_data": Limit,
    "_local_max_streams_bidi": Limit,
    "_local_max_streams_uni": Limit,
    "_local_next_stream_id_bidi": int,
    "_local_next_stream_id_uni": int,
    "_loss": recovery.QuicPacketRecovery,
    "_max_datagram_size": int,
    "_network_paths": list,
    "_pacing_at": type(None),
    "_packet_number": int,
    "_peer_cid": connection.QuicConnectionId,
    "_ping_pending": list,
    "_probe_pending": bool,
    "_remote_max_data": int,
    "_remote_max_data_used": int,
    "_remote_max_datagram_frame_size": int,
    "_remote_max_streams_bidi": int,
    "_remote_max_streams_uni": int,
    "_remote_preferred_address": type(None),
    "_retire_connection_ids": list,
    "_spaces": dict,
    "_state": connection.QuicConnectionState,
    "_streams": dict,
    "_streams_queue": list,
}


@pytest.mark.parametrize("name", OF_THE_CONNECTION)
def test_an_attribute_of_the_connection(wire: Wire, name: str) -> None:
    for end in (wire.client, wire.server):
        assert isinstance(getattr(end, name), OF_THE_CONNECTION[name])


METHODS: dict[str, list[str]] = {
    "_alpn_handler": ["alpn_protocol"],
    "_close_begin": ["is_initiator", "now"],
    "_get_or_create_stream": ["frame_type", "stream_id"],
    "_get_or_create_stream_for_send": ["stream_id"],
    "_handle_crypto_frame": ["context", "frame_type", "buf"],
    "_handle_datagram_frame": ["context", "frame_type", "buf"],
    "_handle_max_stream_data_frame": ["context", "frame_type", "buf"],
    "_handle_stream_frame": ["context", "frame_type", "buf"],
    "_idle_timeout": [],
    "_on_connection_limit_delivery": ["delivery", "limit"],
    "_on_max_stream_data_delivery": ["delivery", "stream"],
    "_on_path_challenge_delivery": ["delivery", "network_path"],
    "_payload_received": ["context", "plain", "crypto_frame_required"],
    "_serialize_transport_parameters": [],
    "_write_application": ["builder", "network_path", "now"],
    "_write_connection_limits": ["builder", "space"],
    "_write_stream_limits": ["builder", "space", "stream"],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_connection(name: str) -> None:
    signature = inspect.signature(getattr(QuicConnection, name))
    assert list(signature.parameters) == ["self", *METHODS[name]]


OF_OTHERS: dict[str, Any] = {
    "_aead": lambda w: isinstance(w.client._cryptos[ONE_RTT].send.aead._aead, AESGCM),
    "_iv": lambda w: isinstance(w.client._cryptos[ONE_RTT].send.aead._iv, int),
    "_is_chacha20": lambda w: w.client._cryptos[ONE_RTT].send.hp._is_chacha20 is False,
    "_mask": lambda w: len(w.client._cryptos[ONE_RTT].send.hp._mask(bytes(48))) == 48,
    "_cc": lambda w: isinstance(w.client._loss._cc, congestion.base.QuicCongestionControl),
    "_pacer": lambda w: isinstance(w.client._loss._pacer, recovery.QuicPacketPacer),
    "_rtt_smoothed": lambda w: 0 < w.client._loss._rtt_smoothed < 1,
    "_time_of_last_sent_ack_eliciting_packet": lambda w: (
        1000 <= w.client._loss._time_of_last_sent_ack_eliciting_packet <= w.now
    ),
    "_received": lambda w: isinstance(w.client._spaces[ONE_RTT].received_packets._received, set),
    "_peer_certificate": lambda w: isinstance(w.client.tls._peer_certificate, x509.Certificate),
    "_peer_certificate_chain": lambda w: w.client.tls._peer_certificate_chain == [],
    "_buffer": lambda w: w.server._streams[2].receiver._buffer == bytearray(),
    "_buffer_start": lambda w: w.server._streams[2].receiver._buffer_start == 15,
    "_ranges": lambda w: len(w.server._streams[2].receiver._ranges) == 0,
    "_final_size": lambda w: w.server._streams[2].receiver._final_size is None,
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_attribute_of_another_class(wire: Wire, name: str) -> None:
    assert OF_OTHERS[name](wire)


def test_no_other_name_is_used() -> None:
    """The tables above are complete."""
    used: set[str] = set()
    ours: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                used.add(node.attr)
                if isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    ours.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                ours.add(node.name)
    theirs = {*vars(Wire(plain).client), *vars(QuicConnection)}
    unknown = {
        name
        for name in used
        if not (name.startswith("__") and name.endswith("__"))
        and (name in theirs or name not in ours)
        and name not in OF_THE_CONNECTION
        and name not in METHODS
        and name not in OF_OTHERS
    }
    assert not unknown


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_every_name_of_the_tables_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    unused = [name for name in (*OF_THE_CONNECTION, *METHODS, *OF_OTHERS) if name not in text]
    assert not unused


# How they are used


def test_all_streams_are_walked_in_one_place() -> None:
    """``_StreamTable.values`` shows but the streams whose limit changed."""
    source = inspect.getsource(connection)
    assert source.count("self._streams.values()") == 1
    assert "self._streams.values()" in inspect.getsource(QuicConnection._write_application)
    for other in (".items()", ".keys()", "in self._streams:", "iter(self._streams"):
        assert f"self._streams{other}" not in source


def test_a_new_stream_comes_last_in_the_queue() -> None:
    client = Wire(plain).client
    client.send_stream_data(2, b"")
    client.send_stream_data(6, b"")
    assert client._streams_queue[-1] is client._streams[6]


def test_a_slot_returns_by_raising_the_limit_by_one() -> None:
    wire = Wire(plain)
    before = wire.server._local_max_streams_uni.value
    wire.client.send_stream_data(2, b"all", True)
    wire.run()
    assert wire.server._local_max_streams_uni.value == before + 1
    assert 2 not in wire.server._streams


def test_the_transport_parameters_of_a_server_leave_behind_the_choice_of_a_protocol() -> None:
    source = inspect.getsource(tls.Context._server_handle_hello)
    assert 0 < source.index("self.alpn_cb(") < source.index("self.handshake_extensions")
    assert "self.tls.alpn_cb = self._alpn_handler" in inspect.getsource(QuicConnection._initialize)


def test_new_streams_of_the_peer_are_the_last_of_the_queue() -> None:
    wire = Wire(plain)
    wire.client.send_stream_data(2, b"")
    wire.client.send_stream_data(8, b"third")
    queue = wire.server._streams_queue
    wire.run()
    assert [each.stream_id for each in wire.server._streams_queue][-3:] == [0, 4, 8]
    assert wire.server._local_max_streams_bidi.used == 3
    assert queue is not None


def test_limits_of_aioquic_rise_by_themselves() -> None:
    """The reason for all this: if that ends, flow control could go back to aioquic."""
    wire = Wire(plain)
    before = wire.server._local_max_data.value
    wire.client.send_stream_data(2, bytes(65_000))
    wire.run()
    assert wire.server._streams[2].max_stream_data_local > 65_536
    assert wire.server._local_max_data.value >= before


@pytest.mark.parametrize("kind", [reno.RenoCongestionControl, cubic.CubicCongestionControl])
def test_the_size_of_datagrams_of_a_congestion_controller(kind: Any) -> None:
    control = kind(max_datagram_size=1300)
    assert control._max_datagram_size == 1300
    assert control.ssthresh is None
    assert control.congestion_window == 13_000
    assert control.bytes_in_flight == 0
    if kind is cubic.CubicCongestionControl:
        assert control.additive_increase_factor == 1300
    assert recovery.QuicPacketPacer(max_datagram_size=1300)._max_datagram_size == 1300


MIRRORED = {
    # What flow_control and packets do in the place of aioquic: compare before adding a digest.
    # Newest version first; one digest where all versions have the same text.
    QuicConnection.datagrams_to_send: "f4eb22c8add260fe",
    QuicConnection.receive_datagram: "3c7f29826050cbfe e116375edd34fcef 8d37707820d9549d",
    QuicConnection._alpn_handler: "11a969d2855d2446",
    QuicConnection._flush_builder: "ac4bd66d7c3892df",
    QuicConnection._get_or_create_stream: "aee09c84cd0da114",
    QuicConnection._handle_stream_frame: "8c79348a854e307d",
    QuicConnection._payload_received: "612b67759a96c701",
    QuicConnection._write_application: "c37bf64378f72b2f 10b3298932447f41",
    QuicConnection._write_connection_limits: "02c42c5455ae1a31",
    QuicConnection._write_stream_frame: "9bc0be962394a322",
    QuicConnection._write_stream_limits: "398d4a898f7c580f",
    recovery.QuicPacketPacer: "d845e32503fbe1f3 75b322ca2772e486",
    recovery.QuicPacketNumberWindow: "3dd3a30b91254283",
    recovery.QuicPacketRecovery.on_ack_received: "1a7c693479084333",
    recovery.QuicPacketRecovery.on_packet_sent: "a83baa6e05702f89",
    stream.QuicStreamReceiver: "78596a9b1406685c 28f3bde611f09ea9 952b8137f26c4cb0",
    stream.QuicStreamSender: "f14fb859f32d053a 24f9abab6a78f393 b4c8b963a93c9787",
    _crypto.AEAD: "f9a6d18394533a45 3280b5c94d5149c2",
    _crypto.HeaderProtection: "3c96518aef24acee",
    reno.RenoCongestionControl.on_packet_sent: "92a225b36353d22d",
    cubic.CubicCongestionControl.on_packet_sent: "fcb07e6182034b17",
    packet.decode_packet_number: "4cfc0ae8620a2bb9",
}


def digest(what: Any) -> str:
    return hashlib.sha256(inspect.getsource(what).encode()).hexdigest()[:16]


@pytest.mark.parametrize("what", MIRRORED, ids=lambda what: what.__qualname__)
def test_what_is_mirrored_has_not_changed(what: Any) -> None:
    known = MIRRORED[what].split()
    assert digest(what) in known, f"aioquic's {what.__qualname__} is another one now"


# What is looked up before all else


def test_the_range_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (entry for entry in project["dependencies"] if entry.startswith("aioquic"))
    assert asked == aioquic_names.SUPPORTED
    assert version("aioquic") in Requirement(asked).specifier


def test_every_import_from_aioquic_is_looked_up() -> None:
    imported = {
        f"{node.module}.{alias.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("aioquic")
        for alias in node.names
    }
    listed = {f"{owner}.{name}" for owner, names in AIOQUIC.items() for name in names}
    assert imported - listed <= set(AIOQUIC)  # those that are modules
    assert len(imported) > 30
    theirs = {entry for entry in listed if ":" not in entry}
    assert theirs - imported == set()


def test_every_attribute_of_the_tables_is_looked_up() -> None:
    of_classes = {owner.partition(":")[2]: set(names) for owner, names in AIOQUIC.items()}
    assert of_classes["QuicConnection"] == {*OF_THE_CONNECTION, *METHODS}
    others = [names for kind, names in of_classes.items() if kind not in ("", "QuicConnection")]
    assert set().union(*others) - {"_max_datagram_size"} == set(OF_OTHERS)


@pytest.mark.parametrize("owner", AIOQUIC)
def test_a_name_that_is_gone_is_told_with_its_owner(owner: str) -> None:
    aioquic_names.look_up({owner: AIOQUIC[owner]})
    told = re.escape(f"{owner.replace(':', '.')} has no _gone, nothing")
    with pytest.raises(Missing, match=f"^{told}$"):
        aioquic_names.look_up({owner: (*AIOQUIC[owner], "_gone", "nothing")})


OTHER_AIOQUIC = """
import asyncio, sys
{change}
import aqueduct

async def main():
    tls = aqueduct.dev_certificate()
    errors = []
    for action in (
        lambda: aqueduct.connect("aqueduct://127.0.0.1:4433?verify=off"),
        lambda: aqueduct.serve(print, "aqueduct://127.0.0.1:0", tls=tls),
        lambda: aqueduct.connect("aqueduct://127.0.0.1:4433?verify=off"),  # not only once
    ):
        try:
            await action()
        except aqueduct.errors.ConfigError as error:
            errors.append(str(error))
    assert len(set(errors)) == 1 and len(errors) == 3, errors
    print(errors[0])
    async with await aqueduct.serve(print, "aqueduct+tls://127.0.0.1:0", tls=tls) as server:
        async with await aqueduct.connect(server.addresses[0]):
            print("connected over TLS")

asyncio.run(main())
"""

CHANGES = {
    "a module": (
        "import aioquic.quic.recovery as r; del r.MAX_ACK_RANGES",
        "MAX_ACK_RANGES",
    ),
    "a class": (
        "from aioquic.quic.connection import QuicConnection as c; del c._write_application",
        "aioquic.quic.connection.QuicConnection has no _write_application",
    ),
    "all of it": ("sys.modules['aioquic'] = None", "No module named 'aioquic"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_without_a_name_quic_is_refused_and_tls_goes_on(what: str) -> None:
    change, reason = CHANGES[what]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_AIOQUIC.format(change=change)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("QUIC (aqueduct://) does not work with what is installed, aioqu")
    assert reason in done.stdout
    assert "Type: pip install 'aioquic>=1.7,<1.8'; or use aqueduct+tls://\n" in done.stdout
    assert done.stdout.endswith("connected over TLS\n")


@pytest.mark.parametrize("kind", [QuicConnection, recovery.QuicPacketRecovery, tls.Context])
def test_attributes_are_read_from_code_as_dis_reads_them(kind: type) -> None:
    functions = [value for value in vars(kind).values() if inspect.isfunction(value)]
    expected = {
        step.argval
        for function in functions
        for step in dis.get_instructions(function)
        if step.opname == "STORE_ATTR"
    }
    assert aioquic_names._given(kind) == expected
    assert len(expected) > 20
