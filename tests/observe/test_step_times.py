from __future__ import annotations

import pytest

from jaxoverlap.observe.step_times import StepTimes


@pytest.mark.parametrize(
    ("in_flight", "wait", "rows", "exposed"),
    [
        (1, 0.01, 4, 0.0),  # the device was still busy when the host was done
        (1, 0.0, 4, 0.006),  # it was done before, nobody knows when
        (0, 0.01, 4, 0.006),  # it had nothing while the host prepared this step
        (1, 0.0, 0, 0.0),  # nothing was left to be prepared
    ],
)
def test_host_time_is_exposed_unless_the_device_was_seen_busy_all_the_while(in_flight, wait, rows, exposed):
    times = StepTimes(0.001, 0.002, wait, 0.003, launched_rows=rows, launched_tokens=rows, in_flight=in_flight)
    assert times.exposed == pytest.approx(exposed)
