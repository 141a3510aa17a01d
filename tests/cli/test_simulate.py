from __future__ import annotations

import json


def test_the_three_schedules_are_compared(cli):
    args = ["simulate", "--rows", 4, "--requests", 8, "--output-len", 16, "--host-ms", 5]
    found = json.loads(cli(*args, "--json").stdout)
    shown = [(row["schedule"], row["lookahead"]) for row in found]
    assert shown == [("serial", 0), ("timeslice", 0), ("overlap", 1), ("overlap", 2), ("overlap", 4)]
    assert found[2]["tokens/s"] > 1.5 * found[0]["tokens/s"]
    assert "tokens/s" in cli(*args, "--rate", 100, "--lookahead", 3).stdout


def test_times_and_rates_that_can_not_be(cli):
    assert cli("simulate", "--rate", 0).exit_code == cli("simulate", "--device-ms", -1).exit_code == 2
