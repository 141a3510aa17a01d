"""`generate` on the toy device."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.cli.generate import _fitting, in_order
from jaxoverlap.config import EngineConfig
from jaxoverlap.sampling_params import SamplingParams
from tests.cli import toy
from tests.fakes import oracle, salt_of


def answer_to(prompt: str, max_tokens: int = 256, sample_index: int = 0) -> str:
    tokenizer = toy.make_tokenizer()
    ids = tokenizer.encode(prompt)
    salt = salt_of(7, sample_index)
    outputs, _ = oracle(ids, min(max_tokens, toy.CONTEXT - len(ids)), [toy.EOS_ID], salt=salt)
    return tokenizer.decode(outputs)


def test_a_prompt_is_continued(cli):
    result = cli("generate", "Once upon", "--seed", 7)
    assert result.exit_code == 0
    assert result.stdout == answer_to("Once upon").removesuffix("\n") + "\n"
    log, summary = result.stderr.splitlines()
    assert log.startswith("on a toy: KV pool: ") and "up to 1 requests" in log
    assert summary.startswith("9 prompt tokens · ") and summary.endswith(" s · finished by eos")


def test_chat_and_system(cli):
    told = cli("generate", "--chat", "--system", "Be.", "Hi", "--seed", 7, "-q")
    assert told.stdout == answer_to("system: Be.\nuser: Hi\nassistant: ").removesuffix("\n") + "\n"
    assert told.stderr == ""
    untold = cli("generate", "--chat", "Hi", "--seed", 7, "-q")
    assert untold.stdout == answer_to("user: Hi\nassistant: ").removesuffix("\n") + "\n"


def test_a_chat_goes_on_with_an_answer_and_shows_tools(cli, monkeypatch):
    begun = cli("generate", "--chat", "Hi", "--answer-start", "Well, ", "--seed", 7, "-q")
    assert begun.stdout == answer_to("user: Hi\nassistant: Well, ").removesuffix("\n") + "\n"
    bare = cli("generate", "--chat", "Hi", "--no-generation-prompt", "--seed", 7, "-q")
    assert bare.stdout == answer_to("user: Hi\n").removesuffix("\n") + "\n"
    monkeypatch.setattr("tests.toy_tokenizer.TEMPLATE", "{{ tools | tojson }}{{ documents | tojson }}{{ mood }}")
    told = ["--tools", '[{"name": "f"}]', "--documents", '[{"text": "d"}]', "--chat-template-kwargs", '{"mood": "x"}']
    result = cli("generate", "--chat", "Hi", *told, "--seed", 7, "-q")
    assert result.stdout == answer_to('[{"name": "f"}][{"text": "d"}]x').removesuffix("\n") + "\n"


def test_of_ranked_samples_each_is_shown_once_and_the_best_first(cli, monkeypatch):
    monkeypatch.setattr("jaxoverlap.engine.collector._worst_last", lambda output: -output.index)
    result = cli("generate", "ab", "--n", 3, "--best-of", 3, "--seed", 7, "--max-tokens", 9, "-q")
    blocks = [
        f"==> 1/1, sample {place + 1}/3: ab <==\n{answer_to('ab', 9, index).removesuffix(chr(10))}\n"
        for place, index in enumerate([2, 1, 0])
    ]
    assert result.stdout == "\n".join(blocks)


def test_samples_follow_under_headers(cli):
    result = cli("generate", "ab", "cd", "--n", 3, "--seed", 7, "--max-tokens", 9, "-q")
    blocks = [
        f"==> {index + 1}/2, sample {place + 1}/3: {text} <==\n{answer_to(text, 9, place).removesuffix(chr(10))}\n"
        for index, text in enumerate(["ab", "cd"])
        for place in range(3)
    ]
    assert result.stdout == "\n".join(blocks)
    lines = cli("generate", "ab", "--n", 2, "--seed", 7, "--max-tokens", 9, "-q", "--json").stdout.splitlines()
    first, second = map(json.loads, lines)
    assert [(one["index"], one["sample"], one["prompt"]) for one in (first, second)] == [(0, 0, "ab"), (0, 1, "ab")]
    assert second["text"] == answer_to("ab", 9, 1) and second["usage"]["completion_tokens"] == 9


def test_stop_strings(cli):
    text = answer_to("abc", 20)
    stop = text[6:8]
    for include, shown in (([], text[: text.index(stop)]), (["--include-stop"], text[: text.index(stop) + 2])):
        args = ["--seed", 7, "--max-tokens", 20, "--stop", "§", "--stop", stop, "-q", *include]
        assert cli("generate", "abc", *args).stdout == shown + "\n"
        line = json.loads(cli("generate", "abc", *args, "--json").stdout)
        assert (line["text"], line["finish_reason"], line["stop_reason"]) == (shown, "stop_string", stop)


def test_json_is_utf8(start):
    process = start("generate", "aé", "--json", "--max-tokens", "1", "-q", env={"PYTHONIOENCODING": "ascii"})
    stdout, stderr = process.communicate(timeout=60)
    assert stderr == b"" and '"prompt": "aé"'.encode() in stdout


def test_a_bad_prompt_is_refused_before_the_warm_up(cli, monkeypatch):
    warmed = []
    monkeypatch.setattr(toy.Device, "warm_up", lambda self, progress=None: warmed.append(True))
    assert cli("generate", "ok", "x" * 256, "-q").exit_code == 2 and warmed == []
    assert cli("generate", "ok", "-q").exit_code == 0 and warmed == [True]


@pytest.mark.parametrize("args", [[], ["-"]])
@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_standard_input(cli, args, ending):
    result = cli("generate", *args, "--seed", 7, "--max-tokens", 9, stdin="a prompt" + ending)
    assert result.stdout == answer_to("a prompt", 9) + "\n"


def test_several_prompts_are_answered_in_order_under_headers(cli):
    prompts = [f"prompt {i}" for i in range(40)]
    result = cli("generate", *prompts, "--seed", 7, "--max-tokens", 30)
    blocks = [
        f"==> {i + 1}/40: {prompt} <==\n{answer_to(prompt, 30).removesuffix(chr(10))}\n"
        for i, prompt in enumerate(prompts)
    ]
    assert result.stdout == "\n".join(blocks)
    assert "up to 32 requests" in result.stderr


def test_json(cli):
    result = cli("generate", "a", "bb", "--json", "--seed", 7, "--max-tokens", 5, "--ignore-eos", "-q")
    first, second = map(json.loads, result.stdout.splitlines())
    assert [first["index"], second["index"]] == [0, 1] and second["prompt"] == "bb"
    assert second["text"] == answer_to("bb", 5) and len(second["token_ids"]) == 5
    assert second["finish_reason"] == "length" and second["seed"] == 7
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert second["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7} | cached
    assert 0 <= second["timings"]["first_token_seconds"] <= second["timings"]["total_seconds"]


def test_stop_ids(cli):
    tokenizer = toy.make_tokenizer()
    text = answer_to("abc", 20)
    [stop_id] = tokenizer.encode(text[4])
    result = cli("generate", "abc", "--seed", 7, "--stop-token-id", 95, "--stop-token-id", stop_id, "-q")
    assert result.stdout == text[: text.index(text[4])] + "\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([""], "error: prompt: '' is not allowed; it has no tokens"),
        (["a", ""], "error: prompt 2: prompt: '' is not allowed"),
        (["x" * 256], "error: prompt: '256 tokens' is not allowed"),
        (["a", "--max-tokens", "0"], "error: max_tokens: 0 is not allowed"),
        (["a", "--temperature", "-1"], "error: temperature: -1.0 is not allowed"),
        (["a", "--system", "x"], "error: system: 'x' is not allowed; it needs --chat"),
        (["a", "--tools", "[]"], "error: tools: '[]' is not allowed; it needs --chat"),
        (["a", "--chat", "--tools", "{}"], "error: tools: {} is not allowed; use a list of objects"),
        (["a", "--chat", "--tools", "[}"], "error: tools: '[}' is not allowed; it is not JSON"),
        (
            ["a", "--chat", "--answer-start", "x", "--chat-template-kwargs", "none"],
            "error: chat_template_kwargs: 'none'",
        ),
        (["a", "--logit-bias", "5"], "error: logit_bias: '5' is not allowed; use ID=NUMBER"),
        (["a", "--logit-bias", "x=1"], "error: logit_bias['x']: 'x' is not allowed"),
        (["a", "--stop", "x</s>"], "error: stop[0]: 'x</s>' is not allowed; skip_special_tokens hides '</s>'"),
        (["a", "--n", "0"], "error: n: 0 is not allowed"),
        (["a", "--logprobs", "0"], "error: logprobs: 0 is not allowed; plain text does not show them; use --json"),
        (["a", "--prompt-logprobs", "1"], "error: prompt_logprobs: 1 is not allowed; plain text does not"),
        (["-", "-"], "error: '-' (standard input) can be one prompt"),
        (["a", "--model", "missing"], "error: missing: no such file or folder"),
        (["a", "--dtype", "int3"], "error: dtype: 'int3' is not allowed; use one of auto, float32, bfloat16"),
        ([toy.BROKEN], "error: the engine failed and must be restarted: RuntimeError: out of toys"),
    ],
)
def test_errors_are_one_line(cli, args, said):
    result = cli("generate", *args, "-q")
    assert result.exit_code == 2
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1


def test_standard_input_must_be_utf8(cli):
    result = cli("generate", stdin=b"caf\xe9")
    assert (result.exit_code, result.stderr) == (2, "error: standard input is not valid UTF-8 (byte 3)\n")


def test_streams_in_order_lose_nothing(monkeypatch):
    """The others end while the first is drawn from, and their last pieces are still there."""
    monkeypatch.setattr("jaxoverlap.llm.build_engine", toy.build_engine)
    from jaxoverlap.llm import LLM

    lengths = [60, 3, 30, 1, 8]
    turns = []
    for together in (1, 2, 5):
        with LLM(max_running=5, progress=False) as llm:
            streams = [llm.stream("ab", SamplingParams(max_tokens=n, ignore_eos=True, seed=n)) for n in lengths]
            pieces: list[list] = [[] for _ in lengths]
            order = []
            for index, delta in in_order(streams, together=together):
                pieces[index].append(delta)
                order.append(index)
            assert order == sorted(order)
            for n, deltas in zip(lengths, pieces, strict=True):
                output = deltas[-1].output
                assert output.token_ids == oracle(llm.tokenizer.encode("ab"), n, [], salt=n)[0]
                assert output.token_ids == [token for delta in deltas for token in delta.token_ids]
                assert output.text == "".join(delta.text for delta in deltas)
            turns.append(len(llm.engine.loop.times.records))
    assert turns == sorted(turns, reverse=True)
    assert turns[-1] < 60 + 20 < sum(lengths) <= turns[0], "in the shadow of the first, not after it"


def test_the_engine_is_as_small_as_the_job():
    def fitting(prompts: list[str], chat: bool = False) -> tuple[int, int | None, int]:
        settings = _fitting(prompts, chat)
        return settings["max_running"], settings.get("max_batched_tokens"), settings["min_prefill_tokens"]

    assert fitting(["Hi"], chat=True) == (1, 64, 64)
    assert fitting(["Hi"] * 3) == (3, 32, 32)
    assert fitting(["x" * 600] * 2) == (2, 512, 512)
    assert fitting(["x" * 6000] * 50) == (32, None, 512)


def test_a_deterministic_engine_does_not_depend_on_the_prompts(cli, monkeypatch):
    built = []

    def build_engine(config, **given):
        built.append(config)
        return toy.build_engine(config, **given)

    monkeypatch.setattr("jaxoverlap.llm.build_engine", build_engine)
    for prompts in (["ab"], ["ab", "cd"], ["x" * 200, "ab"]):
        assert cli("generate", "--deterministic", "--max-tokens", "3", *prompts).exit_code == 0
    assert built == [EngineConfig(deterministic=True, watchdog_exit_seconds=30.0)] * 3
