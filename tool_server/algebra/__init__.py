"""Algebra for `POST /calculate`: equations, symbols, calculus and matrices, with sympy.

- `syntax` parses a typed expression into a Python syntax tree.
- `build` turns the tree into sympy objects, with allowed functions only (`functions`). No text
  reaches sympy's own parser, because that parser evaluates its text as Python.
- `worker` is the process in which sympy calculates, and `pool` kills workers that take too long,
  because sympy can take any time and memory.
"""
