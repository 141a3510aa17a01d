"""Where a server listens: nothing of anybody else's is taken away there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jaxoverlap.errors import ConfigError
from jaxoverlap.server.address import Address, reserved


def at(path: Path) -> Address:
    return Address.parse("listen", f"unix:{path}")


def listening(path: Path) -> socket.socket:
    """As gRPC does it: what is there is replaced."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_what_is_no_socket_is_refused_and_stays(tmp_path):
    notes, folder = tmp_path / "notes", tmp_path / "folder"
    notes.write_text("precious")
    folder.mkdir()
    for path in (notes, folder):
        with pytest.raises(ConfigError, match=f"cannot listen on unix:{path}: what is there is no socket"):
            reserved(at(path)).__enter__()
    assert notes.read_text() == "precious" and folder.is_dir()


def test_a_file_that_appears_meanwhile_stays(tmp_path):
    path = tmp_path / "socket"
    with reserved(at(path)):
        path.write_text("precious")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("place", ["no/such/folder/socket", "file/socket"])
def test_a_path_that_can_not_be_is_refused_with_the_reason(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot listen on unix:.*(No such file|Not a directory)"):
        reserved(at(tmp_path / place)).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_folder_that_can_not_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        reserved(at(tmp_path / "socket")).__enter__()


def test_a_socket_that_somebody_has_left_behind_is_taken_over_and_removed(tmp_path):
    path = tmp_path / "socket"
    listening(path).close()
    with reserved(at(path)):
        listening(path).close()  # and killed, too
    assert not path.exists()


def test_a_living_servers_socket_is_refused_and_a_successors_stays(tmp_path):
    path = tmp_path / "socket"
    with reserved(at(path)):
        ours = listening(path)
        with pytest.raises(ConfigError, match="already in use"):
            reserved(at(path)).__enter__()
        ours.close()
        successor = reserved(at(path))
        successor.__enter__()
        theirs = listening(path)
    assert path.is_socket()
    theirs.close()
    successor.__exit__(None, None, None)
    assert not path.exists()


def test_a_path_has_to_fit_into_a_socket_address(tmp_path):
    folder = "/tmp/" + "x" * 92
    assert at(Path(folder, "abcd")).path == f"{folder}/abcd"
    with pytest.raises(ConfigError, match=r"listen: .* has at most 10[37] bytes, .* has 108"):
        at(Path(folder, "abcdefghij"))


@pytest.mark.parametrize("char", ["%", "#", "?"])
def test_a_path_that_means_another_to_grpc_is_refused(char):
    with pytest.raises(ConfigError, match="use a path without % # \\?"):
        Address.parse("admin_listen", f"unix:/tmp/a{char}41")
