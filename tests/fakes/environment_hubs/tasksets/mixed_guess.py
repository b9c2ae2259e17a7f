"""A taskset for tests, on verifiers' own classes: guess a number, with a tool that compares.

The module is at the top level of a folder of its own, because verifiers finds tasksets by the name
of a module.
"""

import random

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessConfig(vf.TasksetConfig):
    most: int = 50
    tasks: int = 4
    limit_s: float | None = None


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    lives: int = 3


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        score = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for life in range(self.config.lives):
                if segment.terminated:
                    break
                said = segment.last_reply
                if said == "crash":
                    raise RuntimeError("the game is broken")
                guess = int(said) if said.isdigit() else -1
                if guess == task.data.number:
                    score = 1.0 - 0.25 * life
                    break
                if life + 1 < self.config.lives:
                    word = "higher" if guess < task.data.number else "lower"
                    segment = await interaction.turn(word)
        interaction.trace.record_reward("guessed", score, 2.0)
        interaction.trace.record_metric("lives", float(self.config.lives))


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for seed in range(self.config.tasks):
            yield GuessTask(
                GuessData(
                    name=f"guess#{seed}",
                    prompt=f"Guess a number from 1 to {self.config.most}.",
                    system_prompt="Write the number alone.",
                    timeout=vf.TaskTimeout(agent=self.config.limit_s),
                    number=random.Random(seed).randint(1, self.config.most),
                ),
                self.config.task,
            )
