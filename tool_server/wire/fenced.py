"""Extraction of code from a model's answer: the text between the fences of Markdown.

The rule is the one of SandboxFusion's `POST /submit`.
"""

import re
from collections.abc import Iterator

_LANGUAGE = re.compile(r"[ \t]*([\w+#-]*)")
_NAMES = {
    "cpp": {"cpp", "c++", "cc"},
    "nodejs": {"nodejs", "javascript", "js", "node"},
    "python": {"python", "py", "python3"},
    "bash": {"bash", "sh", "shell"},
}


def extract_code(completion: str, language: str) -> str:
    """The code of an answer.

    The last fenced block of this language; without one, the last block that names no language;
    without one, the last block; without any block, the whole answer.
    """
    blocks = list(_blocks(completion))
    wanted = _NAMES.get(language, {language.lower()})
    for names in (wanted, {""}):
        for name, code in reversed(blocks):
            if name in names:
                return code.strip("\n")
    return completion if not blocks else blocks[-1][1].strip("\n")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and code of each block; the last one may lack its closing fence.

    Takes time in proportion to the text. One regular expression took 25 s for 256 KB of backticks.
    """
    fence = text.find("```")
    while fence >= 0 and (line_end := text.find("\n", fence)) >= 0:
        language = _LANGUAGE.match(text, fence + 3, line_end)
        assert language is not None  # it matches an empty text too
        closing = text.find("```", line_end + 1)
        yield language[1].lower(), text[line_end + 1 : None if closing < 0 else closing]
        fence = -1 if closing < 0 else text.find("```", closing + 3)
