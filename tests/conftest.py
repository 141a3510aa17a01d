"""On Pythons that have no CPU build of torch (see pyproject.toml), the tests against torch are left out."""

import signal
from importlib.util import find_spec

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
