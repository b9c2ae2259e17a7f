"""Keeps the driver's folder off the path of Ray's workers.

Ray puts the current folder of the driver first on `sys.path` of each worker, unless the job has a
working directory (ray/_private/worker.py:2716 at 2.60). A user's config.py there would hide ours.
`agent_loop.plugin` adds the folder last, behind our packages.
"""


def keep_folder_off_workers() -> None:
    """Call it before `ray.init`. Replaces the method by which Ray asks for a working directory."""
    from ray.job_config import JobConfig

    JobConfig._runtime_env_has_working_dir = lambda self: True
