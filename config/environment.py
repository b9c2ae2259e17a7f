"""Which variables of the jumphost a cluster gets. The jumphost imports it without any package."""

ENV_FORWARD = (
    "NCCL_* RCCL_* GLOO_* UCX_* FI_* HF_* TRANSFORMERS_* TOKENIZERS_* WANDB_* CUDA_* PYTORCH_* "
    "TORCH_* VLLM_* SGLANG_* RAY_* OMP_NUM_THREADS http_proxy https_proxy no_proxy all_proxy "
    "HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY"
)
"""Shell patterns of their names; the setting `ENV_FORWARD` replaces them."""

RUN_MARK = "VERL_MIXED_RUN_DIR"
"""Environment variable with the folder of a run, in all its processes: its launcher ends them."""
