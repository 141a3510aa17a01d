"""Ctrl-C is held back where something would be left half done, and not lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from jaxoverlap.interrupt import interrupt_deferred
from tests.interrupts import press_ctrl_c


def test_ctrl_c_waits_for_the_end_however_often_it_comes():
    done = []

    def block(fails):
        with interrupt_deferred():
            press_ctrl_c(2)
            done.append(True)
            if fails:
                raise ValueError

    with pytest.raises(KeyboardInterrupt):
        block(fails=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        block(fails=True)
    assert len(done) == 2
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_of_ctrl_c_is_called_after_the_block_as_often_as_it_came():
    calls = []
    usual = signal.signal(signal.SIGINT, lambda signum, frame: calls.append((signum, frame.f_code.co_name)))
    try:
        with interrupt_deferred(), interrupt_deferred():
            press_ctrl_c()
            press_ctrl_c()
            assert not calls
        assert calls == [(signal.SIGINT, "press_ctrl_c")] * 2
        press_ctrl_c()
        assert len(calls) == 3
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupt_deferred():
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_ctrl_c_wakes_a_block_that_waits():
    woken = threading.Event()
    threading.Timer(0.1, press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt), interrupt_deferred(wake=woken.set):
        assert woken.wait(60)
    assert woken.is_set()


@contextmanager
def handled(number, handler):
    usual = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, usual)


class Stop(BaseException):
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1"])
def test_what_a_programs_handler_of_another_signal_raises_waits_for_the_end_too(name):
    number, done = getattr(signal, name), []

    def block():
        with interrupt_deferred():
            os.kill(os.getpid(), number)
            done.append(True)

    with handled(number, stop):
        with pytest.raises(Stop):
            block()
        assert done and signal.getsignal(number) is stop


def test_of_two_signals_neither_is_lost():
    calls = []

    def block():
        with interrupt_deferred():
            press_ctrl_c()
            os.kill(os.getpid(), signal.SIGTERM)
            assert not calls

    with handled(signal.SIGTERM, lambda *_: calls.append("SIGTERM")), pytest.raises(KeyboardInterrupt):
        block()
    assert calls == ["SIGTERM"]


def test_what_a_handler_raises_wakes_a_block_that_waits_and_comes_behind_it():
    woken = threading.Event()

    def block():
        with interrupt_deferred(wake=woken.set):
            assert woken.wait(60)
            woken.clear()

    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with handled(signal.SIGTERM, stop), pytest.raises(Stop):
        block()
    assert not woken.is_set()


def test_an_exception_while_handlers_are_put_back_leaves_none_that_holds_back_for_ever():
    """Ctrl-C comes back first, and at once."""
    calls = []
    with handled(signal.SIGTERM, lambda *_: calls.append("SIGTERM")):
        put_back = signal.signal

        def interrupted(number, handler):
            put_back(number, handler)
            if handler is signal.default_int_handler:
                press_ctrl_c()

        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch, interrupt_deferred():
            patch.setattr(signal, "signal", interrupted)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            with interrupt_deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                held_back = len(calls)
        assert (held_back, len(calls)) == (3, 4)


def test_a_programs_own_handler_decides_whether_a_wait_ends():
    calls, woken = [], []
    usual = signal.signal(signal.SIGINT, lambda *_: calls.append("its own"))
    try:
        with interrupt_deferred(wake=lambda: woken.append(True)):
            press_ctrl_c()
            assert calls == ["its own"]
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not woken
