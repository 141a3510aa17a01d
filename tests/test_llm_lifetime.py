"""How an LLM ends: closed, dropped, or open when the program ends. On a real, tiny model."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import pytest

from jaxoverlap import LLM, AsyncClient, Client, EngineError, SamplingParams
from jaxoverlap import llm as llm_module
from tests.server.rig import eventually
from tests.server.tiny_folder import write_tiny_model
from tests.test_llm import toy_build

ROOT = Path(__file__).parents[1]
SETTINGS = {"max_running": 2, "max_batched_tokens": 16, "max_model_len": 64, "num_pages": 32, "deterministic": True}
LONG = SamplingParams(temperature=0, seed=1, max_tokens=40, ignore_eos=True)
PROGRAM = f"""
import sys, threading
from jaxoverlap import LLM, EngineError, SamplingParams

llm = LLM(sys.argv[1], progress=False, **{SETTINGS})
started = threading.Event()

def work():
    try:
        while True:
            next(stream := llm.stream([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True)))
            started.set()
            llm.generate([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    except EngineError:
        pass

threading.Thread(target=work, daemon=True).start()
started.wait()
print("end", flush=True)
"""


FORKED = """
import copy, os, pickle, sys, threading, time, warnings
from jaxoverlap import LLM, EngineError, SamplingParams
from jaxoverlap import llm as llm_module
from tests.test_llm import toy_build

warnings.simplefilter("ignore")
llm_module.build_engine = toy_build
llm = LLM(max_running=2, progress=False)
llm.runner.release = lambda: print("let go", flush=True)
stream = llm.stream([5], SamplingParams(max_tokens=40, ignore_eos=True))
next(stream)
held = threading.Event()
done = threading.Event()

def hold():
    with llm._shared.lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
if not os.fork():
    for use in (lambda: llm.generate([5]), lambda: next(stream), llm.memory_snapshot):
        try:
            use()
        except EngineError as error:
            print("fork" in str(error), flush=True)
    llm.close()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
done.set()
print(len(list(stream)), flush=True)
llm.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jaxoverlap-watchdog"]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_llm_that_nobody_holds_gives_its_memory_back(folder, in_a_cycle):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    llm = LLM(folder, progress=False, **SETTINGS)
    stream = llm.stream([5, 6, 7], LONG)
    next(stream)
    assert len(jax.live_arrays()) > len(before) and watchdogs()
    engine = weakref.ref(llm.engine)
    if in_a_cycle:
        llm.itself, llm.kept = llm, stream
    del llm, stream
    if in_a_cycle:
        gc.collect()
    eventually(lambda: not watchdogs(), "the end of the watchdog")
    gc.collect()
    assert engine() is None
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []


def test_a_program_may_end_while_a_thread_generates(folder):
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], cwd=ROOT, capture_output=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, b"end\n"), run.stderr.decode()


def test_closing_ends_what_other_threads_run_with_the_step_under_way(folder):
    ended = []
    with LLM(folder, progress=False, **SETTINGS) as llm:
        stream = llm.stream([5, 6, 7], LONG)
        next(stream)

        def work():
            try:
                while True:
                    llm.generate([[5, 6, 7]], LONG)
            except EngineError as error:
                ended.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: llm.engine.loop.scheduler.num_running == 2, "both at once")
    thread.join(10)
    assert ended == ["this LLM is closed"]
    with pytest.raises(EngineError, match="closed"):
        list(stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_is_refused_at_once_and_ends_on_its_own():
    """Also where another thread is at the engine at that moment."""
    run = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, timeout=60, text=True)
    assert run.stdout.split("\n") == ["True", "True", "True", "3", "39", "let go", ""], run.stderr


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_and_a_client_say_that_they_can_not_be_copied(monkeypatch, way):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=2, progress=False) as llm, Client("127.0.0.1:1") as client:
        for one, name in ((llm, "an LLM"), (client, "Client"), (AsyncClient("127.0.0.1:1"), "AsyncClient")):
            with pytest.raises(TypeError, match=f"{name} .* neither copied nor pickled"):
                way(one)
