from __future__ import annotations

import json

from tests.simulation.test_measured_speeds import trace


def test_the_three_schedules_are_compared(cli):
    args = ["simulate", "--rows", 4, "--requests", 8, "--output-len", 16, "--host-ms", 5]
    found = json.loads(cli(*args, "--json").stdout)
    shown = [(row["schedule"], row["lookahead"]) for row in found]
    assert shown == [("serial", 0), ("timeslice", 0), ("overlap", 1), ("overlap", 2), ("overlap", 4)]
    assert found[2]["tokens/s"] > 1.5 * found[0]["tokens/s"]
    assert "tokens/s" in cli(*args, "--rate", 100, "--lookahead", 3).stdout


def test_times_and_rates_that_can_not_be(cli):
    assert cli("simulate", "--rate", 0).exit_code == cli("simulate", "--device-ms", -1).exit_code == 2
    for value in (-1, "nan", "inf"):
        result = cli("simulate", "--host-us-per-row", value)
        assert result.exit_code == 2 and "--host-us-per-row" in result.stderr


def test_a_host_and_a_device_that_take_no_time(cli):
    nothing = [f"--{name}=0" for name in ("device-ms", "device-us-per-row", "device-us-per-prompt-token", "host-ms")]
    result = cli("simulate", "--requests", 3, "--output-len", 3, *nothing, "--host-us-per-row", 0, "--json")
    assert {(row["tokens/s"], row["device busy"]) for row in json.loads(result.stdout)} == {(0.0, 0.0)}


def test_speeds_are_taken_from_a_trace(cli, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(50)))
    result = cli("simulate", "--requests", 4, "--measured", path, "--host-ms", 0)
    assert result.exit_code == 0 and "measured: --device-ms 4 --device-us-per-row 200 " in result.stderr
    assert "warning" not in result.stderr
    path.write_text("{}")
    assert "no traceEvents" in cli("simulate", "--measured", path).stderr
    assert "No such file" in cli("simulate", "--measured", tmp_path / "none").stderr


def test_a_traces_platform_is_the_simulations(cli, tmp_path):
    path = tmp_path / "trace.json"
    shapes = {"prefill 128": 5e-3, "decode 1": 3e-3, "prefill 64 + decode 1": 4e-3}  # no GPU decodes a single row
    args = ["simulate", "--rows", 1, "--requests", 4, "--output-len", 4, "--measured", path, "--json"]

    def busy(*more) -> tuple[str, list]:
        result = cli(*args, *more)
        assert result.exit_code == 0
        return result.stderr, [row["device busy"] for row in json.loads(result.stdout)]

    path.write_text(json.dumps(trace(50, shapes) | {"otherData": {"platform": "cpu"}}))
    found, (said, on_gpu) = busy(), busy("--platform", "gpu")
    assert found == busy("--platform", "cpu") and "warning" not in found[0]
    assert found[1] != on_gpu and "warning: most steps are not among those" in said
    assert "(serial 0: 4 of 16; timeslice 0: 4 of 16; " in said and "--platform is gpu, and --rows 1" in said
    other = tmp_path / "other.json"
    other.write_text(json.dumps(trace(50) | {"otherData": {"platform": "gpu"}}))
    assert "the traces are of different platforms: cpu, gpu" in cli(*args, "--measured", other).stderr


def test_sizes_that_can_not_be_are_refused_by_the_options_name(cli):
    for option in ("--rows", "--lookahead", "--prompt-len", "--output-len", "--requests"):
        result = cli("simulate", option, -1)
        assert result.exit_code == 2 and f"error: Invalid value for '{option}'" in result.stderr
    assert "'--rows': Input should be greater than or equal to 1" in cli("simulate", "--rows", 0).stderr
