"""Tilings: the formula, tables that overrule it, and the search that writes them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pallas_kernels import autotune, shapes, tuning
from pallas_kernels.aot import TARGETS
from pallas_kernels.tuning import Problem, Tiling
from tests.kernels import dense
from tests.kernels.cases import assert_rows_close, make
from tests.kernels.test_triton import decode

DECODE = Problem("decode_attention", 3, 3, 64, "bfloat16", "int8", 16, 8, 2048)
EXTEND = replace(DECODE, kernel="extend_attention", rows=1)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    tuning.table.cache_clear()
    yield tmp_path / "tuned"
    tuning.table.cache_clear()


@pytest.mark.parametrize("problem", [DECODE, EXTEND], ids=lambda problem: problem.kernel)
def test_the_formula_comes_first_and_then_what_differs_least(problem):
    own, *others = found = autotune.candidates(problem)
    assert own == tuning.formula(problem) and len(set(found)) == len(found)
    changes = [sum(a != b for a, b in zip(vars(own).values(), vars(other).values(), strict=True)) for other in others]
    assert changes == sorted(changes) and set(changes) == {1, 2}
    assert all((other.splits == 1) == (problem is EXTEND) for other in found)


def test_the_fastest_wins_or_the_first_where_nothing_is_timed():
    tilings = autotune.candidates(DECODE)[:3]
    trials = [autotune.Trial(tiling, None, seconds) for tiling, seconds in zip(tilings, (3.0, 1.0, 2.0), strict=True)]
    assert autotune.best(trials) == trials[1]
    spills = autotune.Trial(tilings[0], "spills 8 bytes")
    untimed = [spills, *(autotune.Trial(tiling, None) for tiling in tilings[1:])]
    assert autotune.best(untimed) == untimed[1]
    assert autotune.best([spills]) is None


def test_a_table_overrules_the_formula_for_its_gpu_and_nothing_else(tables, monkeypatch):
    found = Tiling(16, 16, 2, 4, 2)
    path = tuning.write_table("NVIDIA H200", {DECODE.key: found}, "compiled")
    assert path == tables / "NVIDIA-H200.json" and json.loads(path.read_text())["device"] == "NVIDIA H200"
    tuning.write_table("NVIDIA H200", {EXTEND.key: found}, "compiled")  # adds to it
    assert set(tuning.table("NVIDIA H200")) == {DECODE.key, EXTEND.key}
    monkeypatch.setattr(tuning, "device_name", lambda: "NVIDIA H200")
    assert tuning.tiling(replace(DECODE, rows=7, longest=1500)) == found  # rounded up to the same powers of two
    assert tuning.tiling(replace(DECODE, rows=9)) == tuning.formula(replace(DECODE, rows=9))
    monkeypatch.setattr(tuning, "device_name", lambda: "NVIDIA L4")
    assert tuning.tiling(DECODE) == tuning.formula(DECODE)


def test_a_kernel_takes_what_the_table_says_and_is_right(tables, monkeypatch):
    case = make(shapes.Heads("small", 2, 1, 16), (300, 0, 70))
    q = case.queries(3)
    problem = Problem("decode_attention", 2, 1, 16, "float32", "float32", 16, 3, case.page_table.shape[1] * 16)
    tuning.write_table("cpu", {problem.key: Tiling(32, 32, 3, 4, 2)}, "by hand")
    asked = []
    right = tuning.tiling
    monkeypatch.setattr(
        "pallas_kernels.triton.decode.tiling", lambda problem: asked.append(right(problem)) or asked[-1]
    )
    assert_rows_close(decode(case, q), dense.decode_attention(case, q))
    assert asked == [Tiling(32, 32, 3, 4, 2)]


@pytest.mark.parametrize("entry", [{"block": 64}, {**vars(tuning.formula(DECODE)), "splits": 0}])
def test_a_file_that_is_no_table_is_named(tables, entry):
    path = tuning.write_table("odd", {}, "by hand")
    path.write_text(json.dumps({"tilings": {"some": entry}}))
    tuning.table.cache_clear()
    with pytest.raises(ValueError, match=r"odd.json: 'some' is .*allowed are positive integers"):
        tuning.table("odd")


def test_the_compiler_takes_the_formula_and_refuses_what_spills_or_needs_too_much_memory():
    pytest.importorskip("jax_cuda13_plugin", reason="XLA's compiler for NVIDIA GPUs is not installed")
    own = tuning.formula(EXTEND)
    assert autotune.why_not(EXTEND, own, TARGETS["h200"]) is None
    wide = replace(EXTEND, dim=128, dtype="float32", pool_dtype="float32")
    assert "Shared memory" in (autotune.why_not(wide, Tiling(128, 128, 1, 4, 3), TARGETS["h200"]) or "")
    assert "spills" in (autotune.why_not(wide, Tiling(64, 64, 1, 4, 2), TARGETS["h200"]) or "")
