// Runs the engine of a page in Node: node engine_driver.js JOB < request.json > answer.json
// The engine and its data are taken from the page itself, as a browser would.
"use strict";
const fs = require("fs");

const request = JSON.parse(fs.readFileSync(0, "utf8"));
const page = fs.readFileSync(request.page, "utf8");
const part = (id) => page.match(new RegExp(`<script[^>]* id="${id}">([^]*?)</script>`))[1];
const module_ = { exports: {} };
new Function("module", part("engine"))(module_);
const SLT = module_.exports;

const JOBS = {
  async ticket() { // logits of sequences, with the trained mask or a random one
    const ticket = await SLT.open(SLT.fromBase64(part("ticket")));
    if (ticket.faults.length) return { faults: ticket.faults };
    const model = new SLT.Model(ticket), codes = {};
    await model.setMask(request.random ?? null);
    for (const [name, one] of Object.entries(model.codes)) if (one) codes[name] = SLT.count(one, model.table.length);
    const logits = request.ids.map((ids) => { model.reset(); return ids.map((id) => Array.from(model.forward(id))); });
    return { faults: [], logits, counts: codes };
  },
  async damage() { // how many faults a ticket has when a byte of it is another
    const bytes = SLT.fromBase64(part("ticket")), found = [];
    for (const [place, bits] of request.flips) {
      const copy = bytes.slice();
      copy[place] ^= bits;
      const ticket = await SLT.open(copy);
      found.push(ticket.faults);
    }
    for (const length of request.lengths) found.push((await SLT.open(bytes.slice(0, length))).faults);
    return found;
  },
  async open() { // the faults of other tickets
    return Promise.all(request.tickets.map(async (one) => (await SLT.open(SLT.fromBase64(one))).faults));
  },
  async encode() {
    const tokenizer = new SLT.Tokenizer(JSON.parse(await SLT.inflate(SLT.fromBase64(part("tokenizer")))));
    return request.texts.map((text) => {
      const ids = tokenizer.encode(text), bytes = ids.flatMap((id) => Array.from(tokenizer.decode(id)));
      return [ids, new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes))];
    });
  },
  async words() {
    return request.places.map(([seed, name, start, stop]) => Array.from(SLT.words(seed, name, start, stop)));
  },
  async digests() {
    return request.texts.map((text) => SLT.sha256(text));
  },
  async sample() {
    const logits = Float32Array.from(request.logits);
    return request.options.map((options) => SLT.sample(logits, options));
  },
  async speed() {
    const bytes = SLT.fromBase64(part("ticket")), begin = performance.now();
    const ticket = await SLT.open(bytes), opened = performance.now();
    const model = new SLT.Model(ticket);
    await model.setMask();
    const ready = performance.now();
    let token = 0;
    for (let i = 0; i < model.positions; i++) token = SLT.sample(model.forward(token), { topK: 40, step: i });
    const weights = Object.values(ticket.tensors).reduce((total, one) => total + (one.drawn ? one.size : 0), 0);
    return { weights, draw: ticket.drawing, open: opened - begin, mask: ready - opened,
      tokens_per_second: model.positions / (performance.now() - ready) * 1000 };
  },
};

JOBS[request.job]().then((answer) => fs.writeSync(1, JSON.stringify(answer)));
