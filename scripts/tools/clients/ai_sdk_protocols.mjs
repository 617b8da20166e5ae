// The AI SDK with its own providers for the Responses and the Messages API: answers, streams, tools, reasoning,
// structure, errors.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false; // it knows no model of this name
const { version } = JSON.parse(readFileSync("node_modules/ai/package.json"));
const base = process.argv[2];
const models = {
  responses: createOpenAI({ baseURL: base, apiKey: "none" }).responses("m"),
  messages: createAnthropic({ baseURL: base, apiKey: "none" })("m"),
};
const city = jsonSchema({ type: "object", properties: { city: { type: "string" } } });

const parts = async (options) => {
  const found = [];
  for await (const part of streamText({ maxRetries: 0, onError() {}, ...options }).fullStream) found.push(part);
  return found;
};
const said = (found, kind) => found.filter((part) => part.type === kind).map((part) => part.text).join("");

const checks = {
  async answer(model) {
    const answer = await generateText({ model, prompt: "hi", system: "Be brief." });
    assert.equal(answer.text, "Hello.");
    assert.equal(answer.usage.outputTokens, 3);
  },
  async stream(model) {
    const found = await parts({ model, prompt: "hi" });
    assert.equal(said(found, "text-delta"), "Hello.");
    const finish = found.find((part) => part.type === "finish");
    assert.equal(finish.finishReason, "stop");
    assert.equal(finish.totalUsage.outputTokens, 3);
    assert.ok(!found.some((part) => part.type === "error"));
  },
  async reasoning(model) {
    const found = await parts({ model, prompt: "reason" });
    assert.equal(said(found, "reasoning-delta"), "hm");
    assert.equal(said(found, "text-delta"), "42");
  },
  async tools(model) {
    const look = tool({ description: "look at a city", inputSchema: city, execute: () => "sunny" });
    const steps = [];
    const found = await parts({
      model, prompt: "tools", tools: { look }, stopWhen: stepCountIs(2), onStepFinish: (step) => steps.push(step),
      providerOptions: { openai: { store: false } }, // else it refers to items that it takes for stored
    });
    const calls = found.filter((part) => part.type === "tool-call");
    assert.deepEqual(calls.map((call) => call.input.city), ["Rome", "Oslo"]);
    assert.equal(steps[0].finishReason, "tool-calls");
    assert.equal(steps[1].text, "Hello.");
  },
  async structured(model) {
    const schema = jsonSchema({ type: "object", properties: { name: { type: "string" } } });
    const answer = await generateText({ model, prompt: "json", output: Output.object({ schema }) });
    assert.deepEqual(answer.output, { name: "Ann" });
  },
  async errors(model) {
    await assert.rejects(generateText({ model, prompt: "long", maxRetries: 0 }), (error) => {
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /4096/);
      return true;
    });
    assert.ok((await parts({ model, prompt: "dies" })).some((part) => part.type === "error"));
  },
};

for (const [protocol, model] of Object.entries(models)) {
  for (const [name, check] of Object.entries(checks)) {
    await check(model);
    console.log(`AI SDK ${version} over ${protocol}: ${name} ok`);
  }
}
process.exit(0);
