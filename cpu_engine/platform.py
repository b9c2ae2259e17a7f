"""A `cpu` platform for verl, which has platforms for accelerators only.

verl adapter: `PlatformRegistry` (plugin/platform at 0.9.1). Every process imports this module, so
it must not import anything heavy.
"""

# verl declares abstract properties where its own platforms, and this one, set class attributes.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

import os
import resource
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CPUDeviceId(str):
    """A device index that is "cpu" for torch and 0 in an f-string.

    verl passes it to `tensor.to()`, and also writes `f"{device_name}:{index}"`
    (utils/fsdp_utils.py:229), which must be "cpu:0".
    """

    __slots__ = ()

    def __new__(cls) -> "CPUDeviceId":
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"

    def __reduce__(self) -> tuple[type["CPUDeviceId"], tuple[()]]:
        return (CPUDeviceId, ())


def _do_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """In place of methods that have no meaning on a CPU."""


class CPUDeviceModule:
    """What verl uses of `torch.cuda`, for a CPU. Other names are those of `torch.cpu`."""

    current_device = CPUDeviceId
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    empty_cache = ipc_collect = reset_accumulated_memory_stats = _do_nothing
    reset_peak_memory_stats = reset_max_memory_allocated = _do_nothing
    set_per_process_memory_fraction = _do_nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))

    def memory_allocated(self, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


_MODULE = CPUDeviceModule()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The platform that verl takes if no accelerator is available."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE
    current_device = CPUDeviceId
    device_count = staticmethod(_MODULE.device_count)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = empty_cache = set_allocator_settings = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing
    nvtx_range = nullcontext

    def is_available(self) -> bool:
        return True  # verl asks accelerators first, because this platform is registered last

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # verl's resource pools count "GPU" and "NPU" only (single_controller/ray/base.py:226). So a
        # run on a CPU declares logical GPUs with ray_kwargs.ray_init.num_gpus.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
