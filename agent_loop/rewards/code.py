"""Programs judged by hidden stdin/stdout tests, in the same sandbox as the model's own runs.

TACO: Li et al. 2023; the tests are the row's `input_output`.
"""

from typing import Any

from agent_loop.compat import gather_all
from agent_loop.rewards.verdict import no_answer, verdict
from agent_loop.tools.protocol import ToolBackend, ToolRejected, run_code_call


async def score(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """The share of hidden tests that a program passes.

    Args:
        answer: the program, None without one.
        ground_truth: `{"inputs": [str], "outputs": [str]}`, one pair a test.
        tools: runs the program.

    Raises:
        ToolUnavailable: the sandbox could not be reached: no verdict.
        ValueError: the row has no tests.
    """
    inputs, outputs = ground_truth["inputs"], ground_truth["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"cannot judge a program by {len(inputs)} inputs and {len(outputs)} outputs: each row "
            "needs as many outputs as inputs, and at least one; prepare the data again"
        )
    if answer is None or not answer.strip():
        return no_answer()
    verdicts = await gather_all(
        [
            _passes(answer, stdin, expected, tools)
            for stdin, expected in zip(inputs, outputs, strict=True)
        ]
    )
    passed = sum(verdicts) / len(verdicts)
    return verdict(passed, acc=float(passed == 1))


async def _passes(program: str, stdin: str, expected: str, tools: ToolBackend) -> bool:
    try:
        body = (await tools.call(run_code_call(program, stdin, deterministic=True))).body
    except ToolRejected:
        return False  # a program that the server does not even take
    return body.get("status") == "Success" and same_output(body["run_result"]["stdout"], expected)


def same_output(got: str, expected: str) -> bool:
    """Whether two outputs agree but for white space at the ends of lines and of the text."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (got, expected)]
    return lines[0] == lines[1]
