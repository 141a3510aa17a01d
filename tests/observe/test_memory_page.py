"""The map of the memory: from a running engine, and in a headless Chromium, where there is one."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from jaxoverlap.observe.memory_page import facts, to_page
from tests.harness import Harness
from tests.observe.test_trace_page import BROWSER


@pytest.fixture(scope="module")
def snapshots() -> list[tuple[float, dict]]:
    harness = Harness(page_size=4, num_pages=40)
    taken = []
    prompt = list(range(1, 14))
    harness.submit(prompt, max_tokens=4, ignore_eos=True)
    harness.run()
    for _ in range(3):
        harness.submit(prompt, max_tokens=12, ignore_eos=True)
    while harness.engine.has_work:
        harness.turn()
        taken.append((float(len(taken)), harness.scheduler.memory_snapshot().to_dict()))
    return taken


def test_facts_add_up_and_sharing_is_counted(snapshots):
    for _, snapshot in snapshots:
        found = facts(snapshot)
        parts = [int(found[name]) for name in ("of single requests", "cached and read", "cached", "free")]
        assert sum(parts) == int(found["pages"]) == 40
    assert max(int(facts(snapshot)["saved by sharing"]) for _, snapshot in snapshots) == 6  # 3 pages, read by 3 rows


SCRIPT = """
<script>
window.addEventListener("error", event => { document.body.dataset.error = event.message; });
const rect = map.getBoundingClientRect(), id = shown.pages.findIndex(page => page.owner === "row");
map.dispatchEvent(new PointerEvent("pointermove",
  { clientX: rect.left + id % columns * CELL + 2, clientY: rect.top + Math.floor(id / columns) * CELL + 2 }));
document.body.dataset.tip = tip.textContent;
moment.value = moment.max; moment.dispatchEvent(new Event("input"));
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_shows_each_moment(snapshots, tmp_path):
    page = tmp_path / "map.html"
    page.write_text(to_page(snapshots).replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-error" not in dom and f'data-shown="{len(snapshots) - 1}"' in dom
    assert re.search(r'data-tip="page \d+: request \d+, page \d+ of its sequence"', dom)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text())[1])
    assert len(data["moments"]) == len(snapshots) and data["num_pages"] == 40
