"""What we read in verl 0.9.1's source and build on, place by place; `test_verl_contract.py` holds
verl against it. Where behaviour can be tried without Ray or a GPU, it is tried there instead."""

from tests.verl_hooks.agent_loops import AGENT_LOOPS
from tests.verl_hooks.buffers import BUFFERS
from tests.verl_hooks.engines import ENGINES, ROLLOUT, VLLM_SERVER
from tests.verl_hooks.hook import Hook
from tests.verl_hooks.start import START
from tests.verl_hooks.trainer import TRAINER

HOOKS = (*START, *TRAINER, *BUFFERS, *AGENT_LOOPS, *ENGINES, *ROLLOUT)

__all__ = ["HOOKS", "VLLM_SERVER", "Hook"]
