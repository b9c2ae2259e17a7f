"""Tags, ReAct's lines and native calls in one mixture, on the real trainer."""

from collections import Counter
from pathlib import Path

import pytest

from agent_loop.records.mask_audit import audit_masks
from tests.e2e.jobs import finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.algorithm,
    pytest.mark.timeout(1500),
]

FORMS = {"taco": "tags", "nq": "react", "math": "native"}
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of mixture=three_forms, with a model that was taught the forms for a short time."""
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    demo = tmp_path_factory.mktemp("demo") / "forms"
    recipe = Recipe(
        traces=4000, min_steps=300, max_steps=300, floor=0.0, probe_prompts=2, forms=FORMS
    )
    prepare_demo(demo, 0, recipe=recipe, threads=1, progress=lambda line: None)
    work = tmp_path_factory.mktemp("work")
    overrides = ["mixture=three_forms", "ray_kwargs.ray_init.include_dashboard=false"]
    job = job_of("three_forms", demo, work, overrides, STEPS)
    finish(start(job.command, work, work / "out.txt"), work / "out.txt")
    return job.folder


def test_each_source_calls_its_tool_in_its_own_form(run: Path):
    config = load_config(run / "config.yaml")
    assert config["actor_rollout_ref"]["rollout"]["multi_turn"]["format"] == "hermes"
    forms = {"taco": ("<code>", "<answer>"), "nq": ("Action:",), "math": ("<tool_call>",)}
    called: Counter[tuple[str, str]] = Counter()
    spoke: set[str] = set()
    for step in range(1, STEPS + 1):
        for record in read_lines(run / "trajectories" / f"{step}.jsonl"):
            assert record["loop_error"] is None and record["fault"] is None
            tools = {call["tool"] for call in record["calls"] if call["status"] == "ok"}
            called.update((record["source"], tool) for tool in tools)
            first = next(text for author, _, _, text in record["segments"] if author == "model")
            is_own = any(form in first for form in forms[record["source"]])
            assert is_own or not tools
            if is_own:
                spoke.add(record["source"])
    assert spoke == FORMS.keys()  # the short warm start of taco leaves out most calls
    calls = {("nq", "retrieve"), ("math", "calculate")}
    assert calls <= called.keys() <= calls | {("taco", "run_code")}


def test_batches_are_exact_and_masks_are_clean(run: Path):
    audit = audit_run(RunFolder(run), load_config(run / "config.yaml"))
    assert audit.ok, describe(audit)
    masks = audit_masks(run)
    assert masks.ok and masks.tool_tokens > 0, str(masks)
