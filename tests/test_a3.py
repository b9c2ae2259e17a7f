"""full loop attacks: run with pytest"""
import asyncio, time, pytest
from tests.agent_loop.gateway.test_gateway_loop import session_rows, tools, AGENT
SW='''
import asyncio
async def solve(address, row):
    while True:
        try:
            await asyncio.sleep(0.05)
        except BaseException: pass
'''
HUGE='''
async def solve(address, row):
    _, first = await ask(address, row["prompt"])
    s, second = await ask(address, [{"role": "user", "content": "word " * 20000}])
    return first["choices"][0]["message"]["content"]
'''
MUT='''
async def solve(address, row):
    _, first = await ask(address, row["prompt"])
    async with aiohttp.ClientSession() as http:
        for n in range(3):
            async with http.post(address.mcp, json={"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"nothing","arguments":{}}}) as a: print(await a.text())
    import asyncio
    await asyncio.sleep(3)
'''
async def test_huge(tools,tmp_path,monkeypatch):
    rows=await session_rows(HUGE,tools,tmp_path,monkeypatch)
    print("HUGE", [(len(r["prompts"]),len(r["responses"]), r["extra_fields"]["mixed"]["stop_reason"], r["extra_fields"]["mixed"]["fault"]) for r in rows])
async def test_swallow(tools,tmp_path,monkeypatch):
    async def go():
        return await session_rows(SW,tools,tmp_path,monkeypatch)
    from agent_loop.turns import turn_loop
    t=asyncio.ensure_future(go())
    monkeypatch.setattr("agent_loop.turns.loop_settings.LoopSettings.budget_of", lambda self,s,d=None: __import__("dataclasses").replace(self.budget, timeout_s=0.5))
    done,_=await asyncio.wait([t],timeout=6)
    print("SWALLOW deadline 0.5 s; ended after 6 s:", bool(done))
    import os; os._exit(0) if not done else None
