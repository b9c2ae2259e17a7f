"""The tool server: runs model-written code, searches passages and calculates, over HTTP.

It speaks the protocols of SandboxFusion and Search-R1. A wrong request is answered with 400 and one
message. A tool that cannot work (no corpus, no isolation) answers 503. A tool whose queue is full
answers 429 with `Retry-After`.
"""
