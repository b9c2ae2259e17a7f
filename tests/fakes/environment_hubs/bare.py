"""Plays an episode with a library alone, and prints its rewards: `bare.py LIBRARY SEED ACTIONS`.

Runs in the interpreter of the library. The actions are a JSON list, the rewards too.
"""

import json
import random
import sys
from collections.abc import Iterator


def frozen_lake(seed: int, actions: list[str]) -> Iterator[float]:
    import gymnasium
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    lake = generate_random_map(size=4, seed=seed)
    env = gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False)
    env.reset(seed=seed)
    for action in actions:
        yield float(env.step(["left", "down", "right", "up"].index(action))[1])


def mastermind(seed: int, actions: list[str]) -> Iterator[float]:
    import textarena

    env = textarena.make("Mastermind-v0", max_turns=4)
    env.reset(num_players=1, seed=seed)
    for action in actions:
        done, _ = env.step(action)
        yield float(env.close()[0][0]) if done else 0.0


def hangman(seed: int, actions: list[str]) -> Iterator[float]:
    import textarena

    random.seed(seed)  # as the taskset of verifiers does
    env = textarena.make("Hangman-v0")
    env.reset(num_players=1)
    for action in actions:
        done, _ = env.step(action)
        yield float(env.close()[0][0]) if done else 0.0


if __name__ == "__main__":
    library, seed, actions = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    rewards = list(
        {each.__name__: each for each in (frozen_lake, mastermind, hangman)}[library](seed, actions)
    )
    print(json.dumps(rewards), file=sys.stderr)
