"""The page of a trace: the data in it, and in a headless Chromium, where there is one, what it shows and does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from jaxoverlap.observe.chrome_trace import About, to_chrome
from jaxoverlap.observe.trace_page import to_page
from tests.engine.test_timeline import traced
from tests.harness import Harness

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def trace() -> dict:
    harness = Harness(lookahead=0, step_seconds=0.002, check_every=None)
    return to_chrome(traced(harness), About("</script><b>toy</b>", "cpu", "serial", 0))


def test_the_page_has_all_that_is_in_the_trace_and_needs_nothing_else(trace):
    page = to_page(trace)
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])
    for lane in ("host", "device", "exposed"):
        events = [event for event in trace["traceEvents"] if event.get("cat") == lane]
        assert len(data[lane]) == len(events) > 0
        assert sorted(span["ts"] for span in data[lane]) == [span["ts"] for span in data[lane]]
    assert ["model", "</script><b>toy</b>"] in data["facts"] and "hidden share" in dict(data["facts"])
    assert data["start"] < data["end"] and "http" not in page.replace("http-equiv", "")


def test_other_traces_are_refused():
    with pytest.raises(ValueError, match="no lanes of a host and a device"):
        to_page({"traceEvents": [{"ph": "X", "cat": "other", "name": "a", "ts": 0, "dur": 1}]})


SCRIPT = """
<script>
window.addEventListener("error", event => { document.body.dataset.error = event.message; });
const rect = canvas.getBoundingClientRect(), said = {};
const pen = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
const pixel = (x, y) => [...pen.getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3).join();
const span = data.device[3], scale = (canvas.clientWidth - LEFT) / (view.end - view.start);
const x = LEFT + (span.ts + span.dur / 2 - view.start) * scale;
const move = (x, y) => canvas.dispatchEvent(
  new PointerEvent("pointermove", { clientX: rect.left + x, clientY: rect.top + y }));
move(x, lanes[1].top + 10);
said.tip = tip.textContent; said.shown = tip.style.display;
said.device = pixel(x, lanes[1].top + 40);
move(2, 2); said.hidden = tip.style.display;
const whole = view.end - view.start;
canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -100, clientX: rect.left + x, cancelable: true }));
said.zoomed = (view.end - view.start) / whole; said.inside = view.start <= span.ts && span.ts < view.end;
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
said.back = (view.end - view.start) / whole;
const red = data.exposed[2]; show(red.ts, red.dur);
said.exposed = pixel(LEFT + 100, lanes[0].top + lanes[0].height - 3);
said.host = pixel(LEFT + 100, lanes[0].top + 2);
document.body.dataset.said = JSON.stringify(said);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_draws_zooms_and_tells(trace, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(to_page(trace).replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,500",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-error" not in dom
    assert f'data-drawn="{len([e for e in trace["traceEvents"] if e.get("cat") == "device"])}"' in dom
    said = json.loads(re.search(r'data-said="(.*?)"', dom)[1].replace("&quot;", '"'))
    assert re.match(r"(prefill|decode|mixed) 3 · .*requests: 0,1", said["tip"], re.DOTALL) and said["shown"] == "block"
    assert said["hidden"] == "none" and said["inside"]
    assert said["zoomed"] == pytest.approx(0.8) and said["back"] == pytest.approx(1.0)
    assert said["exposed"] == "228,87,86" != said["host"] and said["device"] != "0,0,0"
    assert "<b>hidden share" not in dom and "hidden share <b>" in dom and "</script><b>toy" not in dom
