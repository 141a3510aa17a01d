import pytest

from jaxoverlap.observe.histogram import Histogram, quantile


def test_values_are_counted_up_to_each_bound_inclusive_and_those_above_all_of_them_too():
    histogram = Histogram([0.1, 1.0, 10.0])
    for value in (0.05, 0.1, 0.5, 1.0, 99.0):
        histogram.add(value)
    assert histogram.read() == {"bounds": [0.1, 1.0, 10.0], "counts": [2, 4, 4, 5], "sum": 100.65}


def test_many_at_once_are_as_one_by_one():
    values = [0.0, 0.25, 0.5, 0.75, 4.0, 0.5]
    one_by_one, at_once = Histogram([0.25, 0.5]), Histogram([0.25, 0.5])
    for value in values:
        one_by_one.add(value)
    at_once.add_all(values[:2])
    at_once.add_all(values[2:])
    assert one_by_one.read() == at_once.read()


def test_quantiles_are_of_what_came_between_two_readings():
    histogram = Histogram([1.0, 2.0, 4.0])
    histogram.add_all([0.5] * 100)
    before = histogram.read()
    assert quantile(before, before, 0.5) is None
    histogram.add_all([1.5] * 50 + [3.0] * 50)
    after = histogram.read()
    assert quantile(before, after, 0.25) == 1.5
    assert quantile(before, after, 0.5) == 2.0
    assert quantile(before, after, 0.75) == 3.0
    histogram.add(99.0)
    assert quantile(after, histogram.read(), 0.5) == 4.0


@pytest.mark.parametrize("values", [[], [1.5] * 3, [1.5] * 120])
def test_counts_that_went_back_are_of_a_fresh_start(values):
    before, after = Histogram([1.0, 2.0, 4.0]), Histogram([1.0, 2.0, 4.0])
    before.add_all([0.5] * 100)
    after.add_all(values)
    assert quantile(before.read(), after.read(), 1.0) == (2.0 if values else None)
