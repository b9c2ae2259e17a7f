"""Agent loops that the run config registers, and blocks that nothing would read."""

from pathlib import Path

import pytest

from config.lookup import CONFIG_DIR
from config.schema import ConfigError
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config.unknown import BLOCKS, block_problems
from verl_mixed.checks.preflight import mixture_problems
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import compose_config
from verl_mixed.run.sections import agent_loops

MIXTURE = """\
# @package mixed
agent_loops:
  lookup_agent: {_target_: my_loops.LookupAgentLoop}
  search_agent: {topk: 5, system_prompt: of the mixture}
sources:
  math: {ratio: 1, agent: lookup_agent, reward: math}
  taco: {ratio: 0}
"""
PROFILE = """\
# @package _global_
defaults: [laptop]
agent_loops:
  search_agent: {topk: 7}
  own_agent: {_target_: my_loops.OwnAgentLoop, depth: 2}
"""


def with_files(tmp_path: Path, **texts: str) -> list[str]:
    """Overrides that choose a user's own files, by group."""
    for group, text in texts.items():
        path = tmp_path / "own" / group / "mine.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return [f"hydra.searchpath=['file://{tmp_path}/own']", *(f"{group}=mine" for group in texts)]


@pytest.mark.slow
def test_blocks_register_agents_over_those_of_the_file(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    del run_environ["NQ_RATIO"], run_environ["TACO_RATIO"]
    overrides = with_files(tmp_path, mixture=MIXTURE, profile=PROFILE)
    config = make_plan(overrides, run_environ).config
    loops, problems = agent_loops(config)
    assert problems == [] and loops is not None
    assert loops["lookup_agent"] == {
        "_target_": "my_loops.LookupAgentLoop",
        "name": "lookup_agent",
    }
    assert loops["own_agent"]["depth"] == 2
    of_search = loops["search_agent"]
    assert of_search["_target_"] == "agent_loop.search_agent_loop.SearchAgentLoop"
    assert (of_search["topk"], of_search["system_prompt"]) == (7, "of the mixture")
    assert "no such agent" not in "\n".join(mixture_problems(config, data=False))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("++agent_loops.my_agent.topk=1", "my_agent: it has no _target_, and "),
        ("++agent_loops.my_agent=5", "my_agent=5: want its settings, as {_target_: package."),
        ("++agent_loops.my_agent._target_=Loop", "my_agent: _target_='Loop' is no package."),
        ("++agent_loops.search_agent.name=b", "search_agent.name='b': the key is the name; "),
        ("++agent_loops.search_agent.system_prompt=5", "search_agent: system_prompt=5 is not a"),
        ("++agent_loops.search_agent.topc=1", "has no setting topc=1; did you mean topk?"),
        ("++mixed.agent_loops.my_agent=null", "mixed.agent_loops.my_agent=None: want its"),
        ("++mixed.agents={}", "mixed.agents: Extra inputs are not permitted; did you mean mixed."),
        ("mixed.sources.math.agent=nobody", "config/agent_loops.yaml, or as agent_loops.<name>"),
    ],
)
def test_a_mistake_of_an_agent_loop_is_one_line(
    run_environ: RunEnviron, override: str, said: str
) -> None:
    (found,) = mixture_problems(make_plan([override], run_environ).config, data=False)
    assert said in found


def test_blocks_that_nothing_reads_are_refused_with_the_nearest_name(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    text = (
        "# @package _global_\ndefaults: [laptop]\nagent_loop: {}\nrate_limit: {shares: null}\n"
        "zzz: 1\nown: {lr: 1.0e-4}\nactor_rollout_ref: {actor: {optim: {lr: '${own.lr}'}}}\n"
    )
    with pytest.raises(ConfigError) as refused:
        make_plan(with_files(tmp_path, profile=text), run_environ)
    ends = {
        problem.partition(":")[0]: problem.rpartition("; ")[2] for problem in refused.value.problems
    }
    assert ends == {
        "agent_loop": "did you mean agent_loops?",
        "rate_limit": "did you mean mixed.rate_limit?",
        "zzz": "remove it",
    }


def test_a_block_in_the_shipped_file_itself_is_refused() -> None:
    assert {*compose_config([])} == {*BLOCKS}
    found = [*block_problems({"agent_lops": {}, "mixed": {}, "mixture": {"sources": {}}})]
    assert [problem.rpartition("; ")[2] for problem in found] == [
        "did you mean agent_loops?",
        "begin the file of config/mixture with the line `# @package mixed`",
    ]
    assert "\nagent_loops: {}\n" in (CONFIG_DIR / "mixed_dataset_grpo.yaml").read_text()
