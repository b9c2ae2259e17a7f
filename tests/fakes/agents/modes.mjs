// The modes of frameworks from npm, as modes.py: `node modes.mjs FRAMEWORK`, beside node_modules.
import { readFileSync } from "node:fs";
import { z } from "zod";

const ASK = "question";
const City = z.object({ city: z.string() });
const NUMBERS = z.object({ a: z.number(), b: z.number() });
const TEXT = z.object({ query: z.string() });
const hasTools = (mode) => mode.includes("tools") || ["parallel", "required"].includes(mode);

async function text(stream) {
  let whole = "";
  for await (const piece of stream) whole += piece;
  return whole;
}

async function model(protocol, at) {
  const key = { baseURL: at.openai, apiKey: at.key };
  if (protocol === "messages") {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return createAnthropic(key)("claude-sonnet-4-5");
  }
  const { createOpenAI } = await import("@ai-sdk/openai");
  const openai = createOpenAI(key);
  return protocol === "chat" ? openai.chat("policy") : openai.responses("policy");
}

async function ai(protocol, mode, at) {
  const sdk = await import("ai");
  const add = { description: "Add.", inputSchema: NUMBERS, execute: async ({ a, b }) => a + b };
  const search = { description: "Search.", inputSchema: TEXT, execute: async () => "nothing" };
  const request = {
    model: await model(protocol, at),
    prompt: ASK,
    maxRetries: 0,
    stopWhen: sdk.stepCountIs(3),
    ...(hasTools(mode) && { tools: { add: sdk.tool(add), search: sdk.tool(search) } }),
    ...(mode.includes("structured") && { output: sdk.Output.object({ schema: City }) }),
  };
  if (mode === "required") {
    const { toolCalls } = await sdk.generateText({ ...request, toolChoice: "required", stopWhen: sdk.stepCountIs(1) });
    return toolCalls[0].toolName;
  }
  if (mode === "stream_structured") {
    const streamed = sdk.streamText(request);
    await streamed.consumeStream();
    return await streamed.output;
  }
  if (mode.startsWith("stream")) return await text(sdk.streamText(request).textStream);
  const made = await sdk.generateText(request);
  return mode.includes("structured") ? made.output : made.text;
}

async function agents(protocol, mode, at) {
  const sdk = await import("@openai/agents");
  const { OpenAI } = await import("openai");
  sdk.setTracingDisabled(true);
  const client = new OpenAI({ baseURL: at.openai, apiKey: at.key, maxRetries: 0 });
  const Model = protocol === "chat" ? sdk.OpenAIChatCompletionsModel : sdk.OpenAIResponsesModel;
  const add = { name: "add", description: "Add.", parameters: NUMBERS, execute: async ({ a, b }) => `${a + b}` };
  const search = { name: "search", description: "Search.", parameters: TEXT, execute: async () => "nothing" };
  const agent = new sdk.Agent({
    name: "Assistant",
    model: new Model(client, "policy"),
    tools: hasTools(mode) ? [sdk.tool(add), sdk.tool(search)] : [],
    ...(mode === "required" && { modelSettings: { toolChoice: "required" } }),
    ...(mode.includes("structured") && { outputType: City }),
  });
  const made = await sdk.run(agent, ASK, { stream: mode.startsWith("stream") });
  if (mode.startsWith("stream")) {
    for await (const _ of made);
    await made.completed;
  }
  return made.finalOutput;
}

async function mastra(protocol, mode, at) {
  const { Agent } = await import("@mastra/core/agent");
  const { createTool } = await import("@mastra/core/tools");
  const add = { id: "add", description: "Add.", inputSchema: NUMBERS, execute: async ({ a, b }) => a + b };
  const search = { id: "search", description: "Search.", inputSchema: TEXT, execute: async () => "nothing" };
  const agent = new Agent({
    id: "assistant",
    name: "Assistant",
    instructions: "Be short.",
    model: await model(protocol, at),
    ...(hasTools(mode) && { tools: { add: createTool(add), search: createTool(search) } }),
  });
  const options = mode.includes("structured") ? { structuredOutput: { schema: City } } : {};
  if (mode.startsWith("stream")) {
    const streamed = await agent.stream(ASK, options);
    const whole = await text(streamed.textStream);
    return mode.includes("structured") ? await streamed.object : whole;
  }
  const made = await agent.generate(ASK, options);
  return mode.includes("structured") ? made.object : made.text;
}

const framework = { ai, "openai-agents-js": agents, mastra }[process.argv[2]];
for (const [name, address] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  let said;
  try {
    const made = await framework(...name.split("."), address);
    said = made?.city ?? String(made);
  } catch (error) {
    said = `${error?.name}: ${error?.message}`;
  }
  console.log(JSON.stringify([name, said]));
}
process.exit(0);
