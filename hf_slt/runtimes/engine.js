// A ticket in plain JavaScript: read it, draw its weights, check every digest, compute, sample, tokenise.
//
//   weight = drawn(seed, name, index) * factors[code] * scale       as hf_slt/weights computes it, bit for bit
//   weight = drawn(seed, name, state) * scale                       for a trellis: codes are a path through its states
//
// The format and the generator are specified in docs/format.md, hf_slt/weights/random_weights.py, codes.py and
// quantisation.py, and hf_slt/tickets/entropy.py. Nothing here needs a page: it also runs in Node.
const SLT = (() => {
  "use strict";
  const GENERATOR = "philox4x64-10/1";
  const TABLE_DIGEST = "e826a52cdd8f495d8df125d4853240931f5e58f5898454d43d5ebdc48025652a";
  const VERSIONS = [1, 2, 3]; // versions of the format; before 3 the options are not nested in the configuration
  const INFLATED = 16; // a deflated header may become this many times longer
  const CHUNK = 1 << 16; // weights drawn, or bytes digested, between two pauses
  const utf8 = new TextEncoder();
  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

  // -- SHA-256 (FIPS 180-4) --------------------------------------------------------------------------

  const [START, ROUNDS] = (() => {
    const primes = [];
    for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
    const bits = (root) => ((root % 1) * 2 ** 32) | 0; // the first 32 bits after the point
    return [primes.slice(0, 8).map((p) => bits(Math.sqrt(p))), Int32Array.from(primes, (p) => bits(Math.cbrt(p)))];
  })();

  class Sha256 {
    constructor() {
      this.state = Int32Array.from(START);
      this.words = new Int32Array(64);
      this.rest = new Uint8Array(64);
      this.length = 0;
    }

    update(bytes) {
      let at = 0;
      while (at < bytes.length) {
        const filled = this.length % 64;
        if (!filled && bytes.length - at >= 64) {
          this.block(bytes, at);
          at += 64;
          this.length += 64;
          continue;
        }
        const part = bytes.subarray(at, at + 64 - filled);
        this.rest.set(part, filled);
        at += part.length;
        this.length += part.length;
        if (this.length % 64 === 0) this.block(this.rest, 0);
      }
      return this;
    }

    block(bytes, at) {
      const w = this.words;
      for (let i = 0; i < 16; i++, at += 4) {
        w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
      }
      for (let i = 16; i < 64; i++) {
        const x = w[i - 15], y = w[i - 2];
        const s = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
        const t = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
        w[i] = (w[i - 16] + s + w[i - 7] + t) | 0;
      }
      let [a, b, c, d, e, f, g, h] = this.state;
      for (let i = 0; i < 64; i++) {
        const s = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
        const t = (h + s + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
        const u = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
        h = g; g = f; f = e; e = (d + t) | 0;
        d = c; c = b; b = a; a = (t + u + ((b & c) ^ (b & d) ^ (c & d))) | 0;
      }
      [a, b, c, d, e, f, g, h].forEach((one, i) => (this.state[i] += one));
    }

    bytes() {
      const bits = this.length * 8;
      const end = new Uint8Array(((119 - (this.length % 64)) % 64) + 9);
      const view = new DataView(end.buffer);
      end[0] = 128;
      view.setUint32(end.length - 8, Math.floor(bits / 2 ** 32));
      view.setUint32(end.length - 4, bits % 2 ** 32);
      this.update(end);
      const found = new DataView(new ArrayBuffer(32));
      this.state.forEach((one, i) => found.setInt32(4 * i, one));
      return new Uint8Array(found.buffer);
    }

    hex() {
      return Array.from(this.bytes(), (one) => one.toString(16).padStart(2, "0")).join("");
    }
  }

  const bytesOf = (data) =>
    typeof data === "string" ? utf8.encode(data) : new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const sha256 = (data) => new Sha256().update(bytesOf(data)).hex();

  async function digest(data, pause) {
    const bytes = bytesOf(data), hash = new Sha256();
    for (let at = 0; at < bytes.length; at += 16 * CHUNK) {
      hash.update(bytes.subarray(at, at + 16 * CHUNK));
      await pause();
    }
    return hash.hex();
  }

  // -- Philox4x64-10 in 32-bit halves ----------------------------------------------------------------

  // The upper half of a 32 x 32 bit product.
  function upper(a, b) {
    const al = a & 0xffff, ah = a >>> 16, bl = b & 0xffff, bh = b >>> 16;
    const m = Math.imul(ah, bl), n = Math.imul(al, bh);
    const middle = (m & 0xffff) + (n & 0xffff) + (Math.imul(al, bl) >>> 16);
    return (Math.imul(ah, bh) + (m >>> 16) + (n >>> 16) + (middle >>> 16)) | 0;
  }

  const carry = (total, part) => (total >>> 0 < part >>> 0 ? 1 : 0);

  // The ten keys of the rounds, each as four 32-bit words.
  function roundKeys(seed, name) {
    const key = new DataView(new Sha256().update(utf8.encode(`hf_slt/${GENERATOR}/${seed}/${name}`)).bytes().buffer);
    const steps = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];
    const keys = new Int32Array(40);
    for (let round = 0; round < 10; round++) {
      steps.forEach((step, i) => {
        const word = BigInt.asUintN(64, key.getBigUint64(8 * i, true) + BigInt(round) * step);
        keys[4 * round + 2 * i] = Number(word & 0xffffffffn);
        keys[4 * round + 2 * i + 1] = Number(word >> 32n);
      });
    }
    return keys;
  }

  // Fills `out` with words of 32 bits, eight per block, beginning with block `first`.
  function fillWords(keys, first, out) {
    const M0 = 0xe14c6c93 | 0, M1 = 0xd2e7470e | 0, N0 = 0x95121157 | 0, N1 = 0xca5a8263 | 0;
    for (let at = 0, block = first + 1; at < out.length; at += 8, block++) {
      let a0 = block | 0, a1 = (block / 2 ** 32) | 0, b0 = 0, b1 = 0, c0 = 0, c1 = 0, d0 = 0, d1 = 0;
      for (let k = 0; k < 40; k += 4) {
        // a * M and c * N, 128 bits each: parts of 32 bits, and their carries
        let p = upper(a0, M0), q = Math.imul(a0, M1), r = Math.imul(a1, M0);
        let s = (p + q) | 0, t = (s + r) | 0, up = carry(s, p) + carry(t, s);
        const low1 = t, low0 = Math.imul(a0, M0);
        p = upper(a0, M1); q = upper(a1, M0); r = Math.imul(a1, M1);
        s = (p + q) | 0; t = (s + r) | 0;
        const high0 = (t + up) | 0;
        const high1 = (upper(a1, M1) + carry(s, p) + carry(t, s) + carry(high0, t)) | 0;
        p = upper(c0, N0); q = Math.imul(c0, N1); r = Math.imul(c1, N0);
        s = (p + q) | 0; t = (s + r) | 0; up = carry(s, p) + carry(t, s);
        const down1 = t, down0 = Math.imul(c0, N0);
        p = upper(c0, N1); q = upper(c1, N0); r = Math.imul(c1, N1);
        s = (p + q) | 0; t = (s + r) | 0;
        const top0 = (t + up) | 0;
        const top1 = (upper(c1, N1) + carry(s, p) + carry(t, s) + carry(top0, t)) | 0;
        a0 = top0 ^ b0 ^ keys[k]; a1 = top1 ^ b1 ^ keys[k + 1];
        b0 = down0; b1 = down1;
        c0 = high0 ^ d0 ^ keys[k + 2]; c1 = high1 ^ d1 ^ keys[k + 3];
        d0 = low0; d1 = low1;
      }
      out[at] = a0; out[at + 1] = a1; out[at + 2] = b0; out[at + 3] = b1;
      out[at + 4] = c0; out[at + 5] = c1; out[at + 6] = d0; out[at + 7] = d1;
    }
  }

  // Words `start` to `stop` of a tensor; past the end of a Uint32Array nothing is written.
  function words(seed, name, start, stop) {
    const first = Math.floor(start / 8), out = new Uint32Array(stop - 8 * first);
    fillWords(roundKeys(seed, name), first, out);
    return out.subarray(start - 8 * first);
  }

  // -- laws ------------------------------------------------------------------------------------------

  // The standard normal quantile of p >= 1/2, to 1e-15: algorithm AS 241 of Wichura (1988).
  function quantile(p) {
    const ratio = (r, top, bottom) =>
      top.reduceRight((total, one) => total * r + one) / bottom.reduceRight((total, one) => total * r + one);
    const q = p - 0.5;
    if (q <= 0.425) {
      return q * ratio(0.180625 - q * q,
        [3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
          45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727],
        [1, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077, 21213.794301586595867,
          39307.895800092710610, 28729.085735721942674, 5226.4952788528545610]);
    }
    const r = Math.sqrt(-Math.log(1 - p)); // at most 3.4 here, for 2**-17: the far tail is not needed
    return ratio(r - 1.6,
      [1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
        1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4],
      [1, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550, 0.148103976427480074590,
        0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9]);
  }

  let tables = null; // A and B of the specification, one after the other

  function normalTables() {
    if (tables) return tables;
    const half = 1 << 15, found = new Int32Array(4 * half);
    for (let j = 0; j < half; j++) {
      const q = quantile((half + j + 0.5) / (2 * half));
      [0.6, 0.8].forEach((part, i) => {
        const entry = Math.round(part * 2 ** 21 * q), middle = (2 * i + 1) * half;
        found[middle + j] = entry;
        found[middle - 1 - j] = -entry;
      });
    }
    const digest = sha256(found);
    if (digest !== TABLE_DIGEST) throw Error(`this browser's logarithm is wrong: tables with digest ${digest}`);
    return (tables = found);
  }

  // All weights of a tensor, in float32, before any mask.
  async function draw(seed, name, shape, law, scale, pause) {
    if (law === "xavier_uniform") scale *= Math.sqrt(6 / (shape[0] + shape[1]));
    const shift = { normal: 21, signed_constant: 0 }[law] ?? 24;
    const factor = Math.fround(Math.fround(scale) * 2 ** -shift);
    const out = new Float32Array(shape[0] * shape[1]), keys = roundKeys(seed, name), chunk = new Uint32Array(CHUNK);
    const table = law === "normal" ? normalTables() : null;
    for (let start = 0; start < out.length; start += CHUNK) {
      const part = out.subarray(start, start + CHUNK), w = chunk.subarray(0, part.length);
      fillWords(keys, start / 8, w);
      if (table) for (let i = 0; i < w.length; i++) part[i] = (table[w[i] & 0xffff] + table[0x10000 + (w[i] >>> 16)]) * factor;
      else if (!shift) for (let i = 0; i < w.length; i++) part[i] = (1 - 2 * (w[i] >>> 31)) * factor;
      else for (let i = 0; i < w.length; i++) part[i] = (2 * (w[i] >>> 8) + 1 - 2 ** 24) * factor;
      await pause();
    }
    return out;
  }

  // -- codes: packed in planes, or coded near their entropy ---------------------------------------------

  const planes = (levels) => Math.max(1, 32 - Math.clz32(levels - 1));

  function unpack(packed, size, levels) {
    const codes = new Uint8Array(size), row = Math.ceil(size / 8);
    for (let plane = 0; plane < planes(levels); plane++) {
      for (let i = 0; i < size; i++) codes[i] |= ((packed[plane * row + (i >> 3)] >> (i & 7)) & 1) << plane;
    }
    return codes;
  }

  function pack(codes, levels) {
    const row = Math.ceil(codes.length / 8), packed = new Uint8Array(planes(levels) * row);
    for (let plane = 0; plane < planes(levels); plane++) {
      for (let i = 0; i < codes.length; i++) packed[plane * row + (i >> 3)] |= ((codes[i] >> plane) & 1) << (i & 7);
    }
    return packed;
  }

  function count(codes, levels) {
    const counts = new Array(levels).fill(0);
    for (const one of codes) counts[one]++;
    return counts;
  }

  const ONES = Uint8Array.from({ length: 256 }, (_, value) => { // bits set in a byte
    let ones = 0;
    for (; value; value >>= 1) ones += value & 1;
    return ones;
  });
  const TOTAL = 1 << 24, MARK = 0x5eed;

  // The codes of all tensors from one stream of rANS; counts are by name, [[name, counts], ...].
  async function decode(stream, counts, pause) {
    const bytes = new Uint8Array(4 * Math.ceil(stream.length / 4));
    bytes.set(stream);
    const view = new DataView(bytes.buffer);
    let left = bytes.length;
    const pop = () => view.getUint32((left -= 4), true);
    let high = 0, low = left ? pop() : 0; // the state, 64 bits in two halves
    if (left) { high = low; low = pop(); }
    if (!stream.length || !stream[stream.length - 1]) throw Error("the coded masks are damaged: they end in a zero");

    function model(n, k) { // c[0] ... c[2**b], the sums of the letters' weights
      const bits = Math.min(8, n), sums = new Uint32Array(2 ** bits + 1);
      const falling = (x, i) => { let p = 1n; for (let j = 0; j < i; j++) p *= BigInt(Math.max(0, x - j)); return p; };
      const byOnes = Array.from({ length: bits + 1 }, (_, j) =>
        1 + Number((BigInt(TOTAL - 2 ** bits) * falling(k, j) * falling(n - k, bits - j)) / falling(n, bits)));
      const weights = Array.from({ length: 2 ** bits }, (_, v) => byOnes[ONES[v]]);
      weights[weights.indexOf(Math.max(...weights))] += TOTAL - sum(weights);
      weights.forEach((one, v) => (sums[v + 1] = sums[v] + one));
      return sums;
    }

    function letter(sums) {
      const q = low & (TOTAL - 1);
      let v = 0, end = sums.length - 1;
      while (end - v > 1) {
        const half = (v + end) >> 1;
        if (sums[half] <= q) v = half;
        else end = half;
      }
      // floor(s / T) * w + q - c in parts: of 40 bits, 24 above and 16 below
      const weight = sums[v + 1] - sums[v], rest = high * 256 + (low >>> 24);
      const above = Math.floor(rest / 65536) * weight;
      const below = (rest % 65536) * weight + q - sums[v] + (above % 65536) * 65536;
      high = Math.floor(above / 65536) + Math.floor(below / 2 ** 32);
      low = below % 2 ** 32;
      if (!high && left) { high = low; low = pop(); }
      return v;
    }

    async function mask(size, kept) {
      const letters = new Uint8Array(Math.ceil(size / 8));
      let at = 0, n = size, k = kept;
      while (k > 0 && k < n) {
        const sums = model(n, k), end = at + Math.max(1, Math.floor(n / 32));
        for (; at < end; at++) k -= ONES[(letters[at] = letter(sums))];
        n = Math.max(0, size - 8 * at);
        await pause();
      }
      if (k !== 0 && k !== n) throw Error("the coded masks are damaged: their counts do not fit");
      if (k) {
        letters.fill(255, at);
        letters[letters.length - 1] >>= -size & 7;
      }
      return unpack(letters, size, 2);
    }

    const found = {};
    for (const [name, some] of [...counts].sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
      const codes = (found[name] = new Uint8Array(sum(some)));
      let places = Uint32Array.from(codes.keys());
      for (let level = 0; level + 1 < some.length; level++) {
        const bits = await mask(places.length, sum(some.slice(level + 1)));
        places = places.filter((_, i) => bits[i]);
        for (const place of places) codes[place] = level + 1;
      }
    }
    if (high || low !== MARK || left) throw Error("the coded masks are damaged: too short, too long or altered");
    return found;
  }

  const roundEven = (x) => { // as Python rounds
    const down = Math.floor(x), rest = x - down;
    return down + (rest > 0.5 || (rest === 0.5 && down % 2) ? 1 : 0);
  };

  // If only a part of a tensor is searched: 2 for a weight that has a code, 1 for one that is always kept, 0 for neither.
  function searchPattern(seed, name, size, searched, frozenDensity) {
    const order = words(seed, name + ".search", 0, size), sorted = order.slice().sort();
    const kinds = new Uint8Array(size);
    for (const many of [searched + roundEven(frozenDensity * (size - searched)), searched]) {
      if (!many) continue;
      const last = sorted[many - 1];
      let ties = many - sorted.indexOf(last); // of equal words, the first ones count
      for (let i = 0; i < size; i++) if (order[i] < last || (order[i] === last && ties-- > 0)) kinds[i]++;
    }
    return kinds;
  }

  // -- the file --------------------------------------------------------------------------------------

  function half(h) { // float16 -> number
    const e = (h >> 10) & 31, m = h & 1023, sign = h >> 15 ? -1 : 1;
    return sign * (e === 31 ? (m ? NaN : Infinity) : e ? (1 + m / 1024) * 2 ** (e - 15) : m * 2 ** -24);
  }

  const READ = {
    F32: (bytes) => new Float32Array(bytes.slice().buffer),
    F16: (bytes) => Float32Array.from(new Uint16Array(bytes.slice().buffer), half),
    I8: (bytes) => new Int8Array(bytes.slice().buffer),
    U8: (bytes) => bytes,
  };
  const WIDTH = { F32: 4, F16: 2, I8: 1, U8: 1 };

  const fromBase64 = (text) => Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));

  // The text of a zlib stream; an error if it is longer than `most` bytes.
  async function inflate(bytes, most = Infinity) {
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader(), parts = [];
    for (let size = 0; ;) {
      const { done, value } = await reader.read();
      if (done) return new TextDecoder().decode(await new Blob(parts).arrayBuffer());
      if ((size += value.length) > most) {
        await reader.cancel();
        throw Error(`a deflated text is longer than ${most} bytes`);
      }
      parts.push(value);
    }
  }

  // The arrays of a tensor in a file, in order: [key, type, number of values].
  function stored(entry) {
    const size = entry.shape[0] * entry.shape[1], scales = [entry.key + "_scales", "F16", entry.shape[0]];
    if (entry.key == null) return [];
    if (entry.counts) return [[entry.key, "U8", planes(entry.counts.length) * Math.ceil(sum(entry.counts) / 8)]];
    if (entry.bits === 8) return [[entry.key, "I8", size], scales];
    if (entry.bits === 4) return [[entry.key, "U8", Math.ceil(size / 2)], scales];
    return [[entry.key, "F" + entry.bits, size]];
  }

  // The header of a mask file, and its arrays by key: typed, not yet checked.
  async function readFile(bytes) {
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    if (length > bytes.length - 8) throw Error("the file is truncated");
    const table = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
    const metadata = table.__metadata__;
    delete table.__metadata__;
    if (metadata.format !== "pt" || `${Object.keys(metadata).sort()}` !== "format,hf_slt,hf_slt_sha256") {
      throw Error("the metadata are not those that hf_slt writes");
    }
    const plain = metadata.hf_slt.startsWith("{");
    const text = plain ? metadata.hf_slt : await inflate(fromBase64(metadata.hf_slt), INFLATED * metadata.hf_slt.length);
    const found = sha256(text), expected = metadata.hf_slt_sha256;
    if (found !== expected) return { found, expected };
    const header = JSON.parse(text);
    const options = text.slice(Math.max(0, text.indexOf(`"supermask":`)));
    header.seed = options.match(/"seed":\s*(\d+)/)[1]; // as text: a number of 64 bits is more than JSON.parse holds
    let end = 0;
    const parts = {};
    for (const [key, one] of Object.entries(table).sort((a, b) => a[1].data_offsets[0] - b[1].data_offsets[0])) {
      const [start, stop] = one.data_offsets;
      const size = one.shape.reduce((product, extent) => product * extent, WIDTH[one.dtype]);
      if (start !== end || stop - start !== size) throw Error(`tensor ${key} is not where the file's table says`);
      parts[key] = [one.dtype, bytes.subarray(8 + length + start, 8 + length + stop)];
      end = stop;
    }
    if (8 + length + end !== bytes.length) throw Error("the file is longer or shorter than its table says");
    return { found, expected, header, parts };
  }

  // Reads a ticket, draws its weights and checks it. `report` is called with every digest: {name, kind, expected,
  // found, good}. `pause` is awaited often, to keep a page responsive. Faults are never thrown: `faults` has one line
  // for each.
  async function open(bytes, { report = () => {}, pause = () => {} } = {}) {
    const ticket = { faults: [], tensors: {}, bytes: bytes.length, drawing: 0 }; // in milliseconds
    const check = async (name, kind, expected, found) => {
      const good = expected.length >= 16 && found.startsWith(expected);
      if (!good) ticket.faults.push(`${name}: the ${kind} digest ${found.slice(0, 8)}…, and should have ${expected.slice(0, 8)}…`);
      await report({ name, kind, expected, found, good });
    };
    try {
      const file = await readFile(bytes);
      await check("header", "description has", file.expected, file.found);
      if (!file.header) return ticket;
      await readTensors(ticket, file, check, pause);
    } catch (error) {
      ticket.faults.push(`the ticket cannot be read (${error.message})`);
    }
    return ticket;
  }

  async function readTensors(ticket, { header, parts }, check, pause) {
    const version = header.format_version, { supermask, ...stock } = header.config;
    if (!VERSIONS.includes(version)) throw Error(`this ticket has format version ${version}; this page reads ${VERSIONS[0]} to ${VERSIONS.at(-1)}; make the page again with a newer hf_slt`);
    if ((version < 3) !== (supermask === undefined)) throw Error(`the options are in the wrong place for version ${version}`);
    const config = { factors: [0, 1], search: 1, frozen_density: null, ...stock, ...supermask };
    Object.assign(ticket, { config, header, seed: header.seed });
    if (config.weight_generator !== GENERATOR) throw Error(`weight_generator ${config.weight_generator} is unknown`);
    const entries = Object.entries(header.tensors).map(([name, entry]) => {
      const size = entry.shape[0] * entry.shape[1];
      const counts = entry.counts ?? (entry.kept == null ? null : [size - entry.kept, entry.kept]); // of version 1
      return [name, { ...entry, size, counts }];
    }).sort((a, b) => (a[0] < b[0] ? -1 : 1));
    compareShapes(config, entries);
    const coded = header.encoding === "entropy";
    let codes = {};
    if (coded) {
      let [, data] = parts.coded ?? parts.coded_masks;
      if (parts.coded) { // trained values come first, with the same bytes as in separate tensors
        for (const [, entry] of entries) {
          for (const [key, type, many] of entry.counts ? [] : stored(entry)) {
            parts[key] = [type, data.subarray(0, many * WIDTH[type])];
            data = data.subarray(many * WIDTH[type]);
          }
        }
      }
      codes = await decode(data, entries.filter(([, one]) => one.counts).map(([name, one]) => [name, one.counts]), pause);
    }
    const digests = [];
    for (const [name, entry] of entries) {
      const tensor = (ticket.tensors[name] = { ...entry, name });
      const arrays = (coded && entry.counts ? [] : stored(entry)).map(([key, type, many]) => {
        if (!parts[key] || parts[key][0] !== type || parts[key][1].length !== many * WIDTH[type]) {
          throw Error(`${name}: tensor ${key} is missing, or not of ${many} numbers of type ${type}`);
        }
        return READ[type](parts[key][1]);
      });
      if (entry.counts) {
        const levels = entry.counts.length, searched = sum(entry.counts);
        const packed = coded ? pack(codes[name], levels) : arrays[0];
        tensor.codes = coded ? codes[name] : unpack(packed, searched, levels);
        digests.push([name, await digest(packed, pause)]);
        await check(name, "mask has", entry.data_sha256, digests.at(-1)[1]);
        if (`${count(tensor.codes, 1 << planes(levels)).slice(0, levels)}` !== `${entry.counts}`) {
          ticket.faults.push(`${name}: the mask has other codes than the ${entry.counts} it says`);
        }
        if (searched < entry.size) {
          tensor.pattern = searchPattern(ticket.seed, name, entry.size, searched, config.frozen_density ?? 1);
        }
      } else if (entry.key != null) {
        tensor.values = values(entry, arrays);
        digests.push([name, await digest(tensor.values, pause)]);
        await check(name, "trained values have", entry.data_sha256, digests.at(-1)[1]);
      }
      if (entry.law != null) {
        const begin = performance.now();
        let drawn = null;
        if (config.state_bits && entry.counts) { // a table of numbers in units of their law, times that unit
          const wide = entry.law === "xavier_uniform", shape = [2 ** config.state_bits, 1], law = wide ? "uniform" : entry.law;
          const unit = wide ? entry.scale * Math.sqrt(6 / (entry.shape[0] + entry.shape[1])) : entry.scale;
          drawn = await draw(ticket.seed, name, shape, law, unit, pause);
          tensor.table = await draw(ticket.seed, name, shape, law, 1, pause);
          tensor.drawn = new Float32Array(entry.size).fill(unit);
        } else drawn = tensor.drawn = await draw(ticket.seed, name, entry.shape, entry.law, entry.scale, pause);
        ticket.drawing += performance.now() - begin;
        await check(name, "weights have", entry.weight_sha256, await digest(drawn, pause));
      }
    }
    const all = sha256(digests.map(([name, one]) => `${name} ${one}\n`).join(""));
    await check("all masks", "list has", header.mask_digest, all);
  }

  // Throws unless the tensors are those that a GPT-2 of this configuration has.
  function compareShapes(config, entries) {
    const { n_layer: layers, n_embd: width, n_head: heads, vocab_size: rows, layer_norm: norm } = config;
    if (![layers, width, heads, rows, config.n_positions].every((one) => Number.isInteger(one) && one > 0)) {
      throw Error("the configuration names no sizes");
    }
    if (layers > entries.length) throw Error(`${layers} layers of ${entries.length} tensors`);
    const qk = heads * (config.n_qk ?? width / heads), v = heads * (config.n_v ?? width / heads);
    const inner = config.n_inner ?? 4 * width, rank = config.embedding_rank;
    const wanted = rank ? { "wte.rows": [rows, rank], "wte.basis": [rank, width] } : { wte: [rows, width] };
    wanted.wpe = [config.n_positions, width];
    for (let layer = 0; layer < layers; layer++) {
      const inside = {
        "attn.c_attn.query": [width, qk], "attn.c_attn.key": [width, qk], "attn.c_attn.value": [width, v],
        "attn.c_proj": [v, width], "mlp.c_fc": [width, inner], "mlp.c_proj": [inner, width],
      };
      if (norm === "trained") Object.assign(inside, { ln_1: [1, width], ln_2: [1, width] });
      for (const name in inside) wanted[`h.${layer}.${name}`] = inside[name];
    }
    if (norm === "trained") wanted.ln_f = [1, width];
    const extra = { lm_head: [rows, width], score: [null, width], head_bias: [1, rows] };
    const found = Object.fromEntries(entries), base = (name) => name.replace(/\.scale$/, "");
    for (const name in wanted) if (!found[name]) throw Error(`${name} is missing`);
    const language = /LMHeadModel$/.test(config.architectures?.[0] ?? "");
    if (language && !config.tie_word_embeddings !== Boolean(found.lm_head)) {
      throw Error(`lm_head is ${found.lm_head ? "present" : "missing"}, which does not fit tie_word_embeddings`);
    }
    if (language && Boolean(config.head_bias) !== Boolean(found.head_bias)) throw Error("head_bias does not fit the configuration");
    for (const [name, { shape, counts }] of entries) {
      let right = wanted[name] ?? extra[name];
      if (name.endsWith(".scale")) {
        const of = found[base(name)], tall = base(name).startsWith("h.") || base(name) === "wte.basis";
        right = of && [1, config.scales === "tensor" ? 1 : tall ? of.shape[1] : of.shape[0]];
      }
      if (!right || shape.length !== 2 || right.some((one, i) => one !== null && one !== shape[i])) {
        throw Error(`${name} has the shape ${shape}, the configuration says ${right ?? "nothing about it"}`);
      }
      if (counts && (config.scales ?? "none") !== "none" && !found[name + ".scale"]) throw Error(`${name}.scale is missing`);
      if (counts && counts.length !== config.factors.length) throw Error(`${name} has another number of codes than there are factors`);
    }
  }

  function values(entry, [codes, scales]) { // trained values in float32
    if (!scales) return codes;
    const columns = entry.shape[1], found = new Float32Array(entry.size);
    for (let i = 0; i < entry.size; i++) {
      const code = entry.bits === 8 ? codes[i] : ((codes[i >> 1] >> (4 * (i & 1))) & 15) - 8;
      found[i] = code * scales[Math.floor(i / columns)];
    }
    return found;
  }

  // -- masks -------------------------------------------------------------------------------------------

  // Shuffles codes by a seed: a random mask with the same counts as the trained one.
  function shuffled(tensor, seed) {
    const codes = tensor.codes.slice(), draws = words(seed, tensor.name + ".shuffle", 0, codes.length);
    for (let i = codes.length - 1; i > 0; i--) {
      const j = Math.floor((draws[i] / 2 ** 32) * (i + 1)), one = codes[i];
      codes[i] = codes[j];
      codes[j] = one;
    }
    return codes;
  }

  // The factor of every weight; null if all weights are kept, or none is drawn.
  function factors(tensor, codes, table) {
    if (!codes) return null;
    const found = new Float32Array(tensor.size);
    if (tensor.table) { // the number at each state, in units of the law; a state is the last codes of its row
      const [rows, columns] = tensor.shape, down = tensor.input_axes[0] === 0, bits = planes(table.length);
      const [outputs, inputs, step, next] = down ? [columns, rows, columns, 1] : [rows, columns, 1, columns];
      for (let output = 0; output < outputs; output++) {
        let state = 0; // a row is closed: before its first weight comes its last
        for (let i = -inputs; i < inputs; i++) {
          const at = output * next + (i < 0 ? i + inputs : i) * step;
          state = ((state << bits) | codes[at]) & (tensor.table.length - 1);
          if (i >= 0) found[at] = tensor.table[state];
        }
      }
      return found;
    }
    for (let i = 0, next = 0; i < found.length; i++) {
      const kind = tensor.pattern ? tensor.pattern[i] : 2;
      found[i] = kind === 2 ? table[codes[next++]] : kind;
    }
    return found;
  }

  // -- the model -----------------------------------------------------------------------------------------

  const TANH = Math.sqrt(2 / Math.PI);
  function erf(x) { // to 1.2e-7 (Numerical Recipes, 6.2)
    const t = 1 / (1 + Math.abs(x) / 2);
    const terms = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587,
      -0.82215223, 0.17087277];
    const tail = t * Math.exp(-x * x + terms.reduceRight((total, one) => total * t + one));
    return x < 0 ? tail - 1 : 1 - tail;
  }
  const ACTIVATIONS = {
    gelu_new: (x) => 0.5 * x * (1 + Math.tanh(TANH * (x + 0.044715 * x * x * x))),
    gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
    relu: (x) => Math.max(0, x),
    silu: (x) => x / (1 + Math.exp(-x)),
  };

  // y = matrix @ x, with a matrix (outputs, inputs) stored by rows; four rows at a time
  function multiply({ weights, inputs }, x, y) {
    let row = 0;
    for (; row + 3 < y.length; row += 4) {
      const p = row * inputs, q = p + inputs, r = q + inputs, s = r + inputs;
      let a = 0, b = 0, c = 0, d = 0;
      for (let i = 0; i < inputs; i++) {
        const one = x[i];
        a += weights[p + i] * one;
        b += weights[q + i] * one;
        c += weights[r + i] * one;
        d += weights[s + i] * one;
      }
      y[row] = a; y[row + 1] = b; y[row + 2] = c; y[row + 3] = d;
    }
    for (; row < y.length; row++) {
      y[row] = 0;
      for (let i = 0; i < inputs; i++) y[row] += weights[row * inputs + i] * x[i];
    }
  }

  class Model {
    constructor(ticket) {
      const { config, tensors } = (this.ticket = ticket);
      const width = config.n_embd, heads = config.n_head, inner = config.n_inner ?? 4 * width;
      this.heads = heads;
      this.qk = config.n_qk ?? width / heads;
      this.v = config.n_v ?? width / heads;
      this.positions = config.n_positions;
      this.act = ACTIVATIONS[config.activation_function];
      if (!this.act) throw Error(`activation_function ${config.activation_function} is unknown`);
      this.table = config.factors;
      const floats = (n) => new Float64Array(n); // JavaScript computes in float64; only weights are float32
      this.x = floats(width); this.normed = floats(width); this.out = floats(width);
      this.query = floats(heads * this.qk); this.mixed = floats(heads * this.v); this.inner = floats(inner);
      this.shares = floats(this.positions); this.logits = floats(config.vocab_size);
      this.cache = Array.from({ length: config.n_layer }, () =>
        ({ keys: floats(this.positions * heads * this.qk), values: floats(this.positions * heads * this.v) }));
      this.headBias = tensors.head_bias?.values;
      this.length = 0; // tokens read
    }

    // Computes the matrices of a mask: the trained mask or, with a seed, a random mask with the same counts. Returns
    // false if another mask was requested in the meantime.
    async setMask(seed = null, pause = () => {}) {
      const turn = (this.turn = {}), codes = {}, matrices = {};
      for (const tensor of Object.values(this.ticket.tensors)) {
        if (tensor.shape[0] === 1 && !tensor.law) continue; // scales, gains, biases
        codes[tensor.name] = tensor.codes && seed !== null ? shuffled(tensor, seed) : tensor.codes;
        matrices[tensor.name] = await this.matrix(tensor, codes[tensor.name], pause);
      }
      if (turn !== this.turn) return false;
      Object.assign(this, { codes, matrices });
      this.reset();
      return true;
    }

    // One weight of the model, and the numbers from which it is computed.
    weight(tensor, found, i, code) {
      const scale = this.scaleOf(tensor, i), drawn = tensor.drawn ? tensor.drawn[i] : tensor.values[i];
      const weight = Math.fround(Math.fround(drawn * (found ? found[i] : 1)) * scale);
      return { drawn, code, factor: found ? found[i] : 1, scale, weight };
    }

    scaleOf(tensor, i) {
      const scales = this.ticket.tensors[tensor.name + ".scale"]?.values;
      if (!scales) return 1;
      const columns = tensor.shape[1], output = tensor.name.startsWith("h.") ? i % columns : Math.floor(i / columns);
      return scales[scales.length > 1 ? output : 0];
    }

    async matrix(tensor, codes, pause) {
      const found = factors(tensor, codes, this.table), [rows, columns] = tensor.shape;
      const source = tensor.drawn ?? tensor.values, inside = tensor.name.startsWith("h.");
      const scales = this.ticket.tensors[tensor.name + ".scale"]?.values ?? [1], weights = new Float32Array(tensor.size);
      const [down, across] = scales.length > 1 ? (inside ? [0, 1] : [1, 0]) : [0, 0]; // one scale per output
      for (let row = 0, i = 0; row < rows; row++) {
        for (let column = 0; column < columns; column++, i++) {
          const one = found ? Math.fround(source[i] * found[i]) : source[i];
          // tensors of a block have inputs first; here outputs are first
          weights[inside ? column * rows + row : i] = one * scales[row * down + column * across];
        }
        if (row % 64 === 63) await pause();
      }
      await pause();
      return { weights, inputs: inside ? rows : columns };
    }

    reset() {
      this.length = 0;
    }

    norm(x, y, name) {
      const { layer_norm, layer_norm_epsilon } = this.ticket.config;
      if (!layer_norm) return y.set(x);
      let mean = 0, variance = 0;
      for (const one of x) mean += one / x.length;
      for (const one of x) variance += (one - mean) ** 2 / x.length;
      const scale = 1 / Math.sqrt(variance + layer_norm_epsilon), gain = this.ticket.tensors[name]?.values;
      for (let i = 0; i < x.length; i++) y[i] = (x[i] - mean) * scale * (gain ? gain[i] : 1);
    }

    attend(layer, at) {
      const { heads, qk, v, query, shares, mixed } = this, { keys, values } = this.cache[layer];
      const { scale_attn_weights, scale_attn_by_inverse_layer_idx } = this.ticket.config;
      const scaling = (scale_attn_weights ? 1 / Math.sqrt(qk) : 1) / (scale_attn_by_inverse_layer_idx ? layer + 1 : 1);
      mixed.fill(0);
      for (let head = 0; head < heads; head++) {
        let largest = -Infinity, total = 0;
        for (let past = 0; past <= at; past++) {
          let dot = 0;
          for (let i = 0, k = (past * heads + head) * qk, q = head * qk; i < qk; i++) dot += query[q + i] * keys[k + i];
          shares[past] = dot * scaling;
          largest = Math.max(largest, shares[past]);
        }
        for (let past = 0; past <= at; past++) total += shares[past] = Math.exp(shares[past] - largest);
        for (let past = 0; past <= at; past++) {
          const share = shares[past] / total;
          for (let i = 0, k = (past * heads + head) * v, m = head * v; i < v; i++) mixed[m + i] += share * values[k + i];
        }
      }
    }

    // Returns the logits after one more token. The next call overwrites the array.
    forward(token) {
      const { x, normed, out, matrices: m, heads, qk, v, inner, act } = this, at = this.length++;
      const wte = m.wte.weights, wpe = m.wpe.weights, width = x.length;
      for (let i = 0; i < width; i++) x[i] = wte[token * width + i] + wpe[at * width + i];
      this.cache.forEach(({ keys, values }, layer) => {
        const name = `h.${layer}.`, add = () => out.forEach((one, i) => (x[i] += one));
        this.norm(x, normed, name + "ln_1");
        multiply(m[name + "attn.c_attn.query"], normed, this.query);
        multiply(m[name + "attn.c_attn.key"], normed, keys.subarray(at * heads * qk, (at + 1) * heads * qk));
        multiply(m[name + "attn.c_attn.value"], normed, values.subarray(at * heads * v, (at + 1) * heads * v));
        this.attend(layer, at);
        multiply(m[name + "attn.c_proj"], this.mixed, out);
        add();
        this.norm(x, normed, name + "ln_2");
        multiply(m[name + "mlp.c_fc"], normed, inner);
        for (let i = 0; i < inner.length; i++) inner[i] = act(inner[i]);
        multiply(m[name + "mlp.c_proj"], inner, out);
        add();
      });
      this.norm(x, normed, "ln_f");
      multiply(m.lm_head ?? m.wte, normed, this.logits);
      if (this.headBias) for (let i = 0; i < this.logits.length; i++) this.logits[i] += this.headBias[i];
      return this.logits;
    }
  }

  // Chooses token `step` of a draw: one of the k most likely (and of those equal to the last of them), or the most
  // likely one at temperature 0. It depends only on seed and step: the same draw can be repeated with another mask.
  function sample(logits, { temperature = 1, topK = 0, seed = 0, step = 0 } = {}) {
    let best = 0;
    for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
    if (!(temperature > 0)) return best;
    const cut = topK > 0 && topK < logits.length ? logits.slice().sort()[logits.length - topK] : -Infinity;
    const share = (i) => (logits[i] < cut ? 0 : Math.exp((logits[i] - logits[best]) / temperature));
    let total = 0;
    for (let i = 0; i < logits.length; i++) total += share(i);
    let point = ((words(seed, "sample", step, step + 1)[0] + 0.5) / 2 ** 32) * total;
    for (let i = 0; i < logits.length; i++) if ((point -= share(i)) < 0) return i;
    return best; // only if the sum was rounded
  }

  // The bits (-log2 p) of a token, given the logits before it.
  function surprise(logits, token) {
    let largest = -Infinity, total = 0;
    for (const one of logits) largest = Math.max(largest, one);
    for (const one of logits) total += Math.exp(one - largest);
    return (Math.log(total) + largest - logits[token]) / Math.LN2;
  }

  // -- byte-level BPE ------------------------------------------------------------------------------------

  // GPT-2's pattern. White_Space is what \s means to `tokenizers`; JavaScript's own \s differs in two characters.
  const PIECES =
    /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
  const LETTERS = (() => { // the letter of each byte: printable bytes stand for themselves
    const printable = (b) => (b > 32 && b < 127) || (b > 160 && b !== 173);
    let next = 256;
    return Array.from({ length: 256 }, (_, b) => String.fromCharCode(printable(b) ? b : next++));
  })();

  class Tokenizer {
    // tokens: texts by id, null for tokens that the merges make, in order; merges: pairs of ids, best first;
    // added: tokens that are found in a text before merging
    constructor({ tokens, merges, added, special, prefix_space, before, after }) {
      Object.assign(this, { tokens, special: new Set(special), prefixSpace: prefix_space, before, after });
      this.ids = new Map(tokens.map((text, id) => [text, id]));
      this.size = tokens.length;
      this.ranks = new Map();
      for (let i = 0, made = 0; i < merges.length; i += 2) {
        const text = tokens[merges[i]] + tokens[merges[i + 1]];
        if (!this.ids.has(text)) {
          while (made < tokens.length && tokens[made] !== null) made++;
          if (made === tokens.length) throw Error("merges make more tokens than there are ids for");
          tokens[made] = text;
          this.ids.set(text, made);
        }
        this.ranks.set(merges[i] * this.size + merges[i + 1], [i, this.ids.get(text)]);
      }
      const escape = (text) => text.replace(/[.*+?^${}()|[\]\\\/]/g, "\\$&");
      this.splits = added.filter((group) => group.length).map((group) =>
        RegExp(`(${[...group].sort((a, b) => b.length - a.length).map(escape).join("|")})`, "u"));
      this.bytes = Object.fromEntries(LETTERS.map((letter, b) => [letter, b]));
      this.words = new Map();
    }

    encode(text) {
      let parts = [[text, false]];
      for (const split of this.splits) {
        parts = parts.flatMap(([part, whole]) => whole ? [[part, true]] : part.split(split).map((one, i) => [one, i % 2 === 1]));
      }
      const ids = [...this.before];
      for (let [part, whole] of parts) {
        if (whole) { ids.push(this.ids.get(part)); continue; }
        if (this.prefixSpace && part && part[0] !== " ") part = " " + part;
        for (const [piece] of part.matchAll(PIECES)) ids.push(...this.piece(piece));
      }
      return ids.concat(this.after);
    }

    piece(text) {
      let ids = this.words.get(text);
      if (ids) return ids;
      ids = Array.from(utf8.encode(text), (b) => this.ids.get(LETTERS[b])).filter((id) => id !== undefined);
      for (;;) {
        let best = null, at = 0;
        for (let i = 0; i + 1 < ids.length; i++) {
          const found = this.ranks.get(ids[i] * this.size + ids[i + 1]);
          if (found && (!best || found[0] < best[0])) { best = found; at = i; }
        }
        if (!best) break;
        ids.splice(at, 2, best[1]);
      }
      this.words.set(text, ids);
      return ids;
    }

    // The bytes of a token. A special token, or an id without a token, has none.
    decode(id) {
      if (this.special.has(id) || this.tokens[id] == null) return new Uint8Array();
      const letters = [...this.tokens[id]];
      return letters.every((one) => one in this.bytes) ? Uint8Array.from(letters, (one) => this.bytes[one]) : utf8.encode(this.tokens[id]);
    }
  }

  return { sha256, words, draw, open, decode, shuffled, factors, count, Model, sample, surprise, Tokenizer, inflate,
    fromBase64, quantile, ACTIVATIONS };
})();
if (typeof module !== "undefined") module.exports = SLT;
