"""What a source sets for itself reaches its rollouts, and nobody else's."""

from agent_loop.loop_settings import LoopSettings
from agent_loop.turns.turn_loop import Budget
from agent_loop.watchdog import Watchdog
from config.schema import MixedConfig, ToolConfig

SETTINGS = LoopSettings(
    mixed=MixedConfig.model_validate(
        {
            "experiment": "x",
            "run_dir": "/x",
            "sources": {
                "math": {"ratio": 1},
                "nq": {
                    "ratio": 1,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "max_turns": 5,
                    "max_response_length": 64,
                },
                "taco": {"ratio": 1, "max_response_length": 4096, "observation_style": "chat"},
            },
        }
    ),
    tools=ToolConfig(server_url="http://127.0.0.1:1"),
    budget=Budget(max_turns=3, response_length=160),
    sampling={"temperature": 1.0, "top_p": 1.0},
    max_actions=1,
    backend="hf",
    watchdog=Watchdog(60.0),
)
TRAINING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def test_a_source_without_settings_of_its_own_has_the_common_ones():
    for source in ("math", "unknown"):
        assert SETTINGS.budget_of(source) == SETTINGS.budget
        assert SETTINGS.sampling_of(source, TRAINING) == TRAINING


def test_a_source_s_own_settings_stand_in_place_of_the_common_ones():
    assert SETTINGS.sampling_of("nq", TRAINING) == {"temperature": 0.7, "top_p": 0.9, "top_k": -1}
    budget = SETTINGS.budget_of("nq")
    assert (budget.max_turns, budget.response_length) == (5, 64)


def test_the_common_length_bounds_a_source_s_own():
    assert SETTINGS.budget_of("taco").response_length == 160


def test_a_validation_that_samples_otherwise_keeps_its_own_sampling():
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert SETTINGS.sampling_of("nq", greedy) == {**greedy, "top_p": 0.9}


def test_a_source_s_own_observation_style_and_reward_stand_before_the_common_ones():
    assert SETTINGS.observation_style_of("taco") == "chat"
    assert SETTINGS.observation_style_of("nq") == SETTINGS.observation_style_of("x") == "inline"
    assert (SETTINGS.reward_of("taco").name, SETTINGS.reward_name_of("x")) == (
        "code",
        "exact_match",
    )
