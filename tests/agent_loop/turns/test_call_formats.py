"""Tool calls in the models' own formats: every call is read, and every mistake is named."""

from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.turns.call_formats import FORMATS, CallMistake, Message, ParsedCall
from agent_loop.turns.call_formats.message import MOST_CALLS, too_many
from tests.fakes.call_messages import BROKEN, MARKERS, broken, messages
from tests.fakes.call_writers import WRITERS, Call

NAMES = sorted(FORMATS)
CALLS = 200
BROKEN_MESSAGES = 150
DSML = "\uff5cDSML\uff5c"


def parsed(message: Message) -> list[Call]:
    return [(call.name, call.arguments) for call in message.calls if isinstance(call, ParsedCall)]


def mistakes(message: Message) -> list[CallMistake]:
    return [call for call in message.calls if isinstance(call, CallMistake)]


def test_each_format_has_its_name_and_a_writer():
    assert sorted(WRITERS) == NAMES
    assert all(FORMATS[name].name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parsing_undoes_rendering(name):
    count = 0
    for written in messages(name, seed=1):
        read = FORMATS[name].parse(written.text, written.schemas())
        assert parsed(read) == written.calls
        assert not mistakes(read) and not read.is_open
        assert (read.content, read.reasoning) == (written.content.strip(), written.reasoning)
        count += len(written.calls)
        if count >= CALLS:
            break


@pytest.mark.parametrize("name", NAMES)
def test_the_token_that_ends_a_message_may_be_missing(name):
    for written in islice(messages(name, seed=2), 20):
        read = FORMATS[name].parse(written.text, written.schemas())
        text = written.text.removesuffix(WRITERS[name].end)
        for stop in FORMATS[name].stop_texts:
            text = text.removesuffix(stop)
        stopped = FORMATS[name].parse(text, written.schemas())
        assert parsed(stopped) == parsed(read) and stopped.content == read.content


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_call_is_a_mistake_and_the_calls_around_it_are_read(name):
    ways = set[str]()
    # Without its opening marker, a block is no block, and words after a call are a part of it.
    # LFM2's calls are one list.
    can_lose_others = name in ("kimi", "deepseek_v4", "minimax", "lfm2")
    for how, written in islice(broken(name, seed=3), BROKEN_MESSAGES):
        read = FORMATS[name].parse(written.text, written.schemas())
        others = [call for call in written.calls if call[0] != BROKEN]
        rest = iter(others)
        assert all(call in rest for call in parsed(read)), (how, written.text, read)
        assert can_lose_others or how == "cut" or parsed(read) == others, (how, written.text, read)
        assert mistakes(read), (how, written.text, read)
        assert all(len(each.problem.splitlines()) == 1 for each in mistakes(read))
        if how == "cut":
            before = written.calls[: [call[0] for call in written.calls].index(BROKEN)]
            assert parsed(read) == before and mistakes(read)[-1].is_open, (written.text, read)
        ways.add(how)
    assert len(ways) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_may_open_the_thought(name):
    begin, end = (each.strip() for each in WRITERS[name].thought)
    call = WRITERS[name].calls([("search", {})])
    read = FORMATS[name].parse(f"so{end}{call}", {}, in_reasoning=True)
    assert (read.reasoning, parsed(read), read.is_open) == ("so", [("search", {})], False)
    opened = FORMATS[name].parse(f"{begin}so", {})
    assert opened == FORMATS[name].parse("so", {}, in_reasoning=True)
    assert opened == Message(content="", reasoning="so", calls=(), is_open=True)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpt-oss"}))
def test_a_thought_without_an_end_ends_at_a_call(name):
    call = WRITERS[name].calls([("search", {})])
    read = FORMATS[name].parse(f"so {call}", {}, in_reasoning=True)
    assert (read.reasoning, parsed(read), read.is_open) == ("so", [("search", {})], False)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_without_markers_is_the_final_words(name):
    for text in ("", "4", " a < b, and 2 > 1\n"):
        assert FORMATS[name].parse(text, {}) == Message(
            content=text.strip(), reasoning="", calls=()
        )


PIECES = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from([each[: len(each) // 2] for each in MARKERS]),
    st.sampled_from(
        [
            *("{", "}", "[", "]", ",", ":", '"', "\\", '<|"|>', "null", "1e999", "NaN", "9" * 5000),
            *(
                '{"name": "a", "arguments": ',
                '{"name": "a", "parameters": ',
                "[a(b='",
                "a[ARGS]{",
                "<|python_tag|>",
                "; ",
                "call:a{",
                "to=functions.a ",
                'name="a"',
                "a>",
                "\\ud83d",
            ),
            *(' string="true">', "[" * 5000, "functions.a:0", "commentary", "analysis", "\ud83d"),
        ]
    ),
    st.text(max_size=3),
)


@example(text="assistantto=functions.a <|message|>", in_reasoning=False)
@given(text=st.lists(PIECES, max_size=14).map("".join), in_reasoning=st.booleans())
def test_no_text_raises_and_no_attempt_is_dropped(text, in_reasoning):
    for name in NAMES:
        writer = WRITERS[name]
        read = FORMATS[name].parse(text, {"a": {"properties": 3}}, in_reasoning=in_reasoning)
        for call in mistakes(read):
            assert call.problem and len(call.problem.splitlines()) == 1
        has_thought = in_reasoning or any(each.strip() in text for each in writer.thought)
        begins = writer.before and writer.before[0] in text
        if begins and not has_thought and name != "gpt-oss":
            assert read.calls
        header = text.partition("<|message|>")[0]  # in the words of a message it is no attempt
        if "to=functions.a" in header and not in_reasoning and "analysis" not in text:
            assert FORMATS["gpt-oss"].parse(f"<|start|>{text}", {}).calls


HOSTILE = {
    "hermes": [
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"name":',
        "<think>",
        "<tool_call> ",
        "<|im_end|> ",
    ],
    "qwen3_coder": [
        "<tool_call><function=a>",
        "<tool_call><function=a><parameter=b>",
        "</function>",
    ],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", " to=functions.a<|message|>{", "to="],
    "glm": ["<tool_call>a ", "<tool_call>a<arg_key>", "<think><tool_call>", "<arg_value>"],
    "kimi": ["<|tool_call_begin|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>a:1:"],
    "deepseek_v4": [f"<{DSML}", f'<{DSML}tool_calls><{DSML}invoke name="a">', "<think>"],
    "minimax": ['<minimax:tool_call><invoke name="a">', "<invoke ", '<parameter name="'],
    "seed": ["<seed:tool_call><function=a><parameter=b>", "<function=", "<seed:think>"],
    "gemma4": [
        "<|tool_call>call:a{b:",
        '<|tool_call>call:a{b:<|"|>',
        "<|channel>",
        "<|tool_call> ",
    ],
    "llama3_json": [
        *(
            '{"name":',
            '; {"name": ',
            '{"a":\n',
            '\n{"a":',
            "[{",
            "<|python_tag|>",
            "[ ",
            "{ ",
            "\n",
        ),
        *('{"name": "', ' {"name":[', "<|python_tag|>{", '{"name": "a", "parameters": {}}; '),
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]a{", "[TOOL_CALLS]a ", "[THINK]"],
    "lfm2": [
        *("<|tool_call_start|>", "<|tool_call_start|>[a(", "<|tool_call_end|>"),
        *(
            "<|tool_call_start|>[a(b='<|tool_call_end|>",
            "<|tool_call_start|>[a(b=[<|tool_call_end|>",
        ),
    ],
}
HOSTILE_LISTS = ["a(b='", "a(b=[", "a(b=1), ", "-", "'", "\\", "a(b=-", "a(b=(", "a(b=1+", "a(b=''"]


@pytest.mark.timeout(60)  # each text is read in less than a second; a quadratic reader needs hours
@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_are_read_in_linear_time(name):
    for piece in (*HOSTILE[name], " ", "<", "\n<tool_call>" + "a" * 1000):
        text = piece * (200_000 // len(piece))
        FORMATS[name].parse(text, {})
    for piece in HOSTILE_LISTS if name == "lfm2" else ():
        text = f"<|tool_call_start|>[a(b={piece * (200_000 // len(piece))}"
        FORMATS[name].parse(text, {})


@pytest.mark.parametrize("name", NAMES)
def test_after_the_most_calls_of_a_message_the_rest_is_one_mistake(name):
    for piece in HOSTILE[name]:
        text = piece * 2000
        calls = FORMATS[name].parse(text, {}).calls
        if len(calls) < MOST_CALLS:
            continue
        assert len(calls) <= 2 * MOST_CALLS
        assert calls[-1] == too_many(calls[-1].text) and text.endswith(calls[-1].text)


ARGUMENTS = [
    ('{"a": ', "Expecting value"),
    ("{'a': 1}", "Expecting property name"),
    ('{"a": NaN}', "NaN is not allowed"),
    ('{"a": 1e999}', "not JSON compliant"),
    ("[1, 2]", "no JSON object"),
    ('"a"', "no JSON object"),
    ("", "Expecting value"),
    ('{"a": "\\ud83d"}', "half of a surrogate pair"),
    ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ('{"a": ' + "[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize("name", ["gpt-oss", "hermes", "kimi"])
@pytest.mark.parametrize(("arguments", "problem"), ARGUMENTS)
def test_arguments_that_are_no_json_object_are_a_mistake(name, arguments, problem):
    text = WRITERS[name].message([("search", {})]).replace("{}", arguments)
    (mistake,) = mistakes(FORMATS[name].parse(text, {}))
    assert problem in mistake.problem
    assert mistake.name == ("" if name == "hermes" and "object" not in problem else "search")


S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741


@pytest.mark.parametrize("name", ["glm", "minimax", "qwen3_coder", "seed"])
def test_a_value_that_is_no_json_of_its_type_breaks_its_call_only(name):
    calls = [("one", {"n": "x"}), ("two", {"n": "x"})]
    schemas = {"one": {"properties": {"n": I}}, "two": {"properties": {"n": S}}}
    read = FORMATS[name].parse(WRITERS[name].message(calls), schemas)
    assert parsed(read) == [("two", {"n": "x"})]
    assert mistakes(read)[0].problem == "the value of 'n' of 'one' is no JSON: Expecting value"


LIST = f'<{DSML}tool_calls>\n<{DSML}invoke name="a">\n</{DSML}invoke>\n'
HARMONY = "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{}"
Q = "<tool_call><function=a>"
K = "<|tool_calls_section_begin|>"
MISTAKES: list[tuple[str, str, list[str], str]] = [
    # (format, text, problems, content)
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ['has no "name"'], ""),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', ['has no "name"'], ""),
    ("hermes", '<tool_call>{"name": "a", "parameters": {"b": 1}}</tool_call>', ["arguments"], ""),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', ["no JSON object"], ""),
    ("hermes", '<tool_call>{"name": "a"}}</tool_call>', ["no </tool_call> follows"], ""),
    ("hermes", "x</tool_call>y", ["no <tool_call> is before"], "xy"),
    ("hermes", "<tool_call></tool_call>", ["Expecting value"], ""),
    ("hermes", "I say <tool_", ["<tool_ is not complete"], "I say"),
    ("qwen3_coder", "<function=a></function>", ["no <tool_call> is before the call of 'a'"], ""),
    ("qwen3_coder", "<function=a></function>\n</tool_call>", ["no <tool_call> is before"], ""),
    ("qwen3_coder", f'{Q}{{"b": 1}}</function></tool_call>', ["nor </function>"], ""),
    ("qwen3_coder", f"{Q}</function>so</tool_call>", ["'so</tool_call>' is no call"], ""),
    ("qwen3_coder", f"{Q}</function><tool_call>", ["no </tool_call>", "no call follows"], ""),
    ("qwen3_coder", "<tool_call>\n</tool_call>", ["no call follows <tool_call>"], ""),
    ("qwen3_coder", f"{Q}<parameter=b>1</parameter>2</function></tool_call>", ["'2</func"], ""),
    ("qwen3_coder", "a</function>", ["no <function= is before </function>"], "a"),
    ("minimax", '<invoke name="a"></invoke>', ["no <minimax:tool_call> is before"], ""),
    ("minimax", "<minimax:tool_call>", ["no call follows"], ""),
    ("minimax", "<minimax:tool_call><invoke>", ["no name of a tool"], ""),
    ("deepseek_v4", f"<{DSML}toolcalls>", [f"no <{DSML}tool_calls> is before"], "toolcalls>"),
    ("deepseek_v4", f"{LIST}and so on", ["'and so on' is no call"], ""),
    ("deepseek_v4", f'<{DSML}tool_calls><{DSML}invoke name="a"><{DSML}parameter name="b">1</'
     f"{DSML}parameter></{DSML}invoke></{DSML}tool_calls>", ["is no parameter"], ""),
    ("glm", "<tool_call>\n</tool_call>", ["no name of a tool"], ""),
    ("glm", '<tool_call>{"name": "a"}</tool_call>', ["no name of a tool"], ""),
    ("glm", "<tool_call>a<arg_value>1</arg_value></tool_call>", ["is neither <arg_key>"], ""),
    ("glm", "<arg_key>b</arg_key></tool_call>", ["no <tool_call> is before"], ""),
    ("kimi", f"{K}<|tool_call_begin|>:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
     ["':0' is not functions.NAME:INDEX"], ""),
    ("kimi", "<|tool_call_begin|>a:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
     ["no <|tool_calls_section_begin|> is before"], ""),
    ("gemma4", "<|tool_call>call:a{b:word}<tool_call|>", ["'word}<tool_call|>' is no value"], ""),
    ("gemma4", "<|tool_call>a{}<tool_call|>", ["no call:NAME"], ""),
    ("gemma4", "<|tool_call>call:a{b:1,}<tool_call|>", ["is no key"], ""),
    ("gemma4", "<|tool_call>call:a{b:" + "[" * 5000, ["nested too deeply"], ""),
    ("gpt-oss", f"{HARMONY}<|call|>{HARMONY}<|call|>", ["no <|start|>assistant"], ""),
    ("gpt-oss", f"<|channel|>analysis<|message|>so{HARMONY}<|call|>", ["no <|start|>assis"], ""),
    ("gpt-oss", HARMONY.replace("functions.a", "python"), ["and not to='python'"], ""),
    ("gpt-oss", HARMONY.replace("functions.a", "functions."), ["and not to='functions.'"], ""),
    ("gpt-oss", HARMONY.replace("<|channel|>", ""), ["the call has no <|channel|>"], ""),
    ("gpt-oss", HARMONY.replace("<|message|>", "") + "<|call|>", ["no <|message|> follows"], ""),
    ("gpt-oss", f"<|message|>{HARMONY[11:]}<|call|>", ["is inside the words"],
     "commentary to=functions.a json{}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "problems", "content"), MISTAKES)
def test_mistakes_are_named(name, text, problems, content):
    read = FORMATS[name].parse(text, {})
    found = [each.problem for each in mistakes(read)]
    assert len(found) == len(problems)
    assert all(words in problem for words, problem in zip(problems, found, strict=True)), found
    assert read.content == content


GOOD: list[tuple[str, str, list[Call], str, str]] = [
    # (format, text, calls, content, reasoning)
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', [("a", {})], "", ""),
    ("hermes", 'x<tool_call>{"name": "a"}</tool_call>y', [("a", {})], "xy", ""),
    ("hermes", "the tag <think> opens a thought", [], "the tag <think> opens a thought", ""),
    ("hermes", "so <think>a</think> b</think>", [], "so  b", "a"),
    ("qwen3_coder", f"{Q}</function><function=b></function></tool_call>", [("a", {}), ("b", {})],
     "", ""),
    ("minimax", '<minimax:tool_call><invoke name="a"></invoke>', [("a", {})], "", ""),
    ("deepseek_v4", LIST, [("a", {})], "", ""),
    ("kimi", f"{K}<|tool_call_begin|>functions.b.c:12<|tool_call_argument_begin|>{{}}"
     "<|tool_call_end|>", [("b.c", {})], "", ""),
    ("kimi", f"{K}<|tool_call_begin|>b<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
     [("b", {})], "", ""),
    ("gemma4", '<|tool_call>call:a{ <|"|>b c<|"|> : "x", d:[]}', [("a", {"b c": "x", "d": []})],
     "", ""),
    ("gpt-oss", " to=functions.a<|channel|>commentary json<|message|>{}", [("a", {})], "", ""),
    ("gpt-oss", "<|start|>assistant to=functions.a<|channel|>analysis<|message|>{}<|call|>",
     [("a", {})], "", ""),
    ("gpt-oss", f"{HARMONY}<|call|><|start|>assistant{HARMONY}<|call|>", [("a", {}), ("a", {})],
     "", ""),
    ("gpt-oss", "<|channel|>commentary<|message|>first<|end|><|start|>assistant<|channel|>final"
     "<|message|>last<|return|>", [], "last", ""),
    ("gpt-oss", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|message|>4<|return|>",
     [], "4", "so"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content", "reasoning"), GOOD)
def test_what_is_read(name, text, calls, content, reasoning):
    read = FORMATS[name].parse(text, {})
    assert (parsed(read), mistakes(read)) == (calls, [])
    assert (read.content, read.reasoning, read.is_open) == (content, reasoning, False)


def test_kimi_gives_the_models_own_id():
    read = FORMATS["kimi"].parse(WRITERS["kimi"].message([("a", {}), ("b", {})]), {})
    ids = [call.call_id for call in read.calls if isinstance(call, ParsedCall)]
    assert ids == ["functions.a:0", "functions.b:1"]


def test_the_text_of_a_call_is_kept_for_records():
    for name in NAMES:
        text = WRITERS[name].message([("a", {"b": "c"})])
        (call,) = FORMATS[name].parse(text, {}).calls
        assert call.text in text and "c" in call.text
