"""The load generator's own sums."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics

import pytest

from benchmarks.load import Outcome, Work, arrivals, lengths, make_work, summary


def test_arrivals_have_their_rate_in_bursts_or_alone():
    for burst in (1, 8):
        moments = arrivals(8000, rate=50.0, burst=burst)
        assert moments == sorted(moments) and moments[-1] == pytest.approx(160, rel=0.1)
        assert len(set(moments)) == 8000 / burst
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals(8000, 50.0, 1))]
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)  # Poisson's
    assert arrivals(3, math.inf, 1) == [0, 0, 0]


def test_lengths_are_drawn_as_described():
    rng = random.Random(1)
    assert lengths("64")(rng) == 64
    assert {lengths("uniform:3,5")(rng) for _ in range(100)} == {3, 4, 5}
    drawn = [lengths("lognormal:100,0.5")(rng) for _ in range(2000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1) and statistics.fmean(drawn) > 105
    for wrong in ("normal:3,4", "uniform:3", "many"):
        with pytest.raises(ValueError, match="lognormal:MEDIAN,SIGMA"):
            lengths(wrong)


def test_a_traces_lengths_are_taken_in_turn_and_cut_to_the_context(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([[5, 7], [100, 100]]))
    work = make_work(3, "1", "1", file, most=64)
    assert [(len(one.prompt), one.output_len) for one in work] == [(5, 7), (63, 1), (5, 7)]


def test_goodput_counts_whole_answers_within_both_targets():
    def outcome(first: float, gap: float, **changes) -> Outcome:
        pieces = [(first, 1), (first + gap, 1), (first + 2 * gap, 2)]
        return Outcome(Work((1,), 4), pieces, token_ids=[1, 2, 3, 4], **changes)

    outcomes = [outcome(0.1, 0.03), outcome(0.9, 0.03), outcome(0.1, 0.3), outcome(0.1, 0.03, error="no")]
    row = summary(outcomes, seconds=2.0, first_target=0.5, token_target=0.05)
    assert (row["failed"], row["req/s"], row["tok/s"], row["goodput"]) == (1, 1.5, 6.0, 0.5)
    assert row["TTFT p50"] == pytest.approx(100) and row["ITL p99"] == pytest.approx(300)
