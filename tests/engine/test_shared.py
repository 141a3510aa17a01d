"""One engine for several callers: nothing is left half done, whoever interrupts, leaves or fails, and when."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from itertools import pairwise

import pytest

from jaxoverlap import LLM, EngineError, SamplingParams
from jaxoverlap import llm as llm_module
from jaxoverlap.engine.collector import PromptCollector
from tests.fakes import oracle
from tests.interrupts import press_ctrl_c
from tests.test_llm import GREEDY, llm, toy_build  # noqa: F401

LONG = SamplingParams(temperature=0, seed=1, max_tokens=100, ignore_eos=True)


def before(owner, name, action, when=lambda *arguments: True):
    """Does something, once, before a method is called."""
    method = getattr(owner, name)
    done = []

    def wrapped(*arguments):
        if not done and when(*arguments):
            done.append(True)
            action()
        return method(*arguments)

    setattr(owner, name, wrapped)


def assert_usable(llm):  # noqa: F811
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_work and not llm._shared.has_callers
    assert llm.generate([5], GREEDY)[0].token_ids == oracle([5], 6, (), salt=1)[0]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_an_event_loop_leaves_no_step_half_done(llm, times):  # noqa: F811
    """The first cancels the task, at its next await; the second ends the call."""
    finished = []

    async def main():
        finished.append(llm.generate([7], LONG))
        await asyncio.sleep(60)

    for _ in range(times):
        before(llm.engine.loop.scheduler, "commit", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert len(finished) == (1 if times == 1 else 0)
    assert_usable(llm)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_while_a_stream_is_closed_leaves_no_step_half_done(llm, times):  # noqa: F811
    stream = llm.stream([7], LONG)
    next(stream)
    before(llm.engine.loop.scheduler, "commit", lambda: press_ctrl_c(times))
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    assert_usable(llm)


def test_ctrl_c_again_while_a_call_that_it_ended_leaves(llm):  # noqa: F811
    leave, commit = llm._shared.leave, llm.engine.loop.scheduler.commit

    def leaves(collectors):
        before(llm.engine.loop.scheduler, "commit", lambda: press_ctrl_c(2))
        leave(collectors)

    llm._shared.leave = leaves
    before(llm.runner, "launch", lambda: press_ctrl_c(2), when=lambda plan: plan.step_id == 5)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(30)], GREEDY)
    llm._shared.leave, llm.engine.loop.scheduler.commit = leave, commit
    assert_usable(llm)


def test_ctrl_c_while_a_prompt_is_added_leaves_nothing_queued(llm):  # noqa: F811
    before(llm.engine.loop.scheduler, "add", press_ctrl_c, when=lambda request: request.prompt_ids[0] == 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(30)], LONG)
    assert_usable(llm)


def test_ctrl_c_is_not_lost_where_a_prompt_is_refused(llm):  # noqa: F811
    check = llm.engine._resolve

    def interrupted(*arguments):
        press_ctrl_c()
        return check(*arguments)

    llm.engine._resolve = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(llm.generate_each([([-1], GREEDY)]))
    del llm.engine._resolve
    assert_usable(llm)


@pytest.mark.parametrize("name", ["SIGALRM", "SIGTERM"])
def test_what_a_programs_handler_of_a_signal_raises_leaves_no_step_half_done(llm, name):  # noqa: F811
    class Late(Exception):
        pass

    def late(*_):
        raise Late

    number = getattr(signal, name)
    usual = signal.signal(number, late)
    try:
        before(llm.engine.loop.scheduler, "commit", lambda: os.kill(os.getpid(), number))
        with pytest.raises(Late):
            llm.generate([[5], [6]], LONG)
        assert_usable(llm)
    finally:
        signal.signal(number, usual)


def test_a_close_that_ctrl_c_ends_can_be_done_again(llm):  # noqa: F811
    let_go, in_step, goes_on = [], threading.Event(), threading.Event()
    llm.runner.release = lambda: let_go.append(True)

    def work():
        with pytest.raises(EngineError, match="closed"):
            llm.generate([5], LONG)

    before(llm.engine.loop.scheduler, "commit", lambda: (in_step.set(), goes_on.wait(30)))
    thread = threading.Thread(target=work)
    thread.start()
    assert in_step.wait(30)
    threading.Timer(0.1, press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert not let_go
    goes_on.set()
    for _ in range(2):
        llm.close()
        assert let_go == [True]
    thread.join(30)


def test_a_handler_that_closes_an_llm_does_so_between_two_steps(llm):  # noqa: F811
    """As one of SIGTERM may, and then lets the program go on."""
    inside = []
    before(llm.engine.loop.scheduler, "commit", lambda: os.kill(os.getpid(), signal.SIGTERM))
    usual = signal.signal(signal.SIGTERM, lambda *_: (inside.append(llm._shared._is_busy), llm.close()))
    try:
        with pytest.raises(EngineError, match="closed"):
            llm.generate([5], LONG)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert inside == [False]


def test_a_step_that_something_stops_half_way_ends_the_engine(llm):  # noqa: F811
    class Stop(BaseException):
        pass

    def stop():
        raise Stop

    before(llm.engine.loop.scheduler, "commit", stop)
    with pytest.raises(Stop):
        llm.generate([5], GREEDY)
    for _ in range(2):
        with pytest.raises(EngineError, match="half done"):
            llm.generate([5], GREEDY)
    llm.close()


def test_a_fault_in_collecting_is_told_to_all_callers(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    take = PromptCollector.take
    together, results = threading.Barrier(3), []

    def broken(collector, request):
        if request.prompt_ids[0] == 2 and len(request.output_ids) > 20:
            raise ValueError("no such text")
        return take(collector, request)

    monkeypatch.setattr(PromptCollector, "take", broken)
    with LLM(max_running=4, progress=False) as llm:  # noqa: F811

        def work(index):
            stream = llm.stream([index], LONG)
            next(stream)
            together.wait(10)
            try:
                list(stream)
            except EngineError as error:
                results.append(str(error))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(results) == 3
    assert all("ValueError: no such text" in text for text in results)


def test_who_was_brought_on_by_others_steps_does_not_step(llm):  # noqa: F811
    stream = llm.stream([7], LONG)
    next(stream)
    launches = llm.runner.num_launches
    assert llm._shared.step(unless=["news"]) == 0 and llm.runner.num_launches == launches
    assert llm._shared.step(unless=[]) == 1
    stream.close()


def test_a_stream_gets_its_tokens_one_by_one_beside_a_thread_that_generates(llm):  # noqa: F811
    llm.runner.step_seconds = 0.005
    thread = threading.Thread(target=lambda: llm.generate([[1]] * 3, LONG))
    thread.start()
    moments = []
    for _ in llm.stream([7], SamplingParams(temperature=0, seed=1, max_tokens=60, ignore_eos=True)):
        moments.append(time.perf_counter())
    thread.join(30)
    at_once = sum(later - earlier < 0.001 for earlier, later in pairwise(moments))
    assert at_once < len(moments) / 3, "two or three at a time"


def test_a_stream_that_is_collected_in_the_middle_of_a_step_leaves_after_it(llm):  # noqa: F811
    class Holder:
        pass

    holder, calls = Holder(), []
    holder.stream, holder.itself = llm.stream([7], LONG), holder
    next(holder.stream)
    del holder
    abort = llm.engine.abort
    llm.engine.abort = lambda request: calls.append("abort") or abort(request)

    def collect():
        gc.collect()
        calls.append("collected")

    gc.disable()
    try:
        before(llm.engine.loop.scheduler, "commit", collect)
        assert llm.generate([5], GREEDY)[0].token_ids == oracle([5], 6, (), salt=1)[0]
    finally:
        gc.enable()
    assert calls[:2] == ["collected", "abort"]
    assert_usable(llm)
