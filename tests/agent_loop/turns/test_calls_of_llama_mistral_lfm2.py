"""Calls as Llama 3, Mistral and LFM2 write them, beside what vLLM's parser makes of them.

vLLM's column was read off its parsers `llama3_json`, `mistral` and `lfm2` (tool_parsers/ of vLLM
0.11 to 0.15, the whole message at once). A row whose columns differ says why ours is another.
"""

import ast
from dataclasses import dataclass
from typing import Any

import pytest

from agent_loop.turns.call_formats import FORMATS, ParsedCall
from tests.fakes.call_writers import Call

SCHEMAS: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
ID = "a1B2c3D4e"
F: list[Call] = [("f", {"a": 1})]
FG: list[Call] = [*F, ("g", {})]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One message."""

    text: str
    calls: list[Call]
    vllm: list[Call] | None = None
    """None: the same calls."""

    why: str = ""
    """If vLLM has other calls, or drops words."""

    mistakes: tuple[str, ...] = ()
    content: str = ""


C = '{"name": "f", "parameters": {"a": 1}}'
D = '{"name": "g", "parameters": {}}'
LLAMA = [
    Case(text=f"{C}<|eot_id|>", calls=F),
    Case(text=f"<|python_tag|>{C}<|eom_id|>", calls=F),
    Case(text=C.replace("parameters", "arguments"), calls=F),
    Case(text='{"type": "function", "name": "f", "parameters": {"a": 1}}', calls=F),
    Case(text='\n{\n  "name": "f",\n  "parameters": {\n    "a": 1\n  }\n}\n', calls=F),
    *(Case(text=f"{C}{between}{D}", calls=FG) for between in ("; ", ";", "\n", ", ", "")),
    *(Case(text=f"{tag}[{C}, {D}]", calls=FG) for tag in ("", "<|python_tag|>")),
    Case(text=f"I look it up.\n\n{C}", calls=F, content="I look it up.", why="words are kept"),
    Case(text=f"I call `{C}` now.", calls=F, content="I call `` now.", why="words are kept"),
    Case(text='{"answer": 4}', calls=[], content='{"answer": 4}'),
    Case(text='{"name": "Ada", "born": 1815}', calls=[], content='{"name": "Ada", "born": 1815}'),
    Case(text="so {1, 2}\n{3}", calls=[], content="so {1, 2}\n{3}"),
    Case(
        text='{"people": [{"name": "f", "parameters": {}}]}',
        calls=[],
        content='{"people": [{"name": "f", "parameters": {}}]}',
    ),
    Case(text='{"name": "f"}', calls=[("f", {})], vllm=[], why="a call without arguments"),
    Case(text=f'{C}\n{{"b": 2}}', calls=F, vllm=[], content='{"b": 2}', why="it drops all calls"),
    Case(text=f"{C}; {C[:-9]}", calls=F, vllm=[], why="it drops all calls", mistakes=("no JSON",)),
    Case(
        text=f"{C[:-3]}x}}}}; {D}",
        calls=[("g", {})],
        vllm=[],
        why="it drops all calls",
        mistakes=("the call is no JSON",),
    ),
    Case(
        text='{"name": "f", "parameters": "{}"}',
        calls=[],
        vllm=[("f", {})],
        why="its arguments are a text that holds a text",
        mistakes=("the arguments of 'f' are no JSON object",),
    ),
    Case(
        text='{"name": "f", "parameters": {"a": 1}, "arguments": {}}',
        calls=[],
        vllm=[("f", {})],
        why="half of the arguments would be lost",
        mistakes=("both parameters and arguments",),
    ),
    Case(
        text='{"function": "f", "parameters": {"a": 1}}',
        calls=[],
        why="the model is told",
        mistakes=('has no "name"',),
    ),
    Case(
        text='<|python_tag|>brave_search.call(query="x")<|eom_id|>',
        calls=[],
        why="the model is told",
        mistakes=("after <|python_tag|> is no",),
    ),
    Case(text="<|python_tag|>", calls=[], why="the model is told", mistakes=("'' after <|py",)),
]

M = '{"name": "f", "arguments": {"a": 1}}'
MISTRAL = [
    Case(text=f"[TOOL_CALLS][{M}]</s>", calls=F),
    Case(text=f'[TOOL_CALLS] [{M}, {{"name": "g", "arguments": {{}}}}]</s>', calls=FG),
    Case(text=f'[TOOL_CALLS][{M[:-1]}, "id": "{ID}"}}]</s>', calls=F),
    Case(text='[TOOL_CALLS][{"name": "g"}]', calls=[("g", {})]),
    Case(text=f"I look.[TOOL_CALLS][{M}]</s>", calls=F, content="I look."),
    Case(text=f"[TOOL_CALLS][{M}] so", calls=F, content="so", why="words are kept"),
    Case(text='[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}</s>', calls=FG),
    Case(text='[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}</s>', calls=FG),
    Case(
        text=f'[TOOL_CALLS]f[CALL_ID]{ID}[ARGS]{{"a": 1}}</s>',
        calls=F,
        vllm=[(f"f[CALL_ID]{ID}", {"a": 1})],
        why="it takes the id for a part of the name",
    ),
    Case(
        text='[TOOL_CALLS]f{"a": 1[TOOL_CALLS]g{}',
        calls=[("g", {})],
        vllm=[("f", {}), ("g", {})],
        why="it hands over arguments that are no JSON",
        mistakes=("the arguments of 'f' are no JSON",),
    ),
    Case(
        text='[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}',
        calls=[("f", {"a": "[TOOL_CALLS]"})],
        vllm=[("f", {})],
        why="a marker inside the JSON is text",
    ),
    Case(text="[TOOL_CALLS]f", calls=[], why="it drops the call", mistakes=("'f' are no JSON",)),
    Case(
        text=f"[TOOL_CALLS][{M}",
        calls=[],
        why="it makes the call the final words",
        mistakes=("the list of calls is no JSON",),
    ),
    Case(
        text='[TOOL_CALLS][{"name": "f", "parameters": {"a": 1}}]',
        calls=[],
        vllm=[("f", {})],
        why="the arguments would be lost",
        mistakes=("the call of 'f' has no \"arguments\"",),
    ),
    Case(
        text='f[ARGS]{"a": 1}',
        calls=[],
        why="the model is told",
        mistakes=("no [TOOL_CALLS] is before [ARGS]",),
        content='f{"a": 1}',
    ),
    Case(text="usage: prog [ARGS]", calls=[], content="usage: prog [ARGS]"),
]

O, E = "<|tool_call_start|>", "<|tool_call_end|>"  # noqa: E741
LFM2 = [
    Case(text=f"{O}[f(a=1), g()]{E}<|im_end|>", calls=FG),
    Case(text=f"{O}[f(a=1)]{E}Looking.<|im_end|>", calls=F, content="Looking."),
    Case(
        text=f"""{O}[f(a='it\\'s', b="x \\"y\\"")]{E}""", calls=[("f", {"a": "it's", "b": 'x "y"'})]
    ),
    Case(
        text=f"{O}[f(a=None, b=True, d=[1, 'x'], e={{'k': false}}, h={{\"k\": null}})]{E}",
        calls=[
            (
                "f",
                {
                    "a": None,
                    "b": True,
                    "d": [1, "x"],
                    "e": {"k": False},
                    "h": {"k": None},
                },
            )
        ],
    ),
    Case(text=f"{O}[f(a='one\ntwo', b='\\d')]{E}", calls=[("f", {"a": "one\ntwo", "b": "\\d"})]),
    Case(text=f"{O}[f(from=1, class='x')]{E}", calls=[("f", {"from": 1, "class": "x"})]),
    Case(text=f"{O}[files.read(a=1)]{E}", calls=[("files.read", {"a": 1})]),
    Case(
        text=f"{O}[my-tool(x-y=1)]{E}",
        calls=[("my-tool", {"x-y": 1})],
        vllm=[],
        why="names that are no Python are names of MCP tools",
    ),
    Case(text=f"{O}[f(a='\U0001f600\u00e9')]{E}", calls=[("f", {"a": "\U0001f600\u00e9"})]),
    Case(text=f"{O}[f(a=-1)]{E}", calls=[("f", {"a": -1})], vllm=[], why="it knows no sign"),
    Case(text=f"{O}[f(a=1)]", calls=F),
    Case(text=f"{O}[f(a=1)]{E}{O}[g()]{E}", calls=FG, vllm=F, why="it reads the first block only"),
    Case(
        text=f'{O}[{{"name": "f", "arguments": {{"a": 1}}}}]{E}',
        calls=F,
        vllm=[],
        why="the form that the model writes if it is asked for JSON",
    ),
    Case(
        text=f"{O}[f(a=(1, 2))]{E}",
        calls=[("f", {"a": [1, 2]})],
        vllm=[],
        why="a tuple is a list in JSON",
    ),
    Case(
        text=f"{O}[f(a='it's')]{E}",
        calls=[],
        why="where such a text ends is a guess, which newer versions of vLLM make",
        mistakes=("the value of 'a' of 'f': \"'it's'\"",),
    ),
    Case(
        text=f"{O}[f(a=07)]{E}",
        calls=[],
        vllm=[("f", {"a": 7})],
        why="no number of Python or JSON",
        mistakes=("neither JSON nor Python is the value of 'a' of 'f': '07'",),
    ),
    Case(
        text=f"{O}[f(1)]{E}",
        calls=[],
        vllm=[("f", {})],
        why="the value would be lost",
        mistakes=("in the call of 'f', '1)]' is no KEY=VALUE",),
    ),
    Case(
        text=f"{O}[f(a=1, a=2)]{E}",
        calls=[],
        vllm=[("f", {"a": 2})],
        why="a value would be lost",
        mistakes=("the call of 'f' has 'a' twice",),
    ),
    Case(
        text=f"{O}[g(), f(a=open('x'))]{E}",
        calls=[("g", {})],
        why="the model is told",
        mistakes=("neither JSON nor Python",),
    ),
    *(
        Case(
            text=f"{O}[f(a={value})]{E}",
            calls=[],
            vllm=[("f", {"a": ast.literal_eval(value)})],
            why="no tool server takes such JSON",
            mistakes=("neither JSON nor Python",),
        )
        for value in ("1e999", "'\\ud83d'")
    ),
    *(
        Case(text=f"{O}{inner}{E}", calls=[], why="the model is told", mistakes=(words,))
        for inner, words in [
            ("f(a=1)", "no list of calls follows"),
            ("[]", "']' is no call NAME(KEY=VALUE)"),
            ("[f(a={1, 2})]", "neither JSON nor Python"),
            ("[f(a=b'x')]", "neither JSON nor Python"),
            ("[f(a=1", "the call of 'f' has no ')'"),
        ]
    ),
    Case(
        text=f"{O}[f(a=1)] so{E}",
        calls=F,
        vllm=[],
        why="it drops the call",
        mistakes=("'so' follows the list of calls",),
    ),
    Case(
        text=f"{O}[f(a=1){E}",
        calls=F,
        vllm=[],
        why="it drops the call",
        mistakes=("no ',' or ']' follows the call of 'f'",),
    ),
    Case(text=f"so{E}", calls=[], content="so", why="the model is told", mistakes=("no <|",)),
]
CASES = [
    (name, case)
    for name, cases in (("llama3_json", LLAMA), ("mistral", MISTRAL), ("lfm2", LFM2))
    for case in cases
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}: {c.text}" for n, c in CASES])
def test_calls_are_read_as_the_model_means_them_and_every_mistake_is_named(name: str, case: Case):
    message = FORMATS[name].parse(case.text, SCHEMAS)
    calls = [(call.name, call.arguments) for call in message.calls if isinstance(call, ParsedCall)]
    problems = [call.problem for call in message.calls if not isinstance(call, ParsedCall)]
    assert (calls, message.content) == (case.calls, case.content), problems
    assert len(problems) == len(case.mistakes), problems
    assert all(part in whole for part, whole in zip(case.mistakes, problems, strict=True)), problems
    assert case.why or (case.vllm is None and not problems)


@pytest.mark.parametrize("made", [ID, None, "call_1", "a1B2c3D4e5", 3])
def test_mistral_s_id_of_a_call_is_its_own_if_its_template_takes_it(made: Any):
    call = {"name": "f", "arguments": {}, "id": made}
    listed = FORMATS["mistral"].parse(
        f"[TOOL_CALLS]{[call]}".replace("'", '"').replace("None", "null"), {}
    )
    named = FORMATS["mistral"].parse(f"[TOOL_CALLS]f[CALL_ID]{made}[ARGS]{{}}", {})
    for message in (listed, named):
        (read,) = message.calls
        assert isinstance(read, ParsedCall) and read.call_id == (made if made == ID else None)
