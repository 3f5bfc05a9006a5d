// Vercel's `ai` by four providers, and OpenAI's own client for JavaScript with its tool runner.
// Prints a line of JSON per trial: client, what was tried, ok, what was seen.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createDeepSeek } from "@ai-sdk/deepseek";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const URL = process.env.HADAL_URL;
const apiKey = process.env.HADAL_KEY ?? "none";
const MODEL = process.env.HADAL_MODEL ?? "hadal-tiny";
const SUM = "What is 23 plus 19?";
const PRODUCT = "What is 4817 times 2395? Use the calculator.";
const PERSON = "Ann is 34 years old and lives in Oslo. Give her name, age and city as JSON.";

const arguments_ = z.object({ a: z.number().int(), operator: z.enum(["+", "-", "*"]), b: z.number().int() });
const person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
const reckon = ({ a, operator, b }) => ({ "+": a + b, "-": a - b, "*": a * b })[operator];
const digits = (text) => String(text).replace(/\D/g, "");

function expect(holds, seen) {
  const text = String(typeof seen === "object" ? JSON.stringify(seen) : seen).replace(/\s+/g, " ").slice(0, 120);
  if (!holds) throw new Error(`saw '${text}'`);
  return text;
}

async function attempt(client, what, trial) {
  let line;
  try {
    line = { client, what, ok: true, seen: await trial() };
  } catch (error) {
    line = { client, what, ok: false, seen: `${error.name}: ${error.message}`.slice(0, 300) };
  }
  console.log(JSON.stringify(line));
}

const version = (name) => JSON.parse(readFileSync(new globalThis.URL(`./node_modules/${name}/package.json`, import.meta.url))).version;
const common = { temperature: 0, maxRetries: 0, abortSignal: undefined };
const calculate = tool({
  description: "Compute with two whole numbers.",
  inputSchema: arguments_,
  execute: async (given) => reckon(given),
});
const providers = {
  deepseek: createDeepSeek({ baseURL: `${URL}/v1`, apiKey })(MODEL),
  "openai-compatible": createOpenAICompatible({
    name: "hadal", baseURL: `${URL}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  })(MODEL),
  "openai (responses)": createOpenAI({ baseURL: `${URL}/v1`, apiKey })(MODEL),
  anthropic: createAnthropic({ baseURL: `${URL}/v1`, apiKey })(MODEL),
};

for (const [name, model] of Object.entries(providers)) {
  const client = `ai ${version("ai")} by ${name}`;
  const bounded = () => ({ ...common, model, abortSignal: AbortSignal.timeout(600_000) });
  await attempt(client, "generateText", async () => {
    const { text, usage } = await generateText({ ...bounded(), prompt: SUM });
    return expect(text.includes("42") && usage.outputTokens > 0, text);
  });
  await attempt(client, "streamText", async () => {
    let failure;
    const { textStream } = streamText({ ...bounded(), prompt: SUM, onError: ({ error }) => { failure = error; } });
    let text = "";
    for await (const part of textStream) text += part;
    if (failure) throw failure;
    return expect(text.includes("42"), text);
  });
  await attempt(client, "a tool and the answer from it", async () => {
    const { text } = await generateText({
      ...bounded(), prompt: PRODUCT, tools: { calculate }, stopWhen: stepCountIs(4),
    });
    return expect(digits(text).includes("11536715"), text);
  });
  await attempt(client, "generateObject by a schema", async () => {
    const { object } = await generateObject({ ...bounded(), schema: person, prompt: PERSON });
    return expect(person.safeParse(object).success, object);
  });
}

const openai = new OpenAI({ baseURL: `${URL}/v1`, apiKey, maxRetries: 0, timeout: 600_000 });
const client = `openai ${version("openai")} (JavaScript)`;
await attempt(client, "chat.completions.create, streamed", async () => {
  let text = "";
  const stream = await openai.chat.completions.create({
    model: MODEL, messages: [{ role: "user", content: SUM }], stream: true, temperature: 0,
  });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return expect(text.includes("42"), text);
});
await attempt(client, "chat.completions.runTools", async () => {
  const runner = openai.chat.completions.runTools(
    {
      model: MODEL,
      temperature: 0,
      messages: [{ role: "user", content: PRODUCT }],
      tools: [zodFunction({
        name: "calculate", description: "Compute with two whole numbers.", parameters: arguments_, function: reckon,
      })],
    },
    { maxChatCompletions: 4 },
  );
  const text = await runner.finalContent();
  return expect(digits(text).includes("11536715"), text);
});
await attempt(client, "chat.completions.parse by zod", async () => {
  const reply = await openai.chat.completions.parse({
    model: MODEL, temperature: 0, messages: [{ role: "user", content: PERSON }],
    response_format: zodResponseFormat(person, "person"),
  });
  return expect(reply.choices[0].message.parsed?.name !== undefined, reply.choices[0].message.parsed);
});
await attempt(client, "responses.create", async () => {
  const reply = await openai.responses.create({ model: MODEL, input: SUM, temperature: 0 });
  return expect(reply.output_text.includes("42"), reply.output_text);
});
