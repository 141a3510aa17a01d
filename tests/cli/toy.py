"""The command line on the toy device: everything is real but the model. `python -m tests.cli.toy generate …`.

Each of the 97 tokens is a character, so that what is decoded can be read off. TOY_STEP_SECONDS slows the device down.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import jaxoverlap.llm
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import BuiltEngine
from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import ModelError
from jaxoverlap.text.grammar_compiler import GrammarCompiler
from tests.fakes import VOCAB_SIZE, ToyRunner
from tests.toy_tokenizer import EOS_ID, make_tokenizer

NAME, CONTEXT = "toy", 256
BROKEN = "the model breaks the device"


def swallow_interrupts() -> None:
    """As a callback of a C library: exceptions of a finaliser are ignored."""

    class Finaliser:
        def __del__(self) -> None:
            print("ready", flush=True)
            time.sleep(30)

    Finaliser()


class Device(ToyRunner):
    def launch(self, plan: Any) -> Any:
        if any(BROKEN in make_tokenizer().decode(chunk.request.prompt_ids.tolist()) for chunk in plan.chunks):
            raise RuntimeError("out of toys")
        return super().launch(plan)

    def release(self) -> None: ...


def build_engine(config: EngineConfig, *, warm_up: bool) -> BuiltEngine:
    if config.model == "missing":
        raise ModelError("missing: no such\nfile or folder")
    if config.model == "swallows":
        swallow_interrupts()
    if config.model == "driver":
        raise RuntimeError("no driver")
    resolved = config.resolve(
        platform="cpu", vocab_size=VOCAB_SIZE, model_len=CONTEXT, page_bytes=1, kv_memory_bytes=1 << 12
    )
    logging.getLogger("jaxoverlap.engine.build").info("on a toy: %s", resolved.describe())
    scheduler = resolved.scheduler
    step_seconds = float(os.environ.get("TOY_STEP_SECONDS", "0"))
    runner = Device(scheduler.limits, scheduler.max_running, step_seconds=step_seconds, salted=True)
    tokenizer = make_tokenizer()
    engine = Engine(
        scheduler,
        runner,
        lookahead=resolved.lookahead,
        eos_token_ids=(EOS_ID,),
        constraints=GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS_ID,)),
    )
    return BuiltEngine(NAME, engine, runner, tokenizer, None, resolved)  # type: ignore[arg-type]


if __name__ == "__main__":
    from jaxoverlap.cli.main import main

    jaxoverlap.llm.build_engine = build_engine
    main()
