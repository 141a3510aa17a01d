"""Chats become the ids that transformers would make of them."""

from __future__ import annotations

import jinja2
import pytest
import transformers

from jaxoverlap.errors import InvalidRequestError, ModelError, UnsupportedError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.text.chat_template import ChatTemplate
from jaxoverlap.text.tokenizer import Tokenizer
from tests.tiny_models import TEMPLATE, make_tokenizer, save_tokenizer, tokenizer_metadata

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What's 12 × 34?\n<b>&amp;</b> 日本 🔥 "},
    {"role": "assistant", "content": "408"},
    {"role": "user", "content": "ok"},
]

# One template per feature that differs between Jinja and what transformers renders with.
TEMPLATES = {
    "plain": TEMPLATE,
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}\n    {% endif %}\n{% endfor %}\nend\n",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}{{ eos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}",
    "variables": "{{ enable_thinking }}{{ style | default('none') }}{{ add_generation_prompt }}{{ unk_token }}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "what is set in generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}"
    "{{ loop.index }}{% endgeneration %}{{ x }}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "wëather", "parameters": {"type": "object"}}}]


def chat(messages=CHAT, **options):
    return ChatPrompt(messages=messages, **options)


def pair(folder):
    return Tokenizer.from_folder(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_equals_transformers(tmp_path, name, add_generation_prompt, tools):
    ours, theirs = pair(save_tokenizer(make_tokenizer(bos=True), tmp_path, chat_template=TEMPLATES[name]))
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, enable_thinking=False, **options)
    assert len(expected) > 0
    assert ours.apply_chat_template(chat(CHAT, chat_template_kwargs={"enable_thinking": False}, **options)) == expected


def test_tokens_that_a_model_names_itself_are_variables_of_its_template(tmp_path):
    template = "{{ think_start }}|{{ image_token }}|{{ bos_token }}|{{ add_thing_token }}"
    names = {"extra_special_tokens": {"think_start": "<think>"}, "image_token": "<tool>", "add_thing_token": True}
    ours, theirs = pair(save_tokenizer(make_tokenizer(), tmp_path, chat_template=template, **names))
    assert theirs.apply_chat_template(CHAT, tokenize=False) == "<think>|<tool>|<s>|"
    assert ours.apply_chat_template(chat()) == theirs.apply_chat_template(CHAT, return_dict=False)


def test_a_chat_has_exactly_one_bos(tmp_path):
    # The template writes it and the tokenizer adds one to plain texts: together they would be two.
    ours, _ = pair(save_tokenizer(make_tokenizer(bos=True), tmp_path))
    assert ours.encode("hi")[0] == 1
    ids = ours.apply_chat_template(chat())
    assert ids[0] == 1 and ids.count(1) == 1


def test_gguf_and_folder_agree(tmp_path):
    ours, _ = pair(save_tokenizer(make_tokenizer(), tmp_path))
    from_gguf = Tokenizer.from_gguf(tokenizer_metadata(make_tokenizer()))
    assert from_gguf.has_chat_template
    assert from_gguf.apply_chat_template(chat()) == ours.apply_chat_template(chat())


def test_templates_in_files_win_and_named_ones_are_chosen(tmp_path):
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "with tools"}]
    folder = save_tokenizer(make_tokenizer(), tmp_path, chat_template=named)
    ours = Tokenizer.from_folder(folder)
    assert ours.decode(ours.apply_chat_template(chat())) == "old"
    assert ours.decode(ours.apply_chat_template(chat(tools=TOOLS))) == "with tools"
    (folder / "chat_template.jinja").write_text("new")
    ours = Tokenizer.from_folder(folder)
    assert ours.decode(ours.apply_chat_template(chat())) == "new"
    metadata = tokenizer_metadata(make_tokenizer()) | {"tokenizer.chat_template.tool_use": "with tools"}
    from_gguf = Tokenizer.from_gguf(metadata)
    assert from_gguf.decode(from_gguf.apply_chat_template(chat(tools=TOOLS))) == "with tools"


def test_fields_that_are_none_count_as_absent():
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.name is defined }}{% endfor %}"}, {})
    message = {"role": "user", "content": "x"}
    render = lambda m: template.render(chat([m]))  # noqa: E731
    assert (render(message), render({**message, "name": None}), render({**message, "name": "a"})) == (
        "False",
        "False",
        "True",
    )


@pytest.mark.parametrize(
    "fields", [{"reasoning": "a"}, {"thinking": "a"}, {"reasoning_content": "a", "thinking": "b"}, {}]
)
def test_reasoning_has_the_names_that_transformers_gives_it(tmp_path, fields):
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}"
    ours, theirs = pair(save_tokenizer(make_tokenizer(), tmp_path, chat_template=template))
    messages = [*CHAT[:2], {"role": "assistant", "content": "x", "name": None, **fields}]
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert ours.decode(ours.apply_chat_template(chat(messages, add_generation_prompt=False))) == expected


def test_a_model_without_template_says_so(tmp_path):
    ours, _ = pair(save_tokenizer(make_tokenizer(), tmp_path, chat_template=None))
    assert not ours.has_chat_template
    with pytest.raises(UnsupportedError, match="no chat template"):
        ours.apply_chat_template(chat())
    with pytest.raises(UnsupportedError, match=r"no default chat template; this model has \['other'\]"):
        ChatTemplate({"other": "x"}, {}).render(chat())


def test_a_template_that_does_not_compile_is_a_model_error(tmp_path):
    folder = save_tokenizer(make_tokenizer(), tmp_path, chat_template="{% for %}")
    with pytest.raises(ModelError, match="chat template 'default' does not compile"):
        Tokenizer.from_folder(folder)


PART = {"type": "text", "text": "x"}


def test_content_parts_of_text_become_one_text():
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you", "cache_control": None}]
    message = {"role": "user", "content": parts, "name": "me"}
    chat = ChatPrompt(messages=[message], continue_final_message=True)
    assert chat.messages == [{"role": "user", "content": "Hello\nyou", "name": "me"}]
    assert message["content"] is parts, "the caller's own is not changed"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([CHAT[0], {"role": 3, "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [PART, {"type": "image_url", "image_url": {}}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{**PART, "weight": 2}]}], "messages[0].content[0].weight"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages"),
    ],
)
def test_malformed_messages_are_refused_by_field(messages, field):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": TEMPLATE}, {}).render(chat(messages))
    assert caught.value.field == field


def test_a_tool_call_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = ChatTemplate({"default": "{{ messages[0].tool_calls[0].name }}"}, {})
    assert template.render(chat([call], add_generation_prompt=False)) == "f"


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
CALL_AS_TEXT = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
CONTENT = {
    # DeepSeek-R1 and V3: a null decides.
    "null": "{{ 'no' if messages[0]['content'] is none else '<' + messages[0]['content'] }}",
    "left out": "{% for m in messages %}{{ '<' + m['content'] | default('no') }}{% endfor %}",
    "printed": "{% for m in messages %}<{{ m['content'] }}{% endfor %}",
    "truth": "{% for m in messages %}{% if m['content'] %}{{ '<' + m['content'] }}{% endif %}{% endfor %}",
}
ARGUMENTS = {
    "object": "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}",
    "text": "{% for m in messages %}{{ '' + m.tool_calls[0].function.arguments }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("content", ["", "x", None, ...], ids=["empty", "text", "null", "left out"])
def test_the_content_of_a_tool_call_reaches_the_template_as_with_transformers(tmp_path, name, content):
    message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content is ...:
        del message["content"]
    ours, theirs = pair(save_tokenizer(make_tokenizer(), tmp_path, chat_template=CONTENT[name]))
    shown = ours.decode(ours.apply_chat_template(chat([message], add_generation_prompt=False)))
    try:
        expected = theirs.apply_chat_template([message], tokenize=False)
    except (TypeError, jinja2.UndefinedError):
        expected = "no"  # transformers leaves a null out, on which this template fails
    assert shown == expected


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_an_object_for_templates_and_text_for_those_that_fail_on_one(name):
    render = ChatTemplate({"default": ARGUMENTS[name]}, {}).render
    for content in ({"content": ""}, {"content": None}, {}):
        assert render(chat([{"role": "assistant", **content, "tool_calls": [CALL]}])) == '{"city": "Köln"}'
    as_text = render(chat([{"role": "assistant", "content": "", "tool_calls": [CALL_AS_TEXT]}]))
    assert as_text == ('{"city": "Köln"}' if name == "text" else r'"{\"city\": \"Köln\"}"')  # as transformers


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + messages }}", "chat template refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
        ("{% set ns = namespace() %}{% set ns._y = 1 %}", "_y"),
    ],
)
def test_a_template_that_fails_refuses_the_request_alone(source, named):
    with pytest.raises(InvalidRequestError, match=named):
        ChatTemplate({"default": source}, {}).render(chat())


def test_messages_are_not_changed_by_rendering():
    messages = [{"role": "user", "content": "x", "name": None}]
    for options in ({}, {"continue_final_message": True}):
        ChatTemplate({"default": TEMPLATE}, {}).render(chat(messages, **options))
        assert messages == [{"role": "user", "content": "x", "name": None}]


# ---------------------------------------------------------------- going on with the last message

TRIMMED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
BEGINNINGS = ["Sure, here", "The answer: ", "  spaces\n\n ", "one\ntwo", "408", "ends in <|im_end|>"]


@pytest.mark.parametrize("template", [TEMPLATE, TRIMMED], ids=["as it is", "trimmed"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_going_on_equals_transformers(tmp_path, template, beginning, role):
    ours, theirs = pair(save_tokenizer(make_tokenizer(bos=True), tmp_path, chat_template=template))
    messages = [*CHAT, {"role": role, "content": beginning}]
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, continue_final_message=True)
    assert ours.apply_chat_template(chat(messages, continue_final_message=True)) == expected
    shown = beginning.strip() if template == TRIMMED else beginning
    assert ours.decode(expected, skip_special_tokens=False).endswith(shown)


def test_a_message_that_goes_on_must_be_text_that_the_template_writes():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    with pytest.raises(InvalidRequestError, match=r"messages\[4\].content: None"):
        chat([*CHAT, call], continue_final_message=True)
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | upper }}"):
        with pytest.raises(InvalidRequestError, match=r"messages\[3\].content: 'ok'.*does not write it"):
            ChatTemplate({"default": source}, {}).render(chat(continue_final_message=True))
    with pytest.raises(InvalidRequestError, match="add_generation_prompt: True"):
        chat(continue_final_message=True, add_generation_prompt=True)
    assert chat().opens_answer and not chat(continue_final_message=True).opens_answer
    assert not chat(add_generation_prompt=False).opens_answer


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [TOOLS[0], "f"]}, "tools[1]"),
        ({"documents": [3]}, "documents[0]"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {3: "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"x": object()}}, "chat_template_kwargs"),
    ],
)
def test_what_the_template_is_told_is_checked(options, field):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": TEMPLATE}, {}).render(chat(**options))
    assert caught.value.field == field


def test_documents_reach_the_template():
    template = ChatTemplate({"default": "{{ documents | tojson }}{{ tools is none }}"}, {})
    assert template.render(chat(documents=[{"text": "é"}])) == '[{"text": "é"}]True'
