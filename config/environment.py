"""Which variables of the jumphost a cluster gets, and the port of Ray's dashboard.

The jumphost imports it without any package.
"""

import socket

ENV_FORWARD = (
    "NCCL_* RCCL_* GLOO_* UCX_* FI_* HF_* TRANSFORMERS_* TOKENIZERS_* WANDB_* CUDA_* PYTORCH_* "
    "TORCH_* VLLM_* SGLANG_* RAY_* OMP_NUM_THREADS http_proxy https_proxy no_proxy all_proxy "
    "HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY"
)
"""Shell patterns of their names; the setting `ENV_FORWARD` replaces them."""

DASHBOARD_PORT = 8265
"""Ray's default for its dashboard, and the one of our profiles."""

RUN_MARK = "VERL_MIXED_RUN_DIR"
"""Environment variable with the folder of a run, in all its processes: its launcher ends them."""


def why_taken(host: str, port: int) -> str | None:
    """Why nobody can listen there; None if it is free."""
    try:
        socket.create_server((host, port), reuse_port=False).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
