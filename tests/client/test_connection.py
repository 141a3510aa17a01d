"""TLS, tokens, addresses and settings."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent import futures
from contextlib import suppress

import grpc
import pytest
import trustme

from jaxoverlap import (
    AccessDeniedError,
    Client,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    SamplingParams,
    ServerUnavailableError,
)
from jaxoverlap.client import AbortedIds, ClientConfig, Health, ModelInfo
from jaxoverlap.client import config as client_config
from jaxoverlap.v1 import generate_service_pb2_grpc
from tests.client.fake_server import MAX_MODEL_LEN, SNAPSHOT, FakeServer


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def root(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "root.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def credentials(authority, name="127.0.0.1", *, mutual=False):
    certificate = authority.issue_cert(name)
    pair = certificate.private_key_pem.bytes(), b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    return grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=mutual)


def test_tls(connect, authority, root):
    server = FakeServer(credentials=credentials(authority))
    assert connect(server.target, root_certificates=root).generate("a")[0].text == "<a>"
    assert connect(server.target, root_certificates=root.read_bytes()).load().running == 2
    with pytest.raises(ServerUnavailableError):
        connect(server.target, tls=True, max_retries=0).generate("a")
    with pytest.raises(ServerUnavailableError):
        connect(server.target, max_retries=0).generate("a")
    server.stop()


def test_a_server_with_another_name(connect, authority, root):
    server = FakeServer(credentials=credentials(authority, "llm.example"))
    with pytest.raises(ServerUnavailableError):
        connect(server.target, root_certificates=root, max_retries=0).generate("a")
    assert connect(server.target, root_certificates=root, server_name="llm.example").generate("a")[0].text == "<a>"
    server.stop()


def test_mutual_tls(connect, authority, root):
    server = FakeServer(credentials=credentials(authority, mutual=True))
    with pytest.raises(ServerUnavailableError):
        connect(server.target, root_certificates=root, max_retries=0).generate("a")
    mine = authority.issue_cert("me@example.org")
    pair = {"client_key": mine.private_key_pem.bytes(), "client_certificate": mine.cert_chain_pems[0].bytes()}
    assert connect(server.target, root_certificates=root, **pair).generate("a")[0].text == "<a>"
    server.stop()


def test_tokens(connect):
    server = FakeServer(token="secret")
    assert list(connect(server.target, token="secret").stream("a"))[-1].output.text == "<a>"
    for token in ("Secret", None):
        client = connect(server.target, token=token)
        for work in (lambda c=client: c.generate("a"), lambda c=client: list(c.stream("a")), client.load):
            with pytest.raises(AccessDeniedError, match="bearer token"):
                work()
    tokens = iter(["old", "secret"])
    renewed = connect(server.target, token=lambda: next(tokens))
    with pytest.raises(AccessDeniedError):
        renewed.generate("a")
    assert renewed.generate("a")[0].text == "<a>"
    server.stop()


def test_metadata_goes_with_every_call(connect, server):
    client = connect(server.target, metadata=[("x-tenant", "blue"), ("x-some_9.more-bin", b"\xff\n")])
    client.generate("a")
    list(client.stream("a"))
    assert [call.metadata["x-tenant"] for call in server.calls] == ["blue"] * 2


def test_metadata_that_the_service_does_not_take_is_named(connect, server):
    client = connect(server.target, metadata=[("x-long", "a" * 20_000)])
    for work in (lambda: client.generate("a"), lambda: list(client.stream("a")), client.load):
        with pytest.raises(InvalidRequestError, match=r"^metadata: .*exceeds"):
            work()


@pytest.mark.parametrize("token", ["a\n", "ä", "", 7])
def test_a_token_that_can_not_be_sent_is_named(connect, server, token):
    client = connect(server.target, token=lambda: token)
    for work in (lambda: client.generate("a"), lambda: list(client.stream("a")), client.load):
        with pytest.raises(ConfigError, match=r"^token: it must be printable ASCII"):
            work()


@pytest.mark.parametrize(
    "target", ["localhost:1", "127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "unix:/tmp/s", "ipv4:///127.0.0.1:1"]
)
def test_a_token_may_stay_in_the_clear_on_this_machine(target):
    ClientConfig(target=target, token="t")


@pytest.mark.parametrize(
    "target", ["llm.example:443", "10.0.0.1:1", "localhost.example:1", "dns:///llm:1", "[fe80::1]:1"]
)
def test_a_token_does_not_leave_it_in_the_clear(target):
    with pytest.raises(ConfigError, match=r"^token: without TLS"):
        ClientConfig(target=target, token="t")
    ClientConfig(target=target, token="t", tls=True)
    ClientConfig(target=target, token="t", allow_plaintext_token=True)


@pytest.mark.parametrize(("host", "is_asked"), [("127.0.0.1", False), ("localhost", False), ("llm.example", True)])
def test_a_proxy_is_not_asked_for_what_is_on_this_machine(connect, monkeypatch, host, is_asked):
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as nobody:
        proxy.setblocking(False)
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        port = nobody.getsockname()[1]
        client = connect(f"{host}:{port}", token="t", allow_plaintext_token=True, timeout=0.5, max_retries=0)
        with pytest.raises((DeadlineError, ServerUnavailableError)):
            client.load()
        asked = False
        with suppress(BlockingIOError):
            proxy.accept()[0].close()
            asked = True
        assert asked == is_asked


class Wire:
    """Between a caller and a server, on which nothing goes any more once it is cut."""

    def __init__(self, port: int) -> None:
        self.is_cut = threading.Event()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            caller, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        for ends in ((caller, server), (server, caller)):
            threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_cut.is_set():
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def test_a_server_that_vanishes_during_a_long_silence_is_noticed(connect, monkeypatch):
    monkeypatch.setattr(client_config, "_KEEPALIVE_MS", 200)
    monkeypatch.setattr(client_config, "_KEEPALIVE_TIMEOUT_MS", 200)
    held = threading.Event()

    class Silent(generate_service_pb2_grpc.GenerateServiceServicer):
        def Generate(self, request, context):
            held.wait()

    permissive = [("grpc.http2.min_recv_ping_interval_without_data_ms", 10)]
    server = grpc.server(futures.ThreadPoolExecutor(1), options=permissive)
    generate_service_pb2_grpc.add_GenerateServiceServicer_to_server(Silent(), server)
    wire = Wire(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    cut: list[float] = []

    def cut_later() -> None:
        cut.append(time.monotonic())
        wire.is_cut.set()

    timer = threading.Timer(2.0, cut_later)  # many pings later
    timer.start()
    try:
        with pytest.raises(ServerUnavailableError):
            connect(wire.target, max_retries=0, timeout=20.0).generate("a")
        assert cut and time.monotonic() - cut[0] < 5.0
    finally:
        held.set()
        server.stop(None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": ""}, "^target: ''"),
        ({"target": 7}, "^target: 7"),
        ({"target": "unix:/tmp/\udcff"}, "^target: 'unix:/tmp/"),
        ({"tls": "no"}, "^tls: 'no' is not allowed; use True or False"),
        ({"model": 5}, "^model: 5"),
        ({"tls": True, "server_name": ""}, "^server_name: ''"),
        ({"root_certificates": 5}, "^root_certificates: int is not allowed"),
        ({"timeout": 0}, "^timeout: 0"),
        ({"metadata": "x-a"}, "^metadata: str"),
        ({"metadata": ["xa"]}, r"^metadata\[0\]: str"),
        ({"metadata": [("x-a", "fine"), ("X-Trace", "a")]}, r"^metadata\[1\]: 'X-Trace' is not allowed; use lower"),
        ({"metadata": [("grpc-timeout", "1S")]}, r"^metadata\[0\]: 'grpc-timeout'"),
        ({"metadata": [("x-a", "ä")]}, r"^metadata\[0\]: the value of 'x-a' .* printable ASCII"),
        ({"metadata": [("x-a", "a\nb")]}, r"^metadata\[0\]: the value of 'x-a'"),
        ({"metadata": [("x-bin", "text")]}, r"^metadata\[0\]: the value of 'x-bin' .* use bytes"),
        ({"timeout": float("nan")}, "^timeout: nan"),
        ({"max_retries": -1}, "^max_retries: -1"),
        ({"concurrency": 0}, "^concurrency: 0"),
        ({"concurrency": True}, "^concurrency: True"),
        ({"max_message_mib": 2000}, "^max_message_mib: 2000"),
        ({"client_key": b"x"}, "go together"),
        ({"server_name": "x"}, "^server_name: "),
        ({"token": "a\nb"}, "^token: "),
        ({"token": ""}, "^token: "),
        ({"token": b"secret"}, "^token: it must be printable ASCII"),
        ({"timeout": 10**400}, "^timeout: 1000"),
        ({"root_certificates": "no/such.pem"}, "^root_certificates: no/such.pem: No such file"),
        ({"root_certificates": b""}, "^root_certificates: the bytes: there is no certificate in PEM format in it"),
        ({"root_certificates": os.devnull}, "^root_certificates: /dev/null: there is no certificate"),
        ({"client_certificate": b"a", "client_key": b"b"}, "^client_certificate: the bytes: there is no certificate"),
        ({"no_such": 1}, "^no_such: 1 is not allowed; known settings are "),
    ],
)
def test_settings_that_can_not_be(connect, settings, said):
    with pytest.raises(ConfigError, match=said):
        connect(**({"target": "127.0.0.1:1"} | settings))


def test_a_key_that_is_none_or_another_ones_is_named_before_anything_is_sent(connect, authority, tmp_path):
    one, other = authority.issue_cert("me"), authority.issue_cert("you")
    certificate, key = tmp_path / "me.pem", tmp_path / "you.key"
    one.cert_chain_pems[0].write_to_path(str(certificate))
    other.private_key_pem.write_to_path(str(key))
    me = {"target": "127.0.0.1:1", "client_certificate": certificate}
    for wrong, said in (
        (key, f"^client_key: {key}: it is not the key of {certificate}$"),
        (certificate, f"^client_key: {certificate}: there is no private key in PEM format in it$"),
        (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", "^client_key: the bytes: it is encrypted"),
    ):
        with pytest.raises(ConfigError, match=said):
            connect(**me, client_key=wrong)
    connect(**me, client_key=one.private_key_pem.bytes())


def test_a_token_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        ClientConfig(target="llm.example:443", token="secret")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(ClientConfig(token="secret"))


def test_what_the_service_says_of_itself(client, server):
    assert client.model_info() == ModelInfo(
        served_name="fake",
        architecture="llama",
        vocab_size=97,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(96,),
        bos_token_id=None,
        has_chat_template=True,
        dtype="float32",
        capabilities=("logprobs",),
        sampling_defaults={"temperature": 0.5, "top_k": 20},
    )
    info = client.server_info()
    assert (info.version, info.uptime_seconds, info.devices) == ("0.1.0", 1.5, ("cpu:0",))
    load = client.load()
    assert (load.running, load.queued, load.kv_used_fraction, load.draining) == (2, 1, 0.5, False)
    assert client.health() == Health(live=True, ready=True)
    server.set_ready(False)
    assert client.health() == Health(live=True, ready=False)


def test_what_the_model_recommends_are_parameters(client, server):
    assert SamplingParams(**client.model_info().sampling_defaults) == SamplingParams(temperature=0.5, top_k=20)


def test_what_operators_do(client, server):
    assert client.abort(["r-1", "r-9"]) == AbortedIds(aborted_ids=("r-1",), unknown_ids=("r-9",))
    assert client.abort("r-9") == AbortedIds(aborted_ids=(), unknown_ids=("r-9",))
    assert client.abort(all_requests=True).aborted_ids == ("r-1",)
    for ids, all_requests in (([], False), (["r-1"], True)):
        with pytest.raises(ValueError, match=r"^request_ids: "):
            client.abort(ids, all_requests=all_requests)
    assert client.flush_cache() == 7
    assert client.drain(2.5) == 0 and server.admin_calls[-1].timeout_seconds == 2.5
    client.drain()
    assert not server.admin_calls[-1].HasField("timeout_seconds")
    assert client.start_profile(3) == "/traces/3" and client.stop_profile() == "/traces/0"
    snapshot = client.memory_snapshot()
    assert snapshot.to_dict() == SNAPSHOT
    assert snapshot.to_svg().startswith("<svg") and snapshot.pages[1].request_id == 7


def test_clients_are_context_managers(server):
    with Client(server.target) as client:
        assert client.load().running == 2
    with pytest.raises(Exception, match="closed"):
        client.load()
