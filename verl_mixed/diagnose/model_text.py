"""Which lines of a log are text that a model or a tool wrote: an error there is none of the run.

verl prints samples of a validation (`[prompt]`, `[response]`, `[ground_truth]`, `[score]`), chat
templates have marks, and logs hold trajectories as JSON or as quoted texts. Standard library only.
"""

import re

MOST_LINES = 400
"""Lines of one process after which a sample counts as ended, whatever they say."""

OPENERS = ("[prompt]", "[response]", "<|im_start|>", "<tool_response>", "<interpreter>")
"""Texts that begin a sample; they are cues of the scan."""

_SAMPLE = re.compile(r"\[(?:prompt|response)\]")
_SAMPLE_END = re.compile(r"\[(?!prompt\]|response\])[\w /@.-]{1,40}\]|step:\d")
_TAGS = (
    ("<|im_start|>", "<|im_end|>"),
    ("<tool_response>", "</tool_response>"),
    ("<interpreter>", "</interpreter>"),
)
_NAMES = (
    "response|output|outputs|completion|content|messages|prompt|observation|tool_result"
    "|tool_response|stdout|generated_text|ground_truth|solution|predictions?|text"
)
_QUOTED = re.compile(
    rf"""["'](?:{_NAMES})["']\s*:\s*["'\[{{]|\b(?:{_NAMES})=["']"""
    r"|<(?:tool_response|interpreter|information|think|observation|answer|\|im_start\|)>"
    r"|\[(?:prompt|response)\] "
)
_RECORD = re.compile(rf"""\{{["'].*["'](?:{_NAMES})["']\s*:""")
_OF_PROGRAM = re.compile(
    r'File "(?:<(?:string|stdin|exec|unknown)>|/tmp/tmp\w+(?:/\w+)?\.py|(?:\S*/)?solution\.py)"'
)
_FRAME = re.compile(r'\s+File "')


class ModelText:
    """Follows whether the lines of each process are a sample of the model's text."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, int]] = {}
        """Process -> (text that ends its sample, lines so far)."""

    def __bool__(self) -> bool:
        """Whether a sample is open; then every line must be given to `holds`."""
        return bool(self._open)

    def holds(self, speaker: str, text: str) -> bool:
        """Whether this line of a process is a sample of the model's text."""
        if speaker in self._open:
            end, lines = self._open.pop(speaker)
            is_end = _SAMPLE_END.match(text) if end == "[" else end in text
            if lines >= MOST_LINES or (end == "[" and is_end):
                return False
            if not is_end:
                self._open[speaker] = (end, lines + 1)
            return True
        if _SAMPLE.match(text):
            self._open[speaker] = ("[", 0)
            return True
        for begin, end in _TAGS:
            at = text.rfind(begin)
            if at >= 0 and end not in text[at:]:
                self._open[speaker] = (end, 0)
                return True
        return False


def is_quoted(text: str, at: int) -> bool:
    """Whether the character `at` of a line is inside a text that the line only quotes."""
    return _QUOTED.search(text, 0, at) is not None or _RECORD.match(text) is not None


def frame_of_run(text: str) -> bool | None:
    """Whether a line names a frame of the run's own code; None if it names no frame.

    A frame in `<string>` or in a temporary file is one of a program that a model wrote.
    """
    if not _FRAME.match(text):
        return None
    return _OF_PROGRAM.search(text) is None
