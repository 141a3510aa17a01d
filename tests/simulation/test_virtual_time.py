"""Virtual time comes to what can be computed by hand."""

from __future__ import annotations

import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.simulation.virtual_time import Arrival, Prediction, Speeds, simulate


def decode(lookahead: int, *, device: float, host: float, rows: int = 4, steps: int = 100) -> Prediction:
    """All at once: a prefill step, then decode steps."""
    config = EngineConfig(schedule="overlap", lookahead=lookahead, max_running=rows)
    speeds = Speeds(step=device, host_step=host, after=0.25)
    return simulate(config, speeds, [Arrival(0.0, 4, steps)] * rows)


@pytest.mark.parametrize(("device", "host"), [(0.01, 0.002), (0.002, 0.01), (0.005, 0.005)])
def test_a_serial_step_takes_the_sum_and_an_overlapped_one_the_larger(device, host):
    serial, overlapped = decode(0, device=device, host=host), decode(1, device=device, host=host)
    assert serial.steps == overlapped.steps == 100 and serial.tokens == overlapped.tokens == 400
    assert serial.seconds == pytest.approx(100 * (device + host))
    # What comes before the first step's launch and after the last one's end can't hide.
    assert overlapped.seconds == pytest.approx(100 * max(device, host), rel=0.02, abs=device + host)
    assert overlapped.seconds >= 100 * max(device, host) * (1 - 1e-9)
    assert serial.busy == overlapped.busy == pytest.approx(100 * device)
    assert serial.host == pytest.approx(100 * host) and (serial.overlapped, overlapped.overlapped) == (0, 99)


def test_lookahead_beyond_one_gains_nothing_where_times_do_not_vary():
    assert decode(4, device=0.01, host=0.004).seconds == pytest.approx(
        decode(1, device=0.01, host=0.004).seconds, rel=0.02
    )


def test_a_device_is_paid_for_rows_prompts_and_what_they_read():
    speeds = Speeds(step=1.0, row=0.1, prompt_token=0.01, kv_token=0.001)
    found = simulate(EngineConfig(schedule="serial", max_running=1), speeds, [Arrival(0.0, 10, 3)])
    prefill = 1.0 + 0.01 * 10 + 0.001 * 10
    assert found.seconds == pytest.approx(prefill + (1.0 + 0.1 + 0.011) + (1.0 + 0.1 + 0.012))
    assert found.first_token.tolist() == pytest.approx([prefill])
    assert found.gaps.tolist() == pytest.approx([(2.2 + 0.023) / 2])


def test_a_compiled_step_that_was_measured_takes_what_it_took_however_full_it_is():
    speeds = Speeds(step=1.0, prompt_token=0.01, kv_token=0.001, shapes={"prefill 16": 5.0, "decode 2": 3.0})
    found = simulate(EngineConfig(schedule="serial", max_running=2), speeds, [Arrival(0.0, 10, 2)], "cpu")
    assert found.seconds == pytest.approx(5.01 + 1.011), "decode 1 was not measured"
    found = simulate(EngineConfig(schedule="serial", max_running=2), speeds, [Arrival(0.0, 10, 2)] * 2, "cpu")
    assert found.seconds == pytest.approx(1.0 + 0.2 + 0.02 + 3.022), "nor was prefill 32"


def test_requests_come_when_they_come_and_wait_for_a_row():
    speeds = Speeds(step=1.0)
    arrivals = [Arrival(0.0, 1, 4), Arrival(1.5, 1, 1), Arrival(50.0, 1, 1)]
    found = simulate(EngineConfig(schedule="serial", max_running=1), speeds, arrivals)
    assert found.first_token.tolist() == pytest.approx([1.0, 3.5, 1.0])
    assert found.seconds == pytest.approx(51.0) and found.busy == pytest.approx(6.0)


def test_an_engine_may_have_room_for_longer_requests_than_come():
    config = EngineConfig(schedule="serial", max_running=1, max_model_len=512)
    assert simulate(config, Speeds(step=1.0), [Arrival(0.0, 4, 4)]).seconds == pytest.approx(4.0)
