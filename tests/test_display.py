"""Progress bars beside a program's own output, on a terminal and without one."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from jaxoverlap import LLM, display
from jaxoverlap import llm as llm_module
from tests.fakes import oracle
from tests.interrupts import press_ctrl_c
from tests.server.rig import eventually
from tests.test_llm import GREEDY, toy_build

ROOT = Path(__file__).parents[1]
PROGRAM = """
from jaxoverlap import LLM
from jaxoverlap import llm as llm_module
from tests.test_llm import GREEDY, toy_build

llm_module.build_engine = toy_build
with LLM(max_running=1) as llm:
    llm.runner.step_seconds = 0.02
    for index, output in llm.generate_each([([1], GREEDY), ([2], GREEDY)]):
        print(index, *output.token_ids, "x" * 200)
"""
ANSWERS = [" ".join(map(str, [i, *oracle([i + 1], 6, (), salt=1)[0], "x" * 200])) for i in range(2)]


def on_terminal(stdout: io.BufferedWriter | None) -> str:
    """Runs the program with standard error on a terminal, and standard output in a file or there too."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that nobody writes there any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(60) == 0
    return shown.decode()


def test_what_a_program_prints_beside_a_bar_goes_where_it_is_told(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        shown = on_terminal(file)
    assert (tmp_path / "out").read_text().splitlines() == ANSWERS
    assert "decoding" in shown and "x" * 20 not in shown


def test_on_one_terminal_answers_have_lines_of_their_own():
    shown = on_terminal(None)
    assert "decoding" in shown
    for answer in ANSWERS:  # whole, after a line that was cleared or ended
        before, found, after = shown.partition(answer)
        assert found and before.endswith(("\x1b[2K", "\n")) and after.startswith("\r\n")


@pytest.fixture
def screen(monkeypatch) -> io.StringIO:
    screen = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    return screen


def test_of_calls_at_once_one_shows_its_bar(screen):
    results = []
    with LLM(max_running=4, progress=True) as llm:
        llm.runner.step_seconds = 0.002
        threads = [threading.Thread(target=lambda: results.append(llm.generate([[1]], GREEDY))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in llm.generate_each([([1], GREEDY)] * 2):
            results.append(llm.generate([[1]], GREEDY))
        for thread in threads:
            thread.join(30)
    assert [outputs[0].token_ids for outputs in results] == [oracle([1], 6, (), salt=1)[0]] * 6
    assert "decoding" in screen.getvalue()
    with display.generation_bar(3, shown=True), display.generation_bar(5, shown=True):
        assert list(display.track_warm_up([1, 2], 2)) == [1, 2]
    assert "0/3" in screen.getvalue() and "0/5" not in screen.getvalue() and "compiling" not in screen.getvalue()


@pytest.mark.parametrize("moment", ["start", "stop"])
@pytest.mark.parametrize("name", ["decoding", "compiling"])
def test_a_bar_that_ctrl_c_comes_to_goes_away_and_others_are_shown(screen, monkeypatch, name, moment):
    def interrupted(bar):
        usual(bar)
        press_ctrl_c()

    def show():
        with display.generation_bar(3, shown=True) if name == "decoding" else warming_up():
            pass

    before = threading.active_count()
    with monkeypatch.context() as patch:
        usual = getattr(Progress, moment)
        patch.setattr(Progress, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            show()
    eventually(lambda: threading.active_count() == before, "the end of what draws the bar")
    with display.generation_bar(7, shown=True):
        pass
    assert "0/7" in screen.getvalue()


@pytest.mark.parametrize("shown_before", [False, True])
def test_a_terminal_that_has_gone_takes_no_result_along(screen, monkeypatch, shown_before):
    """As where a program goes on when its terminal is closed."""

    def gone(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with LLM(max_running=4, progress=True) as llm:
        answers, finish = llm.generate_each([([1], GREEDY)]), llm.runner.finish

        def finish_without_terminal(step):
            monkeypatch.setattr(screen, "write", gone)
            return finish(step)

        llm.runner.finish = finish_without_terminal
        if not shown_before:
            monkeypatch.setattr(screen, "write", gone)
        before = threading.active_count()
        assert [output.token_ids for _, output in answers] == [oracle([1], 6, (), salt=1)[0]]
        assert llm.generate([[1]], GREEDY)[0].token_ids == oracle([1], 6, (), salt=1)[0]
        eventually(lambda: threading.active_count() <= before, "the end of what draws the bar")
    assert not display._terminal.locked()


@contextmanager
def warming_up():
    with closing(display.track_warm_up([1, 2], 2)) as shapes:
        next(shapes)
        yield


@pytest.mark.parametrize("progress", [None, True])
def test_without_standard_error_nothing_is_shown(screen, monkeypatch, progress):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with LLM(max_running=4, progress=progress) as llm:
            assert len(llm.generate([[1]], GREEDY)) == 1
    assert screen.getvalue() == ""
