"""How a run starts: entry, Ray, resource pools, process group."""

from tests.verl_hooks.hook import Hook

START = (
    Hook(
        "trainer.main_ppo:run_ppo",
        "agent_loop/training/main.py",
        says=(
            "if not ray.is_initialized()",
            "task_runner_class.remote()",
            "runner.run.remote(config)",
        ),
        takes=("config", "task_runner_class"),
    ),
    Hook(
        "trainer.main_ppo",
        "rollout.agent.agent_loop_manager_class (agent_loop/training/verl_adapters/loop_worker.py)",
        says=('.get("agent_loop_manager_class")',),
    ),
    Hook(
        "trainer.constants_ppo:get_ppo_ray_runtime_env",
        "agent_loop/training/main.py",
        takes=("config",),
    ),
    Hook(
        "utils.config:validate_config",
        "agent_loop/training/main.py",
        takes=("config", "use_reference_policy", "use_critic"),
    ),
    Hook("utils.device:auto_set_device", "agent_loop/training/main.py", takes=("config",)),
    Hook(
        "single_controller.ray.base:RayResourcePool",
        "cluster/placement.py: 3 CPUs and 1 GPU a process, logical GPUs on a CPU",
        says=('bundle = {"CPU": self.max_colocate_count}',),
    ),
    Hook(
        "single_controller.ray.base:ResourcePoolManager",
        "cpu_engine/platform.py: a CPU is counted as a logical GPU",
        says=("max_colocate_count: int = 3", 'node_info.get("GPU", 0)', 'node_info.get("NPU", 0)'),
    ),
    Hook(
        "workers.rollout.replica:RolloutReplica.init_standalone",
        "cluster/placement.py: 2 CPUs a process that only generates",
        says=("[self.gpus_per_replica_node] * self.nnodes", "max_colocate_count=2"),
    ),
)
