"""What holds for all tests: what is left out without torch, one compilation cache, how Ctrl-C comes through."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import hypothesis

# How long anything takes says nothing on a machine that others use as well.
hypothesis.settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared machine")

# Many tests build the same steps of the same tiny models; and those of the embedded one take minutes to compile. With a
# bound JAX locks its cache, so that processes side by side see no half-written entry.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxoverlap" / "tests"
for _name, _value in {
    "JAX_COMPILATION_CACHE_DIR": _CACHE,
    "JAX_COMPILATION_CACHE_MAX_SIZE": 4 << 30,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.2,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
}.items():
    os.environ.setdefault(_name, str(_value))

# On Pythons that have no CPU build of torch (see pyproject.toml), the tests against torch are left out.

collect_ignore = (
    []
    if find_spec("torch")
    else [
        "model/test_decoder.py",
        "model/test_files.py",
        "model/test_loading.py",
        "model/test_real_model.py",
        "text/test_chat_template.py",
        "text/test_detokenizer.py",
        "text/test_tokenizer.py",
    ]
)

# A job in a shell's background ignores Ctrl-C, and so would every process that the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
