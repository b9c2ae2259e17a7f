"""The chat templates of public models, from the wheel of TRL: a loop of tools only adds to them."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
)

from agent_loop.gateway import chat_completions
from agent_loop.gateway.chains import Chains
from agent_loop.gateway.template import ChatTemplate
from agent_loop.turns.codec import codec_of
from agent_loop.turns.tool_messages import CallId, CannotContinue, ToolMessages, written
from tests.fakes.pinned_environment import ROOT, cache_of, install
from tests.fakes.real_tokenizers import byte_tokenizer

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(600)]

PINS = ROOT / "tests/fakes/public_models/requirements.txt"
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|call|>", "<|return|>", "<|end|>"),
    *("<turn|>", "<|observation|>", "<|user|>", "<|eot|>", "[/TOOL_CALLS]", "<|tool_response>"),
    *("<|endoftext|>", "<end_of_turn>", "<|end_of_text|>", "</assistant>"),
)
"""At which the engines of these models stop."""

CODEC = codec_of(byte_tokenizer(ENDS))
END_IDS = frozenset(CODEC.encode(end)[0] for end in ENDS)
CODEC.add_ends([*END_IDS])
MARKS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
FUNCTION = {"name": "probe", "description": "d", "parameters": SCHEMA}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "u"}
ONE_CALL = ("llama3_1", "llama3_2")
"""Their templates raise where a message has several."""

Render = Callable[[Sequence[Any], bool], str]


@pytest.fixture(scope="module")
def templates() -> dict[str, Render]:
    folder = cache_of([PINS], "public-models")
    if not (folder / "trl").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
        install([*pip, "-r", PINS], folder)
    texts = {
        path.stem: path.read_text() for path in Path(folder).glob("trl/chat_templates/*.jinja")
    }
    return {
        name: renderer(text)
        for name, text in sorted(texts.items())
        if "tool_calls" in text and "tools" in text
    }


def renderer(text: str) -> Render:
    compiled = _compile_jinja_template(text)
    return lambda messages, prompt: compiled.render(
        messages=messages, tools=TOOLS, add_generation_prompt=prompt, **MARKS
    )


def turn(arguments: Any, number: int, calls: int, **said: Any) -> list[dict[str, Any]]:
    """A message of the model with calls, and their results."""
    ids = [f"call_{number}{at}" for at in range(calls)]
    functions = {"type": "function", "function": {"name": "probe", "arguments": arguments}}
    asked = [{"id": own, **functions} for own in ids]
    return [
        {"role": "assistant", "content": "", "tool_calls": asked, **said},
        *({"role": "tool", "tool_call_id": own, "name": "probe", "content": "r"} for own in ids),
    ]


def glue_of(render: Render) -> ToolMessages:
    return ToolMessages(render, CODEC.encode, END_IDS)


def test_native_calls_can_go_on_in_every_template(templates: dict[str, Render]):
    refused = dict[str, str]()
    for name, render in templates.items():
        try:
            glue_of(render).check(several=name not in ONE_CALL)
        except CannotContinue as error:
            refused[name] = str(error)
    assert (len(templates), refused) == (44, {})


@pytest.mark.parametrize("said", [{}, {"reasoning_content": "hm"}], ids=["plain", "thinks"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_loop_reads_what_the_template_renders(
    templates: dict[str, Render], calls: int, said: dict[str, Any]
):
    """The model's own text, as the template has it, and the glue are the template's rendering."""
    compared, differ = 0, list[str]()
    for name, render in templates.items():
        if calls == 2 and name in ONE_CALL:
            continue
        messages = glue_of(render)
        conversation: list[Any] = [USER]
        read = render(conversation, True)
        for number in (0, 1):
            arguments = '{"q": "a"}' if messages.takes_text_arguments else {"q": "a"}
            asked, *results = turn(arguments, number, calls, **said)
            before = render(conversation, True)
            whole = render([*conversation, asked], False)
            conversation += [asked, *results]
            if not whole.startswith(before):  # the template's prompt thinks otherwise
                break
            ids = [CallId("probe", each["tool_call_id"]) for each in results]
            glue = messages.glue(ids, (), bool(said))
            assert glue.end_id is not None
            end, own = CODEC.decode([glue.end_id]), whole[len(before) :]
            own = own.rpartition(end)[0] if end in own else own  # the engine stops at the end
            read += own + end + CODEC.decode(glue.pieces[0])
            for result, writing, piece in zip(results, glue.writings, glue.pieces[1:], strict=True):
                read += written(result["content"], writing) + CODEC.decode(piece)
            if read != render(conversation, True):
                differ.append(name)
                break
            compared += 1
    assert compared > 60 and differ == ([] if said else ["qwen3"])  # its empty thought


@pytest.mark.parametrize("thoughts", ["none", "first", "all"])
def test_a_loop_behind_the_gateway_is_one_row(templates: dict[str, Render], thoughts: str):
    begun = dict[str, list[str]]()
    for name, render in templates.items():
        template = ChatTemplate(
            lambda messages, tools, render=render: CODEC.encode(render(messages, True)),
            lambda tools, render=render: render,
            *(CODEC, CODEC.mark_texts, 100_000),
        )
        chains, conversation = Chains(template), [USER]
        for number in range(4):
            body = {"model": "m", "messages": conversation, "tools": TOOLS}
            where = asyncio.run(chains.place(chat_completions.parse(body), 1.0))
            trajectory = where.sequence.rollout.trajectory
            trajectory.add_tool_tokens(where.added, "")
            trajectory.add_model_tokens([min(END_IDS)], [-1.0])
            thinks = thoughts == "all" or (thoughts == "first" and number == 0)
            said = {"reasoning_content": "hm"} if thinks else {}
            asked, *results = turn(f'{{"q": "{number}"}}', number, 1, **said)
            (told,) = chat_completions.parse({**body, "messages": [asked]}).messages
            chains.say(where.sequence, told)
            conversation = [*conversation, asked, *results]
        begun[name] = [sequence.rollout.cause for sequence in chains.sequences]
    assert set(map(tuple, begun.values())) == {("",)}, begun
