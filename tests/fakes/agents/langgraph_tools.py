"""LangGraph with langchain-openai: a graph of a model and its tools, whole and streamed.

As in the quickstart of LangGraph's documentation.
"""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from session_tools import use


@tool
def calculate(expression: str) -> str:
    """The value of an arithmetic expression."""
    return use("calculate", expression=expression)


llm = ChatOpenAI(model="policy").bind_tools([calculate])


def chatbot(state: MessagesState) -> MessagesState:
    return {"messages": [llm.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("chatbot", chatbot)
builder.add_node("tools", ToolNode([calculate]))
builder.add_edge(START, "chatbot")
builder.add_conditional_edges("chatbot", tools_condition)
builder.add_edge("tools", "chatbot")
graph = builder.compile()

question = json.load(sys.stdin)["prompt"][0]["content"]
limits = {"recursion_limit": 7}
try:
    done = graph.invoke({"messages": [{"role": "user", "content": question}]}, limits)
    messages = [*done["messages"], {"role": "user", "content": "Are you sure?"}]
    for chunk, _ in graph.stream({"messages": messages}, limits, stream_mode="messages"):
        print(chunk.content, end="|", flush=True)
    print()
    print("answer:", " ".join(str(done["messages"][-1].content).split()))
except GraphRecursionError as error:
    print(f"gave up: {type(error).__name__}")
