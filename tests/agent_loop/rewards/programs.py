# ruff: noqa: E501 -- programs stand as they were written
"""Programs and their verdicts, written by us: each way to read, to write and to define a function.

`STDIN` has (name, program, input, expected output), `CALLS` (name, program, arguments, expected
result). Those of `PASS_*` are right and those of `FAIL_*` are not. docs/mixture.md says where the
public checkers of TACO, APPS and LiveCodeBench differ.
"""

from typing import Any

_SPLIT = "n = int(rows[0]); a = list(map(int, rows[1].split()))\n"
READS = {
    "input": "n = int(input()); a = list(map(int, input().split()))\n",
    "readline": (
        "import sys\ninput = sys.stdin.readline\n"
        "n = int(input()); a = list(map(int, input().split()))\n"
    ),
    "read": "import sys\nn, *a = map(int, sys.stdin.read().split())\n",
    "readlines": "import sys\nrows = sys.stdin.readlines()\n" + _SPLIT,
    "lines": "import sys\nrows = list(sys.stdin)\n" + _SPLIT,
    "buffer": "import sys\nn, *a = map(int, sys.stdin.buffer.read().split())\n",
    "lines of the buffer": (
        "import sys\nrows = sys.stdin.buffer.readlines()\nassert rows[0] == b'3\\n'\n" + _SPLIT
    ),
    "file 0": "n, *a = map(int, open(0).read().split())\n",
    "file 0 as it is": "rows = open(0, newline='').read().split('\\n')\nassert rows[0] == '3'\n"
    + _SPLIT,
    "os.read": "import os\nn, *a = map(int, os.read(0, 10**6).split())\n",
    "size of the file": (
        "import io, os\nn, *a = map(int, io.BytesIO(os.read(0, os.fstat(0).st_size)).read().split())\n"
    ),
    "fileinput": "import fileinput\nrows = list(fileinput.input())\n" + _SPLIT,
}
WRITES = {
    "print": "print(sum(a))",
    "no line end": "print(sum(a), end='')",
    "blanks": "print(sum(a), ' ')\nprint()",
    "buffer": "import sys\nsys.stdout.buffer.write(str(sum(a)).encode())",
    "os.write": "import os\nos.write(1, str(sum(a)).encode())",
    "stdout replaced": (
        "import io, sys\nsys.stdout = io.StringIO()\nprint(sum(a))\n"
        "text = sys.stdout.getvalue()\nsys.stdout = sys.__stdout__\nprint(text)"
    ),
    "exit": "print(sum(a))\nexit()\nprint(1)",
    "sys.exit(0)": "import sys\nprint(sum(a))\nsys.exit(0)\nprint(1)",
    "os._exit": "import os\nprint(sum(a), flush=True)\nos._exit(0)",
    "main": "def main():\n    print(sum(a))\nif __name__ == '__main__':\n    main()",
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "def deep(n): return n and 1 + deep(n - 1)\n"
        "def main(): print(sum(a) + deep(50_000) - 50_000)\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()"
    ),
    "atexit": "import atexit\natexit.register(lambda: print(sum(a)))",
    "stderr too": "import sys\nprint('noise', file=sys.stderr)\nprint(sum(a))",
}
_NUMBERS = {
    "": ("3\n1 2 3\n", "6\n"),
    "Windows": ("3\r\n1 2 3\r\n", "6\r\n"),
    "old Mac": ("3\r1 2 3\r", "6\r"),
    "byte order mark": ("\ufeff3\n1 2 3", "\ufeff6"),
}
_OWN = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Box:\n    size: int\n    name: str = ''\n"
)

PASS_STDIN: list[tuple[str, str, str, str]] = [
    *(
        (f"{read}, {write} {system}", READS[read] + WRITES[write], *_NUMBERS[system])
        for at, read in enumerate(READS)
        for turn, write in enumerate(WRITES)
        for system in list(_NUMBERS)[(at + turn) % 4 :: 4]
    ),
    *(
        (f"{read} {system}", READS[read] + "print(sum(a))", *_NUMBERS[system])
        for read in READS
        for system in _NUMBERS
    ),
    ("no input", "import sys\nprint(len(sys.stdin.read()))", "", "0\n"),
    ("an empty line", "print(repr(input()))", "\n", "''\n"),
    ("no output", "input()", "1\n", ""),
    ("long numbers", "import math\nprint(len(str(math.factorial(2000))))", "", "5736\n"),
    ("a long input", "print(int(input()) % 2)", "9" * 6000 + "\n", "1\n"),
    ("a long output", "print(10**6000)", "", "1" + "0" * 6000),
    ("letters", "print(input()[::-1])", "äö東\n", "東öä\n"),
    ("own classes", _OWN + "print(Box(int(input())).size)", "6\n", "6\n"),
    (
        "pickle",
        _OWN + "import pickle\nprint(pickle.loads(pickle.dumps(Box(6))).size)",
        "",
        "6\n",
    ),
    ("global", "c = 0\ndef f():\n    global c\n    c += 6\nf()\nprint(c)", "", "6\n"),
    ("a decimal", "print(0.3333333)", "", "0.33333333333\n"),
    ("beside a word", "print('x', 0.3333333)", "", "x 0.33333333333\n"),
    ("a whole number as a decimal", "print(6.0)", "", "6\n"),
    ("tabs", "print('1\\t2')", "", "1 2\n"),
]
FAIL_STDIN: list[tuple[str, str, str, str]] = [
    ("another order of lines", "print(2)\nprint(1)", "", "1\n2\n"),
    ("another order of words", "print(2, 1)", "", "1 2\n"),
    ("one line for two", "print(1, 2)", "", "1\n2\n"),
    ("too much", "print(1)\nprint('noise')", "", "1\n"),
    ("too little", "print(1)", "", "1\n2\n"),
    ("another case", "print('yes')", "", "YES\n"),
    ("exit code 1", "import sys\nprint(5)\nsys.exit(1)", "", "5\n"),
    ("an error at the end", "print(5)\nraise ValueError", "", "5\n"),
    ("a rounded whole number", "print(123456000.0)", "", "123456789\n"),
    ("beyond all floats", "print('1e400')", "", "1e500\n"),
    ("a digit of many", "print(10**6000)", "", "1" + "0" * 5999 + "1"),
    ("a zero in front", "print('007')", "", "7\n"),
    ("no import", "print(gcd(6, 4))", "", "2\n"),
    ("too deep", "def deep(n): return n and 1 + deep(n - 1)\nprint(deep(2000))", "", "2000\n"),
]

_MISSING_IMPORTS = [
    *("comb(4, 2)", "reduce(lambda a, b: a + b, [3, 3])", "Counter([1] * 6)[1]", "deque([6])[0]"),
    *(
        "lcm(2, 3)",
        "isqrt(36)",
        "mean([6, 6])",
        "heappop([6])",
        "bisect_left([1, 2, 3, 4, 5, 6], 7)",
    ),
    *(
        "pow(6, 1, 7)",
        "defaultdict(int)[0] + 6",
        "maxsize * 0 + 6",
        "randint(6, 6)",
        "math.sqrt(36)",
    ),
    *("deepcopy(6)", "len(list(permutations('abc')))", "itemgetter(0)([6])", "operator.add(3, 3)"),
    *(
        "datetime.datetime(2006, 6, 6).month",
        "len(ascii_letters) - 46",
        "int(StringIO('6').read())",
    ),
]
PASS_CALLS: list[tuple[str, str, list[Any], Any]] = [
    ("a function", "def f(x): return 2 * x", [3], 6),
    (
        "a method",
        "class Solution:\n    def f(self, x: List[int]) -> int: return sum(x)",
        [[3, 3]],
        6,
    ),
    ("a static method", "class Solution:\n    @staticmethod\n    def f(x): return 2 * x", [3], 6),
    ("a lambda", "f = lambda x: 2 * x", [3], 6),
    ("a default", "def f(x, y=3): return x + y", [3], 6),
    ("a dataclass", _OWN + "def f(x): return Box(2 * x).size", [3], 6),
    (
        "type hints",
        _OWN + "import typing\ntyping.get_type_hints(Box)\ndef f(x): return 2 * x",
        [3],
        6,
    ),
    (
        "a named tuple",
        "class T(NamedTuple):\n    x: int\ndef f(x): return T(2 * x).x",
        [3],
        6,
    ),
    (
        "pickle",
        _OWN + "import pickle\ndef f(x): return pickle.loads(pickle.dumps(Box(x))).size",
        [6],
        6,
    ),
    (
        "an enum",
        "import enum, pickle\nclass E(enum.Enum):\n    A = 6\n"
        "def f(x): return pickle.loads(pickle.dumps(E.A)).value",
        [3],
        6,
    ),
    ("inspect", "import inspect\ndef f(x): return len(inspect.getsource(f)[:x])", [6], 6),
    ("its module", "import sys\nk = 6\ndef f(x): return sys.modules[__name__].k", [3], 6),
    ("deep", "def deep(n): return n and 1 + deep(n - 1)\ndef f(x): return deep(x)", [5000], 5000),
    ("long numbers", "def f(x): return len(str(10**x))", [6000], 6001),
    ("a copy of its own", "class A: pass\ndef f(x): return deepcopy([A(), x])[1]", [6], 6),
    ("noise", "def f(x):\n    print('noise', end='')\n    return 6", [3], 6),
    ("stdout replaced", "import io\nsys.stdout = io.StringIO()\ndef f(x): return 6", [3], 6),
    (
        "a main program",
        "def f(x): return 6\nif __name__ == '__main__':\n    f(int(input()))",
        [3],
        6,
    ),
    ("tuples", "def f(x): return ((x, x),)", [3], [[3, 3]]),
    ("a generator", "def f(x): return (i for i in [x, x])", [3], [3, 3]),
    ("a dictionary", "def f(d): return {3: d[3]}", [{"3": 6}], {"3": 6}),
    ("a decimal", "def f(x): return 0.1 + 0.2", [3], 0.3),
    *(("imports of sites", f"def f(x): return {call}", [3], 6) for call in _MISSING_IMPORTS),
]
FAIL_CALLS: list[tuple[str, str, list[Any], Any]] = [
    ("another order", "def f(x): return [2, 1]", [3], [1, 2]),
    ("a text", "def f(x): return '6'", [3], 6),
    ("a list around it", "def f(x): return [6]", [3], 6),
    ("an error", "def f(x): raise ValueError", [3], 6),
    ("another name", "def g(x): return 6", [3], 6),
]
