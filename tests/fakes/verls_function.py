"""A tool as verl's users write one, for `multi_turn.function_tool_path`."""

from verl.tools.function_tool import function_tool


@function_tool
def glance(thing: str) -> str:
    """Look shortly.

    Args:
        thing: what
    """
    return f"a {thing}"
