"""Extraction of code from a model's answer: the text between the fences of Markdown.

The rule is the one of SandboxFusion's `POST /submit`.
"""

import re

_FENCED = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
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
    blocks = [(name.lower(), code) for name, code in _FENCED.findall(completion)]
    wanted = _NAMES.get(language, {language.lower()})
    for names in (wanted, {""}):
        for name, code in reversed(blocks):
            if name in names:
                return code.strip("\n")
    return completion if not blocks else blocks[-1][1].strip("\n")
