from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

from jaxoverlap.observe.logs import JsonFormatter, about


def line(message: str, *arguments, **options) -> dict:
    record = logging.getLogger("jaxoverlap.part").makeRecord(
        "jaxoverlap.part", logging.WARNING, "part.py", 1, message, arguments, options.pop("exc_info", None), **options
    )
    written = JsonFormatter("engine").format(record)
    assert "\n" not in written
    return json.loads(written)


def test_a_record_is_an_object_on_one_line():
    written = line("%d things\nare wrong", 3)
    assert datetime.fromisoformat(written.pop("time")).utcoffset().total_seconds() == 0
    assert written == {
        "level": "warning",
        "process": "engine",
        "logger": "jaxoverlap.part",
        "message": "3 things\nare wrong",
    }


def test_what_is_about_a_request_has_its_id_and_numbers():
    written = line("ended", extra=about("abc-0-7", output_tokens=12))
    assert (written["request_id"], written["output_tokens"]) == ("abc-0-7", 12)


def test_an_exception_is_part_of_its_line():
    try:
        raise ValueError("no")
    except ValueError:
        written = line("failed", exc_info=sys.exc_info())
    assert written["exception"].endswith("ValueError: no")
