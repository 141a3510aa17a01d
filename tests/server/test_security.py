"""Who gets in, and what is told to whom."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxoverlap.errors import ConfigError
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.tls import server_credentials
from jaxoverlap.server.tokens import Gatekeeper, TokenFile
from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.v1 import generate_service_pb2_grpc
from tests.server.rig import Caller, eventually, generation, running
from tests.server.test_statuses import failure_of

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def code_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> grpc.StatusCode:
    try:
        call(*args, **kwargs)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def replace_file(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def services(caller: Caller, **options: Any) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(caller.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = stub.ServerReflectionInfo(asked, timeout=5, **options)
    return {service.name for service in answer.list_services_response.service}


# ---------------------------------------------------------------- tokens


def test_tokens_are_asked_for_and_read_again_when_they_change(tmp_path):
    tokens, admins = tmp_path / "tokens", tmp_path / "admins"
    tokens.write_text("# comment\n\n  first  \nsecond\n")
    admins.write_text("boss\n")
    with running(token_file=str(tokens), admin_token_file=str(admins)) as rig:
        call, load = rig.caller.answer, rig.caller.admin.GetLoad
        for token, expected in (
            ("first", "OK"),
            ("second", "OK"),
            ("third", "UNAUTHENTICATED"),
            ("", "UNAUTHENTICATED"),
        ):
            assert code_of(call, generation(), metadata=bearer(token)).name == expected
        for metadata in (None, (("authorization", "Basic first"),), (("authorization", "first"),), bearer("# comment")):
            assert code_of(call, generation(), metadata=metadata) == UNAUTHENTICATED
        assert code_of(call, generation(), metadata=bearer("boss")) == UNAUTHENTICATED
        assert failure_of(rig.caller.stream, generation()).code() == UNAUTHENTICATED
        assert code_of(load, admin.GetLoadRequest(), metadata=bearer("boss")) == grpc.StatusCode.OK
        assert code_of(load, admin.GetLoadRequest(), metadata=bearer("first")) == DENIED
        assert code_of(load, admin.GetLoadRequest()) == UNAUTHENTICATED
        assert "jaxoverlap.v1.GenerateService" in services(rig.caller, metadata=bearer("first"))
        assert failure_of(services, rig.caller).code() == UNAUTHENTICATED
        assert health_pb2_grpc.HealthStub(rig.caller.channel).Check(health_pb2.HealthCheckRequest()).status == 1

        replace_file(tokens, "third\n")
        eventually(lambda: code_of(call, generation(), metadata=bearer("third")) == grpc.StatusCode.OK)
        assert code_of(call, generation(), metadata=bearer("first")) == UNAUTHENTICATED
        replace_file(tokens, "# nobody\n")  # rather the old ones than none, or everybody
        eventually(lambda: "there is no token" in rig.frontend._gatekeeper._tokens._complaint)
        assert code_of(call, generation(), metadata=bearer("third")) == grpc.StatusCode.OK
        tokens.unlink()
        assert code_of(call, generation(), metadata=bearer("third")) == grpc.StatusCode.OK


def test_tokens_of_callers_do_not_open_the_admin_service(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("caller\n")
    with running(token_file=str(tokens)) as rig:
        error = failure_of(rig.caller.admin.GetLoad, admin.GetLoadRequest(), metadata=bearer("caller"))
        assert error.code() == DENIED and "caller" not in error.details()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"# none\n", "there is no token in it"),
        (b"", "there is no token in it"),
        ("fine\nschlüssel\n".encode(), "line 2 is not printable ASCII"),
        ("token\n".encode("utf-16"), "line 1 is not printable ASCII"),
    ],
)
def test_a_token_file_that_lets_nobody_in_is_an_error(tmp_path, content, problem):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=f"token_file: {tmp_path / 'file'}: {problem}"):
        Gatekeeper(ServerConfig(token_file=str(tmp_path / "file")))


def test_a_byte_order_mark_is_no_part_of_the_first_token(tmp_path):
    (tmp_path / "tokens").write_bytes("first\r\nsecond".encode("utf-8-sig"))
    tokens = TokenFile("token_file", str(tmp_path / "tokens"))
    assert tokens.has(b"first") and tokens.has(b"second")


def test_what_is_wrong_with_a_changed_token_file_is_said_once(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text("first\n")
    tokens = TokenFile("token_file", str(path))
    path.unlink()
    for _ in range(3):
        tokens.refresh()
    path.write_text("other\n\x00\n")
    for _ in range(3):
        tokens.refresh()
    assert tokens.has(b"first") and not tokens.has(b"other")
    assert [record.getMessage() for record in caplog.records] == [
        f"tokens stay as they were: token_file: {path}: No such file or directory",
        f"tokens stay as they were: token_file: {path}: line 2 is not printable ASCII",
    ]


# ---------------------------------------------------------------- TLS


@pytest.fixture
def authority(tmp_path) -> trustme.CA:
    return trustme.CA()


def write_certificate(folder: Path, authority: trustme.CA) -> dict[str, str]:
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    key, chain = folder / "key.pem", folder / "cert.pem"
    certificate.private_key_pem.write_to_path(str(key))
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    return {"tls_cert": str(chain), "tls_key": str(key)}


def answers_over_tls(target: str, authority: trustme.CA, own: trustme.LeafCert | None = None) -> bool:
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        None if own is None else own.private_key_pem.bytes(),
        None if own is None else own.cert_chain_pems[0].bytes(),
    )
    with grpc.secure_channel(target, credentials) as channel:
        stub = generate_service_pb2_grpc.GenerateServiceStub(channel)
        return code_of(stub.Generate, pb.GenerateRequest(generation=generation()), timeout=5) == grpc.StatusCode.OK


def test_tls_and_a_renewed_certificate(tmp_path, authority):
    files = write_certificate(tmp_path, authority)
    other = trustme.CA()
    with running(**files) as rig:
        assert answers_over_tls(rig.target, authority)
        assert not answers_over_tls(rig.target, other)
        assert code_of(rig.caller.answer, generation(), timeout=2) == grpc.StatusCode.UNAVAILABLE  # in the clear
        before = os.stat(files["tls_cert"]).st_mtime_ns
        eventually(lambda: write_certificate(tmp_path, other) and os.stat(files["tls_cert"]).st_mtime_ns != before)
        assert answers_over_tls(rig.target, other)
        assert not answers_over_tls(rig.target, authority)


ENCRYPTED_KEY = b"""-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,0123456789ABCDEF0123456789ABCDEF

MHcCAQEEIAAA
-----END EC PRIVATE KEY-----
"""


@pytest.mark.parametrize(
    ("setting", "content", "problem"),
    [
        ("tls_cert", b"junk", "there is no certificate in PEM format in it"),
        ("tls_key", b"", "there is no private key in PEM format in it"),
        ("tls_key", ENCRYPTED_KEY, "it is encrypted; use a key without a passphrase"),
        ("tls_key", trustme.CA().issue_cert("x").private_key_pem.bytes(), "it is not the key of .*cert.pem"),
        ("tls_client_ca", b"junk", "there is no certificate in PEM format in it"),
    ],
)
def test_a_file_that_can_not_be_used_for_tls_is_an_error_that_names_it(tmp_path, authority, setting, content, problem):
    (tmp_path / "bad").write_bytes(content)
    files = write_certificate(tmp_path, authority) | {setting: str(tmp_path / "bad")}
    with pytest.raises(ConfigError, match=f"^{setting}: {tmp_path / 'bad'}: {problem}$"):
        server_credentials(ServerConfig(**files))


def test_mutual_tls(tmp_path, authority):
    files = write_certificate(tmp_path, authority)
    callers = trustme.CA()
    callers.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with running(**files, tls_client_ca=str(tmp_path / "ca.pem")) as rig:
        assert answers_over_tls(rig.target, authority, callers.issue_cert("somebody"))
        assert not answers_over_tls(rig.target, authority, trustme.CA().issue_cert("somebody"))
        assert not answers_over_tls(rig.target, authority)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "0.0.0.0:0"}, "there is no TLS"),
        ({"listen": "[::]:0"}, "there is no TLS"),
        ({"admin_listen": "0.0.0.0:0"}, "there is no TLS"),
        ({"listen": "nonsense"}, "use HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "use HOST:PORT"),
        ({"listen": "unix:"}, "use unix:PATH"),
        ({"listen": "no.such.host.invalid:1"}, "no address of this machine"),
        ({"listen": "unix:/tmp/x", "frontends": 2}, "can't be shared"),
        ({"listen": "unix:/tmp/x", "admin_listen": "unix:/tmp/x"}, "admin_listen: unix:/tmp/x is where the rest"),
        ({"listen": "unix:/tmp/a%41"}, "without % # ?"),
        ({"listen": "unix:/tmp/" + "x" * 103}, "at most 10. bytes"),
        ({"frontends": 2, "in_process": True}, "frontends"),
        ({"frontends": 0}, "frontends"),
        ({"tls_cert": "/dev/null"}, "go together"),
        ({"tls_client_ca": "/dev/null"}, "needs tls_cert"),
        ({"token_file": "/no/such/file"}, "there is no file"),
        ({"max_streams": 0}, "max_streams"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"grace": -1}, "grace"),
        ({"log_level": "loud"}, "log_level"),
        ({"admin_listen": "no.such.host.invalid:1"}, "^admin_listen: 'no.such.host.invalid' is no address"),
        ({"listen": "[::1:0"}, r"^listen: '\[::1:0' is not allowed"),
        ({"listen": "unix:/tmp/\udcff"}, "^listen: .* use a path of printable characters"),
        ({"listen": "unix:/tmp/a\nb"}, "^listen: .* use a path of printable characters"),
        ({"served_name": ""}, "^served_name: '' is not allowed"),
        ({"served_name": "a\nb"}, "^served_name: "),
        ({"served_name": "\udcff"}, "^served_name: "),
        ({"token_file": "/tmp/" + "x" * 300}, "^token_file: there is no file"),
        ({"profile_dir": ""}, "^profile_dir: '' is not allowed"),
        ({"profile_dir": "/tmp/" + "x" * 300}, "^profile_dir: .* File name too long"),
        ({"otlp_traces_endpoint": "http://"}, "^otlp_traces_endpoint: 'http://' is not allowed; use a URL"),
    ],
)
def test_settings_that_make_no_sense_or_no_secret_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


def test_what_only_this_machine_can_reach_needs_no_tls():
    for listen in ("127.0.0.1:1", "localhost:1", "unix:/tmp/socket"):
        assert ServerConfig(listen=listen).address.is_local
    assert not ServerConfig(listen="0.0.0.0:1", insecure=True).address.is_local


# ---------------------------------------------------------------- what is told


def test_prompts_outputs_and_tokens_are_not_logged(tmp_path, caplog):
    (tmp_path / "tokens").write_text("hush-hush\n")
    caplog.set_level("DEBUG", logger="jaxoverlap")
    with running(token_file=str(tmp_path / "tokens")) as rig:
        text = rig.caller.answer(generation("my secret"), metadata=bearer("hush-hush")).sequences[0].text
        assert code_of(rig.caller.answer, generation("x" * 2000), metadata=bearer("hush-hush")) != grpc.StatusCode.OK
        assert "toy-0-0" in caplog.text
        for secret in ("my secret", text, "xxxx", "hush-hush", str(tmp_path)):
            assert secret not in caplog.text.replace(str(rig.frontend._gatekeeper), "")


def test_server_info_is_what_the_message_has_fields_for(rig):
    info = rig.caller.admin.GetServerInfo(admin.GetServerInfoRequest())
    assert {field.name for field, _ in info.ListFields()} <= {
        *("version", "api_version", "instance_id", "uptime_seconds", "page_size", "num_pages", "max_running"),
        *("max_queued", "devices", "schedule", "kv_cache_dtype"),
    }
    assert str(Path.cwd()) not in str(info) and os.environ.get("HOME", "/root") not in str(info)
    assert services(rig.caller) >= {
        "jaxoverlap.v1.GenerateService",
        "jaxoverlap.v1.AdminService",
        "grpc.health.v1.Health",
    }
