"""What a shell sees: quick help, exit codes, pipes that close, Ctrl-C. Processes of their own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest

from jaxoverlap import __version__
from jaxoverlap.cli.options import EngineOptions
from jaxoverlap.cli.request_options import ChatOptions, SamplingOptions, StructureOptions, TreatmentOptions
from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from tests.cli.conftest import ROOT, read_answers, write_lines
from tests.cli.test_batch import item, without_ids


def slow(step_seconds: float) -> dict[str, str]:
    return {"TOY_STEP_SECONDS": str(step_seconds)}


def names_of(kind) -> list[str]:
    return [field.name for field in fields(kind)]


def test_options_are_those_of_the_engine_and_of_requests():
    assert names_of(EngineOptions) == names_of(EngineConfig)
    names = set(names_of(SamplingOptions)) - {"keep_special_tokens"} | {"skip_special_tokens", "structured_output"}
    assert names == set(names_of(SamplingParams))
    assert names_of(StructureOptions) == names_of(StructuredOutput)
    assert names_of(TreatmentOptions) == names_of(RequestOptions)
    own = {"chat", "system", "answer_start", "no_generation_prompt"}
    told = set(names_of(ChatPrompt)) - {"messages", "add_generation_prompt", "continue_final_message"}
    assert set(names_of(ChatOptions)) == own | told


def test_options_that_are_zero_or_false_are_given():
    assert EngineOptions(lookahead=0).settings(lookahead=1) == {"lookahead": 0}
    # A command's own default is left out where it would have no effect; what the user says is not.
    assert EngineOptions(schedule="serial").settings(max_mixed_tokens=9) == {"schedule": "serial"}
    assert EngineOptions(max_mixed_tokens=9, mixed_steps=False).settings() == {
        "max_mixed_tokens": 9,
        "mixed_steps": False,
    }
    values = SamplingOptions(temperature=0.0, seed=0, keep_special_tokens=True, stop_token_ids=[]).values(seed=5)
    assert values == {"temperature": 0.0, "seed": 0, "skip_special_tokens": False}


def test_structure_is_read_from_texts_and_files(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text('{"type": "object"}'), grammar.write_text('start: "a"')
    assert StructureOptions().values() == {}
    for options, expected in (
        ({"json_schema": str(schema)}, {"json_schema": {"type": "object"}}),
        ({"json_schema": ' {"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"any_json": True}, {"any_json": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": str(grammar)}, {"grammar": 'start: "a"'}),
        ({"grammar": 'start: "b"'}, {"grammar": 'start: "b"'}),
        ({"json_schema": " true"}, {"json_schema": True}),
        ({"choices": ["a", "b"]}, {"choices": ["a", "b"]}),
    ):
        assert StructureOptions(**options).values() == {"structured_output": StructuredOutput(**expected)}
    for options, said in (
        (
            {"json_schema": "none.json"},
            "json_schema: 'none.json' is not allowed; use a file or the text itself",
        ),
        ({"grammar": "none.lark"}, "grammar: 'none.lark' is not allowed; use a file or the text itself: No such file"),
        ({"grammar": str(tmp_path)}, "grammar: .* use a file or the text itself: Is a directory"),
        ({"json_schema": "{"}, "json_schema: '{' is not allowed; it is not JSON"),
        ({"regex": "a", "any_json": True}, "use exactly one of"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            StructureOptions(**options).values()


def test_a_grammar_may_come_through_a_pipe():
    reader, writer = os.pipe()
    os.write(writer, b'start: "a"')
    os.close(writer)
    structure = StructureOptions(grammar=f"/dev/fd/{reader}").values()["structured_output"]
    os.close(reader)
    assert structure.grammar == 'start: "a"'


def test_version(cli):
    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"jaxoverlap {__version__}\n")


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_help_names_every_option(cli, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = cli(command, "--help")
    assert result.exit_code == 0
    groups = [EngineOptions, SamplingOptions, StructureOptions, TreatmentOptions]
    groups += [ChatOptions] if command == "generate" else []
    renamed = {"choices": "choice", "include_stop_str_in_output": "include_stop"}
    for name in (name for group in groups for name in names_of(group)):
        option = "--" + renamed.get(name, name).replace("_", "-").replace("token-ids", "token-id")
        [line] = [line for line in result.stdout.splitlines() if line.startswith(f"│ {option} ")]
        assert len(line.split()) > 6, "no help"


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["batch", "--help"],
        ["chat", "--help"],
        ["client", "batch", "--help"],
        ["--version"],
    ],
)
def test_help_loads_nothing_heavy(args):
    code = (
        "import sys, atexit; from jaxoverlap.cli.main import main; "
        "heavy = 'jax', 'flax', 'transformers', 'torch', 'grpc'; "
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules])); "
        f"sys.argv[1:] = {args}; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nope"], "No such option: --nope"),
        (["generate", "--nope"], "No such option: --nope"),
        (["batch"], "--input"),
        (["batch", "-i", "x"], "--output"),
        (["nope"], "No such command 'nope'"),
        (["generate", "x", "--temperature", "abc"], "'--temperature'"),
        (["generate", "x", "--stop"], "--stop"),
    ],
)
def test_usage_errors_are_one_line(cli, args, said):
    result = cli(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and said in result.stderr and result.stderr.count("\n") == 1
    assert result.stderr.endswith(" --help\n")


def test_no_arguments_show_the_help(cli):
    result = cli()
    assert result.exit_code == 2 and "generate" in result.output and "error" not in result.output


def test_no_prompt_on_a_terminal_is_a_usage_error(start):
    ours, terminal = pty.openpty()
    process = start("generate", stdin=terminal)
    stdout, stderr = process.communicate(timeout=60)
    os.close(terminal), os.close(ours)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.startswith(b"error: no prompt: ") and stderr.count(b"\n") == 1


def test_answers_stream(start):
    """The first piece is there long before the last."""
    process = start("generate", "Once", "--seed", "7", "--ignore-eos", "--max-tokens", "100", "-q", env=slow(0.03))
    first = process.stdout.read(1)
    begun = time.perf_counter()
    rest = process.stdout.read()
    assert len(first + rest) == 101 and time.perf_counter() - begun > 1.0


def test_head_has_read_enough(start):
    process = start("generate", "Once", "--seed", "7", "--ignore-eos", env=slow(0.01))
    assert process.stdout.read(3)
    process.stdout.close()
    process.stdout = None
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 141
    assert stderr.startswith(b"on a toy: ") and stderr.count(b"\n") == 1


@pytest.mark.parametrize("arguments", [["--version"], ["batch", "--help"], ["simulate", "--requests", "1"]])
def test_what_a_command_has_printed_leaves_it_or_it_says_so(start, arguments):
    """Also what waits in a buffer until the end."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*arguments, stdout=writer)
    os.close(writer)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (141, b"")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            process = start(*arguments, stdout=full)
            _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (2, b"error: No space left on device\n")


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize("gone", ["its reader", "its disk"])
def test_a_standard_error_that_takes_nothing_is_no_reason_to_end(start, tmp_path, command, gone):
    source = write_lines(tmp_path / "in", item("a"))
    args = ["generate", "Once"] if command == "generate" else ["batch", "-i", source, "-o", "-"]
    if gone == "its disk":
        if not os.path.exists("/dev/full"):
            pytest.skip("Linux only")
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    process = start(*args, stderr=writer)
    os.close(writer)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and stdout.endswith(b"\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_full_disk(start, tmp_path, command):
    source = write_lines(tmp_path / "in", item("a"))
    args = ["generate", "Once"] if command == "generate" else ["batch", "-i", source, "-o", "-"]
    with open("/dev/full", "wb") as full:
        process = start(*args, "-q", stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.endswith(b"No space left on device\n") and stderr.count(b"\n") == 1


def test_ctrl_c_while_generating(start):
    process = start("generate", "Once", "--seed", "7", "--ignore-eos", "-q", env=slow(0.05))
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_ctrl_c_while_starting(start, tmp_path, command):
    source = write_lines(tmp_path / "in", item("a"))
    args = ["generate", "Once"] if command == "generate" else ["batch", "-i", source, "-o", tmp_path / "out"]
    process = start(*args, "--model", "swallows")
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_batch_goes_on_after_any_end(start, tmp_path, how):
    items = [item(f"id {i}", max_tokens=20, ignore_eos=True) for i in range(60)]
    source, out = write_lines(tmp_path / "in", *items), tmp_path / "out"
    args = ["batch", "-i", source, "-o", out, "--max-running", "2"]
    process = start(*args, env=slow(0.01))
    while not out.exists() or out.read_bytes().count(b"\n") < 7:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        _, summary = stderr.decode().splitlines()
        assert summary.startswith("interrupted, the same command goes on from here: ")
    else:
        assert process.returncode == -how
    done = out.read_bytes().count(b"\n")
    assert 7 <= done < 60

    process = start(*args)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"finished: {60 - done} done, 0 failed, {done} skipped".encode() in stderr
    assert list(without_ids(out)) == [line["custom_id"] for line in items]


def test_a_batch_through_pipes(start, tmp_path):
    process = start("batch", "-i", "-", "-o", "-", "-q", stdin=subprocess.PIPE)
    lines = "".join(json.dumps(item(f"é{i}")) + "\n" for i in range(5))
    stdout, stderr = process.communicate(lines.encode(), timeout=60)
    assert (process.returncode, stderr) == (0, b"")
    (tmp_path / "out").write_bytes(stdout)
    assert [answer["custom_id"] for answer in read_answers(tmp_path / "out")] == [f"é{i}" for i in range(5)]


def test_answers_leave_a_batch_when_they_are_done(start, tmp_path):
    source = write_lines(tmp_path / "in", item("a"), item("b", max_tokens=100, ignore_eos=True))
    process = start("batch", "-i", source, "-o", "-", "-q", env=slow(0.03))
    assert b'"a"' in process.stdout.readline()
    begun = time.perf_counter()
    assert b'"b"' in process.stdout.read() and time.perf_counter() - begun > 1.0


def test_standard_streams_may_not_be_one_file(start, tmp_path):
    source = write_lines(tmp_path / "in", item("a"))
    before = source.read_bytes()
    with source.open("rb") as stdin, source.open("ab") as stdout:
        process = start("batch", "-i", "-", "-o", "-", stdin=stdin, stdout=stdout)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and b"same file" in stderr
    assert source.read_bytes() == before


def test_any_locale_will_do(start):
    """Text that the terminal can't show is replaced, not a traceback."""
    process = start("generate", "a", "b\u00e9", "--max-tokens", "3", "-q", env={"PYTHONIOENCODING": "ascii"})
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, b"")
    assert b"==> 2/2: b? <==" in stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("batch -i - -o OUT <&-", "error: standard input is closed"),
        ("batch -i IN -o - -q >&-", "error: standard output is closed"),
        ("generate hello -q >&-", "error: standard output is closed"),
        ("generate - -q <&-", "error: no prompt"),
        ("chat -q <&-", "error: standard input is closed"),
        ("chat -q >&-", "error: standard output is closed"),
    ],
)
def test_a_closed_stream_is_an_error_in_one_line(tmp_path, arguments, said):
    (tmp_path / "in").write_text("")
    arguments = arguments.replace("IN", str(tmp_path / "in")).replace("OUT", str(tmp_path / "out"))
    command = f"{sys.executable} -m tests.cli.toy {arguments}"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith(said) and run.stderr.count("\n") == 1


def test_what_is_said_on_a_closed_stream_goes_nowhere_else(tmp_path):
    line = json.dumps({"custom_id": "1", "body": {"prompt": "hi", "max_tokens": 3}})
    (tmp_path / "in").write_text(f"{line}\n")
    command = f"{sys.executable} -m tests.cli.toy batch -i {tmp_path}/in -o {tmp_path}/out 2>&-"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
    (answer,) = (tmp_path / "out").read_text().splitlines()
    assert json.loads(answer)["custom_id"] == "1"
