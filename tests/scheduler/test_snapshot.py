"""The map of the memory: it adds up at any moment, names every owner, and can be drawn."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import pytest

from jaxoverlap.scheduler.snapshot import MemorySnapshot, PageOwner
from tests.harness import Harness

SVG = "{http://www.w3.org/2000/svg}"
PREFIX = [(5 * i) % 83 for i in range(100)]


def check(harness: Harness) -> MemorySnapshot:
    """The sums, and each page against the page tables."""
    snapshot = harness.scheduler.memory_snapshot()
    memory, rows = harness.scheduler.state.memory, harness.scheduler.state.rows
    kinds = Counter(page.owner for page in snapshot.pages)
    assert [page.page for page in snapshot.pages] == list(range(memory.pool.num_pages))
    assert (kinds["free"], kinds["row"]) == (snapshot.free, snapshot.own)
    assert kinds["cache"] == snapshot.locked + snapshot.evictable
    assert snapshot.free + snapshot.own + snapshot.locked + snapshot.evictable == len(snapshot.pages)
    assert 0 <= snapshot.promised <= snapshot.free + snapshot.evictable
    for page in snapshot.pages:
        readers = [row for row in range(rows.num_rows) if page.page in memory.page_table[row]]
        assert page.readers == len(readers)
        if page.owner == "row":
            (row,) = readers
            assert (page.request_id, page.page) == (rows.request_ids[row], memory.page_table[row, page.index])
        elif page.owner == "free":
            assert (page.request_id, page.index, readers) == (None, None, [])
        else:
            assert all(memory.page_table[row, page.index] == page.page for row in readers)
            assert page.request_id is None
            assert not readers or page.last_used is None
    return snapshot


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"prefix_cache": False, "window": 20}])
def test_the_pages_add_up_after_every_turn(lookahead, settings):
    harness = Harness(num_pages=30, lookahead=lookahead, settings={"headroom": 8} | settings)
    check(harness)
    for i in range(6):
        harness.submit([*PREFIX[: 10 * i], i], max_tokens=40 + i, ignore_eos=True)
    while harness.engine.has_work:
        harness.turn()
        check(harness)
    last = check(harness)
    assert last.own == last.locked == last.promised == 0


def test_shared_pages_belong_to_the_cache_and_count_their_readers():
    harness = Harness(num_pages=32, lookahead=0, max_batched_tokens=200)
    harness.submit(PREFIX[:33], max_tokens=1)
    harness.run()
    assert (check(harness).evictable, check(harness).free) == (2, 30)
    for i in range(3):
        harness.submit([*PREFIX[:32], i], max_tokens=9, ignore_eos=True)
    harness.turn()
    snapshot = check(harness)
    assert (snapshot.locked, snapshot.own, snapshot.evictable) == (2, 3, 0)
    assert sorted(page.readers for page in snapshot.pages if page.owner == "cache") == [3, 3]
    assert sorted(page.request_id for page in snapshot.pages if page.owner == "row") == [1, 2, 3]
    assert {page.index for page in snapshot.pages if page.owner == "row"} == {2}
    harness.run()


def test_the_least_recently_used_page_has_the_lowest_count():
    harness = Harness(lookahead=0)
    for first in (1, 2, 1):
        harness.submit([first] * 20, max_tokens=1)
        harness.run()
    cached = [page for page in check(harness).pages if page.owner == "cache"]
    assert len(cached) == 2
    lowest = min(cached, key=lambda page: page.last_used)
    assert harness.scheduler.state.memory.cache.take_evicted(1).tolist() == [lowest.page]


def test_it_can_be_written_as_json():
    harness = Harness(num_pages=8)
    harness.submit([1] * 20, max_tokens=9, ignore_eos=True)
    harness.turn()
    snapshot = check(harness)
    data = json.loads(json.dumps(snapshot.to_dict()))
    assert (data["page_size"], data["own"], len(data["pages"])) == (16, 2, 8)
    assert sorted(page["request_id"] for page in data["pages"] if page["owner"] == "row") == [0, 0]
    harness.run()


@pytest.mark.parametrize("num_pages", [1, 63, 64, 65, 200])
def test_the_picture_has_a_cell_to_a_page_and_names_its_owner(num_pages):
    harness = Harness(num_pages=num_pages, lookahead=0, max_batched_tokens=200)
    harness.submit([1] * min(16, num_pages * 16 - 8), max_tokens=1)
    harness.run()
    harness.submit([1] * min(20, num_pages * 16 - 8), max_tokens=9, ignore_eos=True)
    harness.turn()
    snapshot = check(harness)
    svg = ElementTree.fromstring(snapshot.to_svg())
    assert svg.tag == f"{SVG}svg"
    _, _, width, height = (float(number) for number in svg.attrib["viewBox"].split())
    cells = svg.findall(f"{SVG}rect")
    corners = {(float(cell.attrib["x"]), float(cell.attrib["y"])) for cell in cells}
    assert len(cells) == len(corners) == num_pages
    assert all(0 <= x < width and 0 <= y < height - 20 for x, y in corners)
    titles = [cell.find(f"{SVG}title").text for cell in cells]
    for page, title in zip(snapshot.pages, titles, strict=True):
        assert title.startswith(f"page {page.page}: ")
        assert {"free": "free", "row": "request 1, page", "cache": "cached, 1 readers"}[page.owner] in title
    legend = svg.find(f"{SVG}text").text
    assert f"{num_pages} pages of 16 tokens" in legend and f"{snapshot.free} free" in legend
    harness.run()


def test_requests_differ_by_hue_and_free_pages_are_grey():
    harness = Harness(num_pages=20, lookahead=0, max_batched_tokens=200)
    for i in range(3):
        harness.submit([i] * 20, max_tokens=9, ignore_eos=True)
    harness.turn()
    snapshot = check(harness)
    cells = ElementTree.fromstring(snapshot.to_svg()).findall(f"{SVG}rect")
    colour = {}
    for page, cell in zip(snapshot.pages, cells, strict=True):
        colour.setdefault((page.owner, page.request_id), set()).add(cell.attrib["fill"])
    assert all(len(fills) == 1 for fills in colour.values())
    assert len({next(iter(fills)) for fills in colour.values()}) == len(colour) == 5
    harness.run()


def test_a_servers_ids_are_text_and_of_callers_who_left_there_are_none():
    owners = [PageOwner(0, "row", "chat-1", 0, 1), PageOwner(1, "row", None, 0, 1), PageOwner(2, "row", "chat-2", 0, 1)]
    snapshot = MemorySnapshot(16, tuple(owners), free=0, own=3, locked=0, evictable=0, promised=0)
    cells = ElementTree.fromstring(snapshot.to_svg()).findall(f"{SVG}rect")
    assert len({cell.attrib["fill"] for cell in cells}) == 3
    titles = [cell.find(f"{SVG}title").text for cell in cells]
    assert "request chat-1, page 0" in titles[0] and "a request that has left, page 0" in titles[1]
