// The AI SDK with its provider for OpenAI-compatible servers: chat, stream, tools, structure, errors, cancel.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const { version } = JSON.parse(readFileSync("node_modules/ai/package.json"));
const base = process.argv[2];
const provider = createOpenAICompatible({
  name: "localchat", baseURL: base, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("m");
const city = jsonSchema({ type: "object", properties: { city: { type: "string" } } });
const tools = { look: tool({ description: "look at a city", inputSchema: city }) };

const gone = async () => {
  const page = await (await fetch(base.replace(/\/v1$/, "/metrics"))).text();
  return Number(page.match(/^localchat_client_gone_total (\S+)/m)[1]);
};
const parts = async (options) => {
  const found = [];
  for await (const part of streamText({ model, maxRetries: 0, onError() {}, ...options }).fullStream) found.push(part);
  return found;
};

const checks = {
  async chat() {
    assert.equal((await generateText({ model, prompt: "hi" })).text, "Hello.");
  },
  async stream() {
    const found = await parts({ prompt: "hi" });
    assert.equal(found.filter((part) => part.type === "text-delta").map((part) => part.text).join(""), "Hello.");
    const finish = found.find((part) => part.type === "finish");
    assert.equal(finish.finishReason, "stop");
    assert.equal(finish.totalUsage.outputTokens, 3);
    assert.ok(!found.some((part) => part.type === "error"));
  },
  async reasoning() {
    const found = await parts({ prompt: "reason" });
    assert.equal(found.filter((part) => part.type === "reasoning-delta").map((part) => part.text).join(""), "hm");
  },
  async tools() {
    const calls = (await parts({ prompt: "tools", tools })).filter((part) => part.type === "tool-call");
    assert.deepEqual(calls.map((call) => call.input.city), ["Rome", "Oslo"]);
    const whole = await generateText({ model, prompt: "tools", tools });
    assert.equal(whole.finishReason, "tool-calls");
  },
  async structured() {
    const schema = jsonSchema({ type: "object", properties: { name: { type: "string" } } });
    const answer = await generateText({ model, prompt: "json", output: Output.object({ schema }) });
    assert.deepEqual(answer.output, { name: "Ann" });
  },
  async errors() {
    await assert.rejects(generateText({ model, prompt: "long" }), (error) => {
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /maximum context length is 4096 tokens/);
      return true;
    });
    assert.ok((await parts({ prompt: "dies" })).some((part) => part.type === "error"));
  },
  async cancel() {
    const before = await gone();
    const controller = new AbortController();
    const { textStream } = streamText({ model, prompt: "endless", abortSignal: controller.signal, onError() {} });
    for await (const _ of textStream) {
      controller.abort();
      break;
    }
    for (let tries = 0; (await gone()) !== before + 1; tries++) {
      assert.ok(tries < 100, "the server did not notice");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`AI SDK ${version}: ${name} ok`);
}
process.exit(0);
