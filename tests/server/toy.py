"""The server on the toy device: everything is real but the model. `python -m tests.server.toy serve …`.

Each of the 97 tokens is a character. A model's name says what goes wrong with it: see `build_engine`. Environment:
TOY_STEP_SECONDS slows the device down.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import ModelError
from jaxoverlap.scheduler.plan import StepPlan
from tests.fakes import VOCAB_SIZE, ToyRunner, count_steps
from tests.toy_tokenizer import EOS_ID, TEMPLATE, make_tokenizer

NAME, CONTEXT = "toy", 1024
BUILDER = "tests.server.toy:build_engine"
TOKENIZER = make_tokenizer()
BREAKS, BLOCKS = "{the device breaks}", "{the device blocks}"


class Device(ToyRunner):
    """A device that can be held, and that prompts can harm.

    Attributes:
      is_held: somebody waits for a step that is not allowed to end.
      launches: by request id, prefill steps included.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_held = False
        self.launches: dict[int, int] = {}
        self._allowed: int | None = None
        self._changed = threading.Condition()

    def allow(self, steps: int | None) -> None:
        """Lets so many more steps end; None is all, 0 holds the device."""
        with self._changed:
            self._allowed = None if steps is None else (self._allowed or 0) + steps
            self.is_held = False
            self._changed.notify_all()

    def launch(self, plan: StepPlan) -> Any:
        for chunk in plan.chunks:
            text = TOKENIZER.decode(chunk.request.prompt_ids.tolist()) if chunk.start == 0 else ""
            if BREAKS in text:
                raise RuntimeError("out of toys")
            if BLOCKS in text:
                time.sleep(float(os.environ.get("TOY_BLOCK_SECONDS", "3600")))
        count_steps(self.launches, plan.request_ids)
        return super().launch(plan)

    def finish(self, step: Any) -> Any:
        with self._changed:
            while self._allowed == 0:
                self.is_held = True
                self._changed.wait()
            self.is_held = False
            if self._allowed is not None:
                self._allowed -= 1
        return super().finish(step)

    def release(self) -> None: ...


BUILT: list[SimpleNamespace] = []
"""In this process, the newest last."""


def build_engine(config: EngineConfig, progress: Any = None) -> SimpleNamespace:
    """Models: "missing" can't be loaded, "crashing" fails otherwise, "slow" compiles for an hour."""
    if config.model == "missing":
        raise ModelError("missing: no such file or folder")
    if config.model == "crashing":
        raise RuntimeError("no driver")
    if config.model == "slow":
        time.sleep(3600)
    resolved = config.resolve(
        platform="cpu", vocab_size=VOCAB_SIZE, model_len=CONTEXT, page_bytes=1, kv_memory_bytes=1 << 12
    )
    scheduler = resolved.scheduler
    step_seconds = float(os.environ.get("TOY_STEP_SECONDS", "0"))
    runner = Device(scheduler.limits, scheduler.max_running, step_seconds=step_seconds, salted=True)
    engine = Engine(scheduler, runner, lookahead=resolved.lookahead, eos_token_ids=(EOS_ID,))
    built = SimpleNamespace(  # a BuiltEngine, without JAX
        name=NAME,
        engine=engine,
        runner=runner,
        resolved=resolved,
        sampling_defaults={},
        tokenizer_source=tokenizer_folder(),
        architecture="toy",
        dtype="uint64",
        kv_cache_dtype="int8",
        devices=("toy",),
    )
    BUILT.append(built)
    return built


def tokenizer_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"jaxoverlap-toy-tokenizer-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder


if __name__ == "__main__":
    from jaxoverlap.cli import main, serve

    serve.BUILDER = BUILDER
    main.main()
