"""Algebra for `POST /calculate`: equations, symbols, calculus and matrices, by sympy.

A typed expression is parsed by `syntax` and built into sympy's objects node by node, from a list of
what is allowed (`build`, `functions`): sympy's own parser evaluates its text as Python, so no text
ever reaches it. What sympy then does can take any time and memory, so it happens in processes
(`worker`) that are killed when it does (`pool`).
"""
