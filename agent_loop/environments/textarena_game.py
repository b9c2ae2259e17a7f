"""Single-player games of TextArena (Guertler et al. 2025), as `use: textarena`.

    environment: {use: textarena, options: {game: Mastermind-v0, code_length: 3}}

The model reads what the game says since its last move, not the whole history again, because the
history is in its context. The reward comes with the last step: TextArena's own, from 0 to 1 in most
games, and -1 for a game that an invalid move ended in some.

Source: textarena 0.7.4, envs/registration.py and core.py.
"""

# The packages of games are in an extra.
# pyright: reportMissingImports=false

from collections.abc import Mapping
from typing import Any

from agent_loop.environments.episode import Step

PLAYER = 0


def _check_package() -> tuple[Any, Any, Any]:
    """What is needed of the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
        from textarena.wrappers import ActionFormattingWrapper
    except ImportError as error:
        raise ImportError(
            f"use: textarena needs the package textarena ({error}); install the extra `textarena` "
            "of this project"
        ) from error
    return textarena, ENV_REGISTRY, ActionFormattingWrapper


class TextArenaGame:
    """A game.

    Args:
        game: its id, as `Mastermind-v0`; games of several players are refused.
        settings: other arguments of the game, as `max_turns`.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        ta, registry, formatting = _check_package()
        spec = registry.get(game)
        raw = registry.get(f"{game.removesuffix('-train')}-raw")
        if spec is None or raw is None:
            raise ValueError(f"game={game!r}: textarena has no such game; see its list of games")
        self._game = game
        self._env: Any = _explained(game, lambda: ta.make(raw.id, **settings))
        if formatting in (spec.default_wrappers or ()):
            self._env = formatting(self._env)  # brackets around a move without any

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin the game of the row's seed (`extras.seed`)."""
        seed = int(row["extras"].get("seed", 0))
        _explained(self._game, lambda: self._env.reset(num_players=1, seed=seed))
        return self._said()

    def step(self, action: str) -> Step:
        done, _ = self._env.step(action)
        said = self._said()
        if not done:
            return Step(observation=said)
        rewards, about = self._env.close()
        reward: Any = (rewards or {}).get(PLAYER)  # None: `step_of` refuses it
        reason = str(about.get(PLAYER, {}).get("reason") or "")
        is_invalid = float(bool(about.get(PLAYER, {}).get("invalid_move")))
        return Step(
            observation="\n".join(filter(None, (said, reason))),
            reward=reward,
            done=True,
            info={"invalid_move": is_invalid},
        )

    def _said(self) -> str:
        """What the game has said since the last look, without the player's own moves."""
        _, observation = self._env.get_observation()
        return "\n".join(text.strip() for sender, text, _ in observation if sender != PLAYER)


def _explained(game: str, act: Any) -> Any:
    """What `act` returns. A game that cannot be played here says why."""
    try:
        return act()
    except Exception as error:  # the games raise anything
        words = " ".join(str(error).split())[:200]
        why = "it needs a download" if isinstance(error, LookupError) else "it cannot be played"
        if "player" in words.lower():
            why = "it has several players, and an environment has one"
        elif "api key" in words.lower():
            why = "it needs an account of a model service"
        raise ValueError(
            f"game={game!r}: {why} ({type(error).__name__}: {words}); choose another game"
        ) from error
