// An engine's view, as it comes from the server, made ready for drawing. Nothing is drawn here.

import { NUM_HUES } from "./palette.js";

export const KINDS = ["free", "cached", "held", "shared"];
const [FREE, CACHED, HELD, SHARED] = KINDS.keys();

export function bytes(base64) {
  const text = atob(base64);
  const array = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
  return array;
}

const blockTable = (base64) => new Int32Array(bytes(base64).buffer);

// Gives every request a hue, and keeps it while the request runs: the least used one of the moment.
export class Hues {
  #of = new Map();
  #turn = 0;

  assign(requestIds) {
    const present = new Set(requestIds);
    for (const id of this.#of.keys()) if (!present.has(id)) this.#of.delete(id);
    for (const id of present) if (!this.#of.has(id)) this.#of.set(id, this.#leastUsed());
    return this.#of;
  }

  #leastUsed() {
    const used = new Array(NUM_HUES).fill(0);
    for (const hue of this.#of.values()) used[hue]++;
    const least = Math.min(...used);
    // In turn, so that one request after another is not always the same colour.
    for (let i = 0; i < NUM_HUES; i++) {
      const hue = (this.#turn + i) % NUM_HUES;
      if (used[hue] === least) {
        this.#turn = hue + 1;
        return hue;
      }
    }
  }
}

// The pool of one view: what each block is, and which running sequences hold it.
export class Pool {
  constructor(view, hues) {
    this.blockSize = view.block_size;
    this.refCounts = bytes(view.ref_counts);
    this.numBlocks = this.refCounts.length;
    this.cached = bytes(view.cached);
    const colours = hues.assign(view.running.map((sequence) => sequence.request_id));
    this.sequences = view.running.map((sequence) => ({
      ...sequence,
      key: `${sequence.request_id}/${sequence.index}`,
      hue: colours.get(sequence.request_id),
      table: blockTable(sequence.blocks),
    }));
    this.#findHolders();
  }

  // Most blocks have one holder at most: only the others get a list.
  #findHolders() {
    this.first = new Int32Array(this.numBlocks).fill(-1);
    this.more = new Map();
    this.filled = new Map(); // block -> part of its slots that have tokens, where it is not all
    this.sequences.forEach((sequence, index) => {
      for (const block of sequence.table) {
        if (this.first[block] < 0) this.first[block] = index;
        else if (this.more.has(block)) this.more.get(block).push(index);
        else this.more.set(block, [this.first[block], index]);
      }
      const last = lastFill(sequence, this.blockSize);
      if (last < this.blockSize) this.filled.set(sequence.table.at(-1), last / this.blockSize);
    });
  }

  isCached(block) {
    return (this.cached[block >> 3] >> (block & 7)) & 1;
  }

  kind(block) {
    const owners = this.refCounts[block];
    if (owners === 0) return this.isCached(block) ? CACHED : FREE;
    return owners === 1 ? HELD : SHARED;
  }

  holders(block) {
    if (this.more.has(block)) return this.more.get(block);
    return this.first[block] < 0 ? [] : [this.first[block]];
  }

  // Different hues of a block's holders, in their order.
  hues(block) {
    if (this.first[block] < 0) return [];
    if (!this.more.has(block)) return [this.sequences[this.first[block]].hue];
    return [...new Set(this.more.get(block).map((index) => this.sequences[index].hue))];
  }

  counts() {
    const counts = { free: 0, cached: 0, held: 0, shared: 0 };
    for (let block = 0; block < this.numBlocks; block++) counts[KINDS[this.kind(block)]]++;
    return counts;
  }
}

// A request's id as far as it tells requests apart: random ones are long.
export const shortId = (id) => id.replace(/(?<=-[0-9a-f]{8})[0-9a-f]{24}$/, "");

// Tokens in a sequence's last block, of `blockSize`.
export function lastFill(sequence, blockSize) {
  if (!sequence.table.length) return blockSize;
  return sequence.num_slots - (sequence.table.length - 1) * blockSize;
}
