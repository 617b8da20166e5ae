// The openai library for Node: chat, stream, tools, structure, errors, cancel.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { version } = JSON.parse(readFileSync("node_modules/openai/package.json"));
const base = process.argv[2];
const client = new OpenAI({ baseURL: base, apiKey: "none" });
const said = (word) => [{ role: "user", content: word }];
const tools = [
  {
    type: "function",
    function: { name: "look", parameters: { type: "object", properties: { city: { type: "string" } } } },
  },
];

const gone = async () => {
  const page = await (await fetch(base.replace(/\/v1$/, "/metrics"))).text();
  return Number(page.match(/^localchat_client_gone_total (\S+)/m)[1]);
};

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model: "m", messages: said("hi") });
    assert.equal(answer.choices[0].message.content, "Hello.");
  },
  async stream() {
    const options = { include_usage: true };
    let text = "";
    let usage;
    for await (const chunk of await client.chat.completions.create({
      model: "m", messages: said("hi"), stream: true, stream_options: options,
    })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, "Hello.");
    assert.equal(usage.completion_tokens, 3);
  },
  async tools() {
    const runner = client.chat.completions.stream({ model: "m", messages: said("tools"), tools });
    const { message, finish_reason } = (await runner.finalChatCompletion()).choices[0];
    assert.deepEqual(message.tool_calls.map((call) => JSON.parse(call.function.arguments).city), ["Rome", "Oslo"]);
    assert.equal(finish_reason, "tool_calls");
  },
  async structured() {
    const schema = { type: "object", properties: { name: { type: "string" } } };
    const answer = await client.chat.completions.create({
      model: "m", messages: said("json"),
      response_format: { type: "json_schema", json_schema: { name: "p", schema } },
    });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: "Ann" });
  },
  async errors() {
    for (const [word, code] of [["long", "context_length_exceeded"], ["template", "chat_template_error"]]) {
      await assert.rejects(client.chat.completions.create({ model: "m", messages: said(word) }), { status: 400, code });
    }
    await assert.rejects(async () => {
      for await (const _ of await client.chat.completions.create({ model: "m", messages: said("dies"), stream: true }));
    }, { code: "engine_died" });
  },
  async cancel() {
    const before = await gone();
    const stream = await client.chat.completions.create({ model: "m", messages: said("endless"), stream: true });
    for await (const _ of stream) break;
    for (let tries = 0; (await gone()) !== before + 1; tries++) {
      assert.ok(tries < 100, "the server did not notice");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: "m", input: "ab" });
    assert.deepEqual([...answer.data[0].embedding], [2, 1]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`openai ${version} for Node: ${name} ok`);
}
process.exit(0);
