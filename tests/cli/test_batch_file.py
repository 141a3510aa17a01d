"""Reading lines of any length, and going on with an output that a crash left behind."""

from __future__ import annotations

import io
import os

import pytest

from jaxoverlap.cli.batch_file import open_output, read_lines
from jaxoverlap.cli.batch_format import BadLine, error_line
from jaxoverlap.cli.command import CommandError


def lines_of(data: bytes, limit: int = 10):
    return [
        (number, line if isinstance(line, bytes) else str(line))
        for number, line in read_lines(io.BytesIO(data), "x", limit)
    ]


def test_lines_are_numbered_from_one_and_blank_ones_are_skipped():
    assert lines_of(b"a\n\n  \r\nb\r\nc") == [(1, b"a\n"), (4, b"b\r\n"), (5, b"c")]
    assert lines_of(b"") == []


@pytest.mark.parametrize("length", [11, 19, 20, 21, 30, 31])
def test_a_line_over_the_limit_is_skipped_whole(length):
    problem = "line 2: longer than 10 bytes"
    assert lines_of(b"a\n" + b"x" * length + b"\nb\n") == [(1, b"a\n"), (2, problem), (3, b"b\n")]
    assert lines_of(b"a\n" + b"x" * length) == [(1, b"a\n"), (2, problem)]


def test_a_line_at_the_limit_is_read():
    assert lines_of(b"x" * 10 + b"\nb\n") == [(1, b"x" * 10 + b"\n"), (2, b"b\n")]


def ours(custom_id: str) -> bytes:
    return error_line(BadLine("invalid_request", "no", custom_id=custom_id))


@pytest.fixture
def reopen(tmp_path):
    source = (tmp_path / "in").open("w+b")

    def run(path, **options):
        return open_output(str(path), source, **({"overwrite": False, "retry_errors": False} | options))

    yield run
    source.close()


def test_a_half_written_line_is_cut_off_at_every_byte(tmp_path, reopen):
    first, second, path = ours("a"), ours("b"), tmp_path / "out"
    for size in range(len(first + second) + 1):
        path.write_bytes((first + second)[:size])
        with reopen(path) as output:
            whole = ["a"] * (size >= len(first)) + ["b"] * (size == len(first + second))
            kept = first[: len(first) * len(whole)] + second * (len(whole) == 2)
            assert path.read_bytes() == kept
            assert output.answered.failed == {hash(custom_id) for custom_id in whole}
            output.write(b"more\n")
        assert path.read_bytes() == kept + b"more\n"


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"retry_errors": True}])
def test_an_output_has_one_batch_at_a_time(tmp_path, reopen, options):
    path = tmp_path / "out"
    with reopen(path) as output:
        output.write(ours("a"))
        with pytest.raises(CommandError, match="out: another batch is writing to it"):
            reopen(path, **options)
        output.write(ours("b"))
    assert path.read_bytes().count(b"\n") == 2
    with reopen(path) as output:
        assert output.answered.failed == {hash("a"), hash("b")}


def test_an_output_that_was_refused_is_free_again(tmp_path, reopen):
    path = tmp_path / "out"
    path.write_bytes(b"my thesis\n")
    with pytest.raises(CommandError, match="not the output of a batch"):
        reopen(path)
    with reopen(path, overwrite=True) as output:
        output.write(ours("a"))
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("tail", [b"\x00" * 9, b"\x00\n", b'{"id": 1}\n', b"junk"])
def test_a_last_line_that_makes_no_sense_is_cut_off(tmp_path, reopen, tail):
    path = tmp_path / "out"
    good = ours("a")
    path.write_bytes(good + tail)
    with reopen(path) as output:
        assert path.read_bytes() == good
        assert output.answered.failed == {hash("a")}


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b'{"id": "mine"}\n', b"x\n" * 5])
def test_somebody_elses_file_is_left_alone(tmp_path, reopen, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(CommandError, match="out: line 1 is not the output of a batch"):
        reopen(path)
    assert path.read_bytes() == content
    with reopen(path, overwrite=True) as output:
        assert path.read_bytes() == content
        output.begin()
        assert path.read_bytes() == b""


def test_a_bad_line_in_the_middle_is_no_crash(tmp_path, reopen):
    path = tmp_path / "out"
    path.write_bytes(ours("a") + b"junk\n" + ours("b"))
    with pytest.raises(CommandError, match="line 2 is not the output"):
        reopen(path)


def test_what_is_not_a_file_is_just_written_to(reopen):
    with reopen(os.devnull) as output:
        output.write(ours("a"))


def test_paths_that_can_not_be_written(tmp_path, reopen):
    for path in (tmp_path, tmp_path / "no" / "out"):
        with pytest.raises(CommandError, match=f"{path}: "):
            reopen(path)


def test_input_and_output_are_two_files(tmp_path, reopen):
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("in", "link"):
        for overwrite in (False, True):
            with pytest.raises(CommandError, match="same file"):
                reopen(tmp_path / name, overwrite=overwrite)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_is_named(reopen):
    with pytest.raises(CommandError, match="/dev/full: No space left"), reopen("/dev/full") as output:
        output.write(ours("a"))
