// OpenAI's client for Node against the servers named in the argument; prints what it got as JSON.
// What is right is in test_openai_node.py.
import OpenAI, {
  AuthenticationError,
  BadRequestError,
  NotFoundError,
  RateLimitError,
} from 'openai';

const urls = JSON.parse(process.argv[2]);
const model = 'fake-model';
const messages = [{ role: 'user', content: [{ type: 'text', text: 'hi' }] }];
const tools = [
  { type: 'function', function: { name: 'weather', parameters: { type: 'object' } } },
];

const at = (url, apiKey = 'k') => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const errorClasses = { AuthenticationError, BadRequestError, NotFoundError, RateLimitError };

async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    const kinds = Object.entries(errorClasses).filter(([, kind]) => error instanceof kind);
    const { status, param, code, type, requestID } = error;
    return { kind: kinds[0]?.[0], status, param, code, type, hasId: Boolean(requestID) };
  }
  return null;
}

const scenarios = {
  async models() {
    const ids = [];
    for await (const entry of at(urls.plain).models.list()) ids.push(entry.id);
    return ids;
  },

  async whole() {
    const answer = await at(urls.plain).chat.completions.create({
      model, messages, logprobs: true, top_logprobs: 2, max_completion_tokens: 9,
    });
    return answer;
  },

  async streamed() {
    const pieces = [];
    const stream = at(urls.plain).chat.completions.stream({
      model, messages, stream_options: { include_usage: true },
    });
    stream.on('content', (delta) => pieces.push(delta));
    const final = await stream.finalChatCompletion();
    return { pieces, final };
  },

  async raw_stream() {
    const texts = [];
    const stream = await at(urls.plain).completions.create({
      model, prompt: [1, 2, 3], stream: true, max_tokens: 50,
    });
    for await (const chunk of stream) texts.push(chunk.choices[0].text);
    return texts;
  },

  async tool_call() {
    const answer = await at(urls.tools).chat.completions.create({ model, messages, tools });
    return answer.choices[0];
  },

  async streamed_tool_call() {
    const stream = at(urls.tools).chat.completions.stream({ model, messages, tools });
    return (await stream.finalChatCompletion()).choices[0];
  },

  async ran_tool() {
    const asked = [];
    const runner = at(urls.tools).chat.completions.runTools(
      {
        model, messages,
        tools: [{
          type: 'function',
          function: {
            name: 'weather', description: 'w', parameters: { type: 'object' },
            parse: JSON.parse, function: (args) => { asked.push(args); return 'sunny'; },
          },
        }],
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    return { asked, messages: runner.messages };
  },

  async parsed() {
    const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'],
      additionalProperties: false };
    const answer = await at(urls.json).chat.completions.parse({
      model, messages,
      response_format: { type: 'json_schema', json_schema: { name: 'c', strict: true, schema } },
    });
    return answer.choices[0].message.content;
  },

  async response() {
    const answer = await at(urls.plain).responses.create({ model, input: 'hi' });
    return { text: answer.output_text, usage: answer.usage, status: answer.status };
  },

  async streamed_response() {
    const kinds = [];
    let text = '';
    const stream = at(urls.plain).responses.stream({ model, input: 'hi' });
    for await (const event of stream) {
      kinds.push(event.type);
      if (event.type === 'response.output_text.delta') text += event.delta;
    }
    return { kinds, text, final: (await stream.finalResponse()).output_text };
  },

  async errors() {
    const chat = at(urls.plain).chat.completions;
    return {
      range: await errorOf(chat.create({ model, messages, temperature: -1 })),
      type: await errorOf(chat.create({ model, messages: 'hi' })),
      model: await errorOf(chat.create({ model: 'gpt-4', messages })),
      key: await errorOf(at(urls.keyed, 'wrong').chat.completions.create({ model, messages })),
      busy: await errorOf(at(urls.busy).chat.completions.create({ model, messages })),
    };
  },

  async error_in_stream() {
    const texts = [];
    const stream = await at(urls.failing).chat.completions.create({ model, messages, stream: true });
    try {
      for await (const chunk of stream) texts.push(chunk.choices[0].delta.content ?? '');
    } catch (error) {
      return { texts, message: error.message };
    }
    return { texts, message: null };
  },

  async aborted() {
    let count = 0;
    const stream = await at(urls.endless).chat.completions.create({
      model, messages, stream: true, max_tokens: 5000,
    });
    for await (const _ of stream) {
      count += 1;
      if (count === 3) stream.controller.abort();
    }
    return count;
  },
};

const results = {};
for (const [name, run] of Object.entries(scenarios)) {
  try {
    results[name] = await run();
  } catch (error) {
    results[name] = { failed: String(error.stack) };
  }
}
console.log(JSON.stringify(results));
