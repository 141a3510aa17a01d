from jaxoverlap.observe.histogram import Histogram


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
