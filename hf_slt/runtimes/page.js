// The user interface: numbers, generated text, pictures of the masks, checked digests.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const show = (n) => n.toLocaleString("en");
  const make = (tag, text = "", more = {}) => Object.assign(document.createElement(tag), { textContent: text }, more);
  const facts = JSON.parse($("facts").textContent);
  const original = SLT.fromBase64($("ticket").textContent);
  const CELLS = 17; // weights on a side of the lens
  const ORDER = "wte wpe lm_head query key value c_fc c_proj".split(" ");
  let model = null, tokenizer = null, random = null, writing = null, draws = 0, colours = {};
  let drawing = null; // marks the latest call of drawGallery: earlier calls stop
  let look = null; // what the viewer shows: tensor, its factors and codes, row and column

  // Lets the browser update the page, if it has waited for a frame or two.
  let last = 0;
  async function pause() {
    if (performance.now() - last < 24) return;
    await new Promise((done) => setTimeout(done));
    last = performance.now();
  }

  // -- the ticket ------------------------------------------------------------------------------------

  async function start(bytes) {
    model = drawing = null;
    $("status").textContent = "Drawing the weights and checking every digest …";
    for (const one of document.querySelectorAll("#go, #flip, .switch input")) one.disabled = true;
    $("alarm").hidden = true;
    $("viewer").hidden = true;
    $("checks").replaceChildren();
    $("gallery").replaceChildren();
    $("gallery").setAttribute("aria-busy", "false");
    document.querySelector("[value=trained]").checked = true;
    let right = 0, all = 0;
    const rows = {};
    async function report({ name, kind, expected, found, good }) {
      all++;
      right += good;
      const cells = (rows[name] ??= addRow(name));
      const cell = cells[kind.startsWith("weights") ? 2 : 3];
      cell.className = good ? "good" : "bad";
      cell.textContent = good ? `✓ ${found.slice(0, 16)}` : `✗ ${found.slice(0, 16)} is not ${expected.slice(0, 16)}`;
      $("digests").textContent = `${right} of ${all}`;
      await pause();
    }
    const ticket = await SLT.open(bytes, { report, pause });
    try {
      const text = await SLT.inflate(SLT.fromBase64($("tokenizer").textContent));
      const found = SLT.sha256(text), expected = facts.tokenizer_sha256;
      await report({ name: "tokenizer", kind: "text has", expected, found, good: found === expected });
      if (found !== expected) ticket.faults.push("tokenizer: its text does not have the digest in this page");
      else tokenizer = new SLT.Tokenizer(JSON.parse(text));
    } catch (error) {
      ticket.faults.push(`the tokenizer cannot be read (${error.message})`);
    }
    for (const [name, cells] of Object.entries(rows)) {
      const shape = ticket.tensors[name]?.shape;
      if (shape) cells[1].textContent = shape.map(show).join(" × ");
    }
    showNumbers(ticket);
    $("flip").disabled = false;
    if (ticket.faults.length) return alarm(ticket.faults);
    model = new SLT.Model(ticket);
    await model.setMask(null, pause);
    $("status").textContent = `All ${all} digests are right. The model is ready.`;
    for (const one of document.querySelectorAll("#go, .switch input")) one.disabled = false;
    drawGallery(ticket);
  }

  function addRow(name) {
    const row = $("checks").appendChild(make("tr"));
    row.append(make("th", name, { scope: "row" }), make("td"), make("td"), make("td"));
    return row.children;
  }

  function alarm(faults) {
    const list = make("ul");
    list.append(...faults.slice(0, 9).map((one) => make("li", one)));
    if (faults.length > 9) list.append(make("li", `and ${faults.length - 9} more`));
    $("alarm").replaceChildren(make("strong", "This ticket is damaged. It will not generate any text."), list);
    $("alarm").hidden = false;
    $("status").textContent = "Download the page again.";
    $("text").replaceChildren();
    $("speed").textContent = "";
    const row = document.querySelector(".bad")?.parentNode;
    if (row) document.querySelector(".scroll").scrollTop = row.offsetTop - 60;
  }

  function showNumbers(ticket) {
    const tensors = Object.values(ticket.tensors), drawn = tensors.filter((one) => one.drawn);
    const weights = drawn.reduce((total, one) => total + one.size, 0);
    $("weights").textContent = show(weights);
    $("bytes").textContent = show(ticket.bytes);
    $("time").textContent = `${(ticket.drawing / 1000).toFixed(2)} s`;
    if (!ticket.config) return;
    const trained = (test) => tensors.some((one) => one.values && test(one.name));
    const learned = [ticket.config.state_bits ? "which number each weight is" : "a mask"];
    if (trained((name) => /^(wte|wpe|lm_head)$/.test(name))) learned.push("its embeddings");
    if (trained((name) => /scale$|ln_|head_bias/.test(name))) learned.push("a few scales");
    const what = new Intl.ListFormat("en").format(learned);
    const table = ticket.config.factors, path = ticket.config.state_bits;
    const strict = path || table.every((one) => one === 0 || one === 1), signs = Math.min(...table) >= 0;
    // If all weights are +c or -c and the mask also chooses the sign, the result does not depend on the seed.
    const free = !strict && !signs && drawn.every((one) => one.law === "signed_constant" && one.codes && !one.pattern);
    const name = { 2: "binary", 3: "ternary" }[table.length] ?? `${table.length}-level`;
    const kind = path ? `This page is a language model with ${show(weights)} weights, each of them one of ${show(table.length === 3 ? 3 ** (path / 2) : 2 ** path)} numbers ` +
        `that it has just drawn for its tensor from the seed ${ticket.seed}; no number was trained. `
      : signs && !strict ? `This page is a language model with ${show(weights)} weights. It has just drawn them from the seed ` +
        `${ticket.seed}; the mask multiplies each by one of ${table.join(", ")}. `
      : strict ? `This page is a language model with ${show(weights)} weights that were never trained. ` +
        `It has just drawn them from the seed ${ticket.seed}. `
      : free ? `This page is a ${name} language model: the mask sets the sign of each of its ${show(weights)} weights, ` +
        `so the seed ${ticket.seed}, from which they were drawn, carries nothing. `
      : `This page is a language model with ${show(weights)} weights. It has just drawn their sizes from the seed ` +
        `${ticket.seed}; the mask sets their signs. `;
    $("lead").textContent = `${kind}All that was learned is ${what}, ${show(ticket.bytes)} bytes, and it is inside this page.`;
  }

  // -- text ------------------------------------------------------------------------------------------

  async function write(seed) {
    if (!model) return;
    stop();
    const own = (writing = {}), prompt = $("prompt").value, { config } = model.ticket;
    const given = tokenizer.encode(prompt), room = model.positions - given.length;
    const ids = given.length ? given : [config.bos_token_id ?? 0];
    const shown = make("span");
    $("text").setAttribute("aria-busy", "true");
    $("text").replaceChildren(make("b", prompt), shown);
    if (room < 1) {
      $("speed").textContent = `The beginning has ${show(given.length)} tokens; this model reads ${model.positions - 1} at most.`;
      return stop();
    }
    $("go").textContent = "Stop";
    const options = { temperature: +$("temperature").value, topK: +$("topk").value, seed };
    const decoder = new TextDecoder();
    let bits = 0, logits = null, written = 0, text = "", end = "";
    model.reset();
    for (const id of ids) {
      if (logits) bits += SLT.surprise(logits, id);
      logits = model.forward(id);
      await pause();
      if (writing !== own) return;
    }
    const begin = performance.now();
    const update = () => {
      shown.textContent = text;
      const rate = (written / (performance.now() - begin)) * 1000;
      const worth = ids.length > 1 ? `; the beginning costs it ${(bits / (ids.length - 1)).toFixed(1)} bits a token` : "";
      $("speed").textContent = `${random === null ? "Trained" : "Random"} mask, draw ${seed}: ${written} tokens, ` +
        `${rate.toFixed(0)} tokens per second${worth}.${end}`;
    };
    for (;;) {
      const id = SLT.sample(logits, { ...options, step: written });
      if ([config.eos_token_id].flat().includes(id)) { end = " The text ended itself."; break; }
      text += decoder.decode(tokenizer.decode(id), { stream: true });
      written++;
      if (performance.now() - last > 24) update();
      await pause();
      if (writing !== own) return;
      if (model.length === model.positions) { end = ` It sees ${model.positions} tokens at most.`; break; }
      logits = model.forward(id);
    }
    update();
    stop();
  }

  function stop() {
    writing = null;
    $("go").textContent = "Write";
    $("text").setAttribute("aria-busy", "false");
  }

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) stop();
    else write(++draws);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); if (!writing) write(++draws); }
  });
  $("form").addEventListener("change", async (event) => {
    if (event.target.name !== "mask" || !model) return;
    const current = model;
    random = event.target.value === "random" ? 1 : null;
    if (!(await current.setMask(random, pause)) || current !== model) return; // another mask was requested meanwhile
    stop();
    $("status").textContent = random === null ? "The trained mask is in place." : "A random mask is in place: it has as many weights of each kind, chosen at random.";
    drawGallery(model.ticket);
    if (draws) write(draws); // the same random draw: only the mask differs
  });
  const degrees = () => ($("degrees").textContent = (+$("temperature").value).toFixed(1));
  $("temperature").addEventListener("input", degrees);

  // -- pictures --------------------------------------------------------------------------------------

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["plus", "minus", "ink", "card", "accent"]) {
      const hex = style.getPropertyValue("--" + name).trim().slice(1);
      const long = hex.length === 3 ? [...hex].map((one) => one + one).join("") : hex;
      colours[name] = [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16));
    }
  }
  const mix = (a, b, share) => a.map((one, i) => one + (b[i] - one) * share);

  // Draws factors as a picture of at most `most` points on a side. A point is the mean of the weights under it. The
  // longer side is horizontal. Ink means a positive factor; orange, a factor that turns the sign.
  function picture(canvas, tensor, found, most) {
    const [rows, columns] = tensor.shape, across = rows > columns;
    const [wide, tall] = across ? [rows, columns] : [columns, rows];
    canvas.width = Math.min(wide, most);
    canvas.height = Math.min(tall, most);
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    const sums = new Float32Array(canvas.width * canvas.height), turned = sums.slice(), many = sums.slice();
    for (let row = 0, i = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++, i++) {
        const [x, y] = across ? [row, column] : [column, row];
        const at = Math.floor((y * canvas.height) / tall) * canvas.width + Math.floor((x * canvas.width) / wide);
        many[at]++;
        sums[at] += Math.min(1, Math.abs(found[i]));
        if (found[i] < 0) turned[at] += Math.min(1, -found[i]);
      }
    }
    for (let at = 0; at < sums.length; at++) {
      const ink = mix(colours.ink, colours.minus, sums[at] ? turned[at] / sums[at] : 0);
      image.data.set([...mix(colours.card, ink, (sums[at] / many[at]) * 0.9), 255], 4 * at);
    }
    context.putImageData(image, 0, 0);
    return image;
  }

  const factorsOf = (tensor) => SLT.factors(tensor, model.codes[tensor.name], model.table);

  // Draws all pictures, block by block.
  async function drawGallery(ticket) {
    const own = (drawing = {}), table = model.table, gallery = document.createDocumentFragment(), groups = {};
    $("gallery").setAttribute("aria-busy", "true");
    readColours();
    const plain = `${table}` === "0,1";
    $("legend").textContent = (ticket.config.state_bits
      ? "Each weight is one of the numbers that were drawn for its tensor. A stronger point is a larger number; orange is negative."
      : plain ? "Points are weights that the mask keeps."
      : `The mask multiplies each weight by one of ${table.join(", ")}. A stronger point is a larger factor; orange turns the sign.`) +
      " Under the lens, blue weights are positive, orange weights are negative, pale weights are dropped. Click a weight, or use the arrow keys.";
    const masked = Object.values(ticket.tensors).filter((one) => one.codes);
    const split = (name) => name.match(/^(?:h\.(\d+)\.)?(.*)$/);
    const rank = ({ name }, [, block = -1, inside] = split(name)) => 16 * block + ORDER.indexOf(inside.split(".").pop()) + 8 * inside.startsWith("mlp");
    for (const tensor of masked.sort((a, b) => rank(a) - rank(b))) {
      const [, block, inside] = split(tensor.name);
      const title = block ? `Block ${block}` : "Tables";
      if (!groups[title]) {
        gallery.append(make("h3", title));
        groups[title] = gallery.appendChild(make("div", "", { className: "strip" }));
      }
      const button = groups[title].appendChild(make("button", "", { type: "button" })), canvas = make("canvas");
      const kept = 1 - tensor.counts.reduce((total, one, code) => total + (table[code] ? 0 : one), 0) / tensor.codes.length;
      const side = Math.max(...tensor.shape) / Math.min(...tensor.shape);
      button.style.flex = `${Math.min(side, 2)} 1 ${Math.min(5.6 * side, 12)}rem`;
      button.dataset.name = tensor.name;
      button.append(canvas, inside.replace("attn.c_attn.", ""),
        make("small", tensor.shape.map(show).join(" × ")), make("small", `${(100 * kept).toFixed(1)} % kept`));
      picture(canvas, tensor, factorsOf(tensor), 160);
      button.addEventListener("click", () => { choose(tensor); $("viewer").scrollIntoView({ block: "nearest" }); });
      await pause();
      if (own !== drawing) return;
    }
    $("gallery").replaceChildren(gallery);
    const before = look && ticket.tensors[look.tensor.name];
    if (masked.length) choose(before ?? ticket.tensors["h.0.attn.c_attn.query"] ?? masked[0], look?.row, look?.column);
    $("gallery").setAttribute("aria-busy", "false");
  }

  function choose(tensor, row = Math.floor(tensor.shape[0] / 2), column = Math.floor(tensor.shape[1] / 2)) {
    const found = factorsOf(tensor), codes = new Int16Array(tensor.size).fill(-1);
    for (let i = 0, next = 0; i < tensor.size; i++) if (!tensor.pattern || tensor.pattern[i] === 2) codes[i] = model.codes[tensor.name][next++];
    look = { tensor, found, codes, row, column };
    for (const one of $("gallery").querySelectorAll("button")) one.setAttribute("aria-pressed", one.dataset.name === tensor.name);
    $("viewer").hidden = false;
    $("tensor").textContent = `${tensor.name}, ${tensor.shape.map(show).join(" × ")}, ${tensor.law} law, ${random === null ? "trained" : "random"} mask`;
    $("row").max = tensor.shape[0] - 1;
    $("column").max = tensor.shape[1] - 1;
    look.image = picture($("whole"), tensor, found, 512);
    focus();
  }

  const within = (value, extent) => Math.max(0, Math.min(extent - 1, Math.floor(value) || 0));

  // Shows the chosen weight: in the whole picture, under the lens, and in words.
  function focus() {
    const { tensor, found, codes } = look, [rows, columns] = tensor.shape, across = rows > columns;
    const row = (look.row = within(look.row, rows)), column = (look.column = within(look.column, columns));
    const lens = $("lens").getContext("2d"), size = $("lens").width / CELLS;
    // The lens has the orientation of the whole picture: the longer side is horizontal.
    const [wide, tall] = across ? [rows, columns] : [columns, rows], [x, y] = across ? [row, column] : [column, row];
    const left = within(x - (CELLS >> 1), Math.max(1, wide - CELLS + 1)), top = within(y - (CELLS >> 1), Math.max(1, tall - CELLS + 1));
    Object.assign(look, { left, top });
    const whole = $("whole").getContext("2d"), right = $("whole").width / wide, down = $("whole").height / tall;
    whole.putImageData(look.image, 0, 0);
    whole.strokeStyle = `rgb(${colours.accent})`;
    whole.lineWidth = Math.max(1, Math.min(3, $("whole").width / 64));
    whole.strokeRect(left * right, top * down, Math.max(4, CELLS * right), Math.max(4, CELLS * down));
    lens.clearRect(0, 0, $("lens").width, $("lens").height);
    const largest = (tensor.table ? 1 : Math.max(...model.table.map(Math.abs))) * (tensor.law === "normal" ? 2.5 : 1);
    const unit = tensor.law === "xavier_uniform" ? Math.sqrt(6 / (rows + columns)) * tensor.scale : tensor.scale;
    for (let j = 0; j < Math.min(CELLS, tall); j++) {
      for (let i = 0; i < Math.min(CELLS, wide); i++) {
        const at = across ? (left + i) * columns + top + j : (top + j) * columns + left + i;
        const value = tensor.drawn[at] * found[at], dropped = !value;
        const share = dropped ? 0.1 : 0.3 + 0.7 * Math.min(1, Math.abs(value / unit) / largest);
        lens.fillStyle = `rgb(${mix(colours.card, (dropped ? tensor.drawn[at] : value) < 0 ? colours.minus : colours.plus, share).map(Math.round)})`;
        lens.fillRect(i * size + 1, j * size + 1, size - 2, size - 2);
      }
    }
    lens.strokeStyle = `rgb(${colours.ink})`;
    lens.lineWidth = 4;
    lens.strokeRect((x - left) * size + 1, (y - top) * size + 1, size - 2, size - 2);
    const one = model.weight(tensor, found, row * columns + column, codes[row * columns + column]);
    const minus = (text) => `${text}`.replace("-", "−"), number = (value) => minus(value.toPrecision(4));
    const how = tensor.table ? `the path, here with code ${one.code}, chooses ${number(one.factor)} of the drawn numbers` : one.code >= 0 ? `code ${one.code} stands for the factor ${minus(one.factor)}` : one.factor ? "always kept, not searched" : "always dropped, not searched";
    const scaled = one.scale === 1 ? "" : `; the learned scale is ${number(one.scale)}`;
    $("cell").textContent = `Row ${row}, column ${column}: ${tensor.table ? "unit" : "drawn"} ${number(one.drawn)}; ${how}${scaled}; the weight is ${number(one.weight)}.`;
    $("row").value = row;
    $("column").value = column;
    $("lens").setAttribute("aria-label", `Weights around row ${row}, column ${column}; the arrow keys move`);
  }

  function move(row, column) {
    if (!look) return;
    Object.assign(look, { row, column });
    focus();
  }
  function point(canvas, event) { // the place of a click, as shares of width and height
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }
  const moveTo = (x, y) => (look.tensor.shape[0] > look.tensor.shape[1] ? move(x, y) : move(y, x));
  $("whole").addEventListener("click", (event) => {
    const [x, y] = point($("whole"), event), [short, long] = [...look.tensor.shape].sort((a, b) => a - b);
    moveTo(x * long, y * short);
  });
  $("lens").addEventListener("click", (event) => {
    const [x, y] = point($("lens"), event);
    moveTo(look.left + Math.floor(x * CELLS), look.top + Math.floor(y * CELLS));
  });
  $("lens").addEventListener("keydown", (event) => {
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if (!x && !y) return;
    event.preventDefault();
    const across = look.tensor.shape[0] > look.tensor.shape[1];
    move(look.row + (across ? x : y), look.column + (across ? y : x));
  });
  for (const id of ["row", "column"]) $(id).addEventListener("change", () => move(+$("row").value, +$("column").value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => model && drawGallery(model.ticket));

  // -- damage ----------------------------------------------------------------------------------------

  let flipped = false;
  $("flip").addEventListener("click", () => {
    const bytes = original.slice();
    flipped = !flipped;
    if (flipped) bytes[bytes.length - 1 - Math.floor(bytes.length / 3)] ^= 1;
    stop();
    random = null;
    $("flip").textContent = flipped ? "Repair it" : "Flip one bit of the ticket";
    start(bytes);
  });

  $("prompt").value = facts.prompt;
  degrees();
  start(original);
})();
