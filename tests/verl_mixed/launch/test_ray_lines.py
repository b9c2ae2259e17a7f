"""What a start prints about Ray's dashboard, and about a Ray that runs already."""

import getpass
import socket
from pathlib import Path
from typing import Any

import pytest

from verl_mixed.launch.ray_lines import dashboard_line, found_line

OWN = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 9999}
SAID = (
    "INFO worker.py:2029 -- Started a local Ray instance. View the dashboard at "
    "\x1b[1m\x1b[32mhttp://127.0.0.1:8265\x1b[39m\x1b[22m\n"
)
"""In train.log. Ray has another port than the config names."""

JUMP = {"SSH_HEAD": "ssh -J me@bastion 10.0.0.1"}
HERE = "http://127.0.0.1:8265"
TUNNEL = "-N -L 8265:127.0.0.1:8265"


def config_of(**ray_init: Any) -> dict[str, Any]:
    return {"ray_kwargs": {"ray_init": ray_init}}


@pytest.mark.parametrize(
    ("ray_init", "cluster", "environ", "expected"),
    [
        (OWN, None, {}, HERE),
        (OWN, None, JUMP, f"{HERE} through: ssh -J me@bastion 10.0.0.1 {TUNNEL}"),
        (
            OWN,
            None,
            {"SSH_CONNECTION": "10.9.9.9 50000 10.0.0.1 22"},
            f"{HERE} through: ssh {getpass.getuser()}@10.0.0.1 {TUNNEL}",
        ),
        (
            OWN,
            None,
            {"SSH_CONNECTION": "10.9.9.9 50000 10.0.0.1 2222"},
            f"{HERE} through: ssh -p 2222 {getpass.getuser()}@10.0.0.1 {TUNNEL}",
        ),
        (OWN | {"dashboard_host": "10.0.0.1"}, None, JUMP, "http://10.0.0.1:8265"),
        (OWN | {"dashboard_host": "0.0.0.0"}, None, {}, f"http://{socket.gethostname()}:8265"),
        ({}, "10.0.0.1:6379", JUMP, None),
        (
            {},
            "10.0.0.1:6379",
            JUMP | {"RAY_DASHBOARD_PORT": "8265"},
            f"{HERE} through: ssh -J me@bastion 10.0.0.1 {TUNNEL}",
        ),
    ],
)
def test_the_dashboard_has_an_address_to_open_and_a_tunnel_where_one_is_needed(
    ray_init: dict[str, Any], cluster: str | None, environ: dict[str, str], expected: str | None
) -> None:
    assert dashboard_line(config_of(**ray_init), cluster, environ, SAID) == expected
    assert cluster or dashboard_line(config_of(**ray_init), None, environ, "ray init") is None


def test_a_ray_that_answers_is_named_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    environ = {"TMPDIR": "/nowhere", "RAY_TMPDIR": str(tmp_path)}
    record = tmp_path / "ray" / "ray_current_cluster"
    assert found_line(config_of(), environ) is None

    record.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as ray:
        address = f"127.0.0.1:{ray.getsockname()[1]}"
        record.write_text(address)
        expected = f"found {address}, started by hand; this run starts its own; RAY_ADDRESS="
        expected += f"{address} joins it"

        assert found_line(config_of(), environ) == expected
        assert found_line(config_of(_temp_dir=str(record.parent)), {}) == expected
        assert found_line(config_of(_temp_dir="/nowhere"), environ) is None

    assert found_line(config_of(), environ) is None
