"""A taskset for tests, on verifiers' own classes: one agent with a tool, which verifiers serves by
MCP in a process of its own."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class CalculatorConfig(vf.ToolsetConfig):
    pass


class Calculator(vf.Toolset[CalculatorConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(CalculatorConfig())]

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield SumsTask(SumsData(name=f"sum#{n}", prompt=f"{n} + 2?", answer=str(n + 2)))


if __name__ == "__main__":
    Calculator.run()
