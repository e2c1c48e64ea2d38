// The block tables of the running sequences, a row for each: its blocks in order, with the numbers
// that they have in the pool where there is room, and how full the last one is.

import { drawCell, drawSharedMark } from "./cell.js";
import { sizedContext } from "./palette.js";
import { lastFill, shortId } from "./pool.js";

const MOST_ROWS = 100;
const NUMBERED = { width: 34, height: 20, gap: 2 };
const SIZES = [NUMBERED, { width: 12, height: 14, gap: 1 }, { width: 5, height: 10, gap: 1 }];
const MOST_LINES = 3;

export class BlockTables {
  #list;
  #rest;
  #rows = new Map(); // key of a sequence -> its row
  #onHover;
  #onPin;

  // onHover(key), with null when it is over; onPin(key) for a click or Enter
  constructor(list, rest, onHover, onPin) {
    this.#list = list;
    this.#rest = rest;
    this.#onHover = onHover;
    this.#onPin = onPin;
  }

  show(pool, palette, litKey, pinnedKey) {
    const shown = pool.sequences.slice(0, MOST_ROWS);
    const keys = new Set(shown.map((sequence) => sequence.key));
    for (const [key, row] of this.#rows) {
      if (!keys.has(key)) {
        row.item.remove();
        this.#rows.delete(key);
      }
    }
    let before = null;
    const rows = shown.map((sequence) => this.#row(sequence.key));
    shown.forEach((sequence, i) => {
      const row = rows[i];
      const next = before ? before.nextSibling : this.#list.firstChild;
      if (row.item !== next) this.#list.insertBefore(row.item, next);
      before = row.item;
      describe(row, sequence, pool);
      row.item.classList.toggle("dim", litKey !== null && litKey !== sequence.key);
      row.button.setAttribute("aria-pressed", String(pinnedKey === sequence.key));
      row.swatch.style.setProperty("background", palette.hues[sequence.hue]);
    });
    this.#list.hidden = shown.length === 0;
    // Measured once, after all that changes the layout: all rows are equally wide.
    const width = rows[0]?.canvas.clientWidth;
    shown.forEach((sequence, i) => drawTable(rows[i].canvas, width, palette, pool, sequence));
    const left = pool.sequences.length - shown.length;
    this.#rest.textContent = left ? `and ${left} more` : "";
  }

  #row(key) {
    if (this.#rows.has(key)) return this.#rows.get(key);
    const item = document.createElement("li");
    const button = document.createElement("button");
    const [swatch, name, figures] = ["swatch", "name", "figures"].map((className) => {
      const node = document.createElement("span");
      node.className = className;
      button.append(node);
      return node;
    });
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    button.type = "button";
    item.append(button, canvas);
    item.addEventListener("pointerenter", () => this.#onHover(key));
    item.addEventListener("pointerleave", () => this.#onHover(null));
    button.addEventListener("focus", () => this.#onHover(key));
    button.addEventListener("blur", () => this.#onHover(null));
    item.addEventListener("click", () => this.#onPin(key));
    const row = { item, button, swatch, name, figures, canvas };
    this.#rows.set(key, row);
    return row;
  }
}

function describe(row, sequence, pool) {
  const { prompt_len: prompt, num_tokens: tokens, num_computed: computed, table } = sequence;
  const fill = lastFill(sequence, pool.blockSize);
  const which = sequence.width > 1 ? `will be ${sequence.width}` : `sample ${sequence.index}`;
  setText(row.name, shortId(sequence.request_id));
  row.name.title = sequence.request_id;
  const progress = computed < prompt ? `prefill ${computed} of ${prompt}` : `${prompt} + ${tokens - prompt} tokens`;
  setText(row.figures, `${which} · ${progress} · last block ${fill}/${pool.blockSize}`);
  const shared = table.filter((block) => pool.refCounts[block] > 1).length;
  row.canvas.setAttribute("aria-label", `${table.length} blocks, ${shared} of them shared: ${table.slice(0, 200).join(", ")}`);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function drawTable(canvas, width, palette, pool, sequence) {
  const count = sequence.table.length;
  const perLine = (size) => Math.max(1, Math.floor((width + size.gap) / (size.width + size.gap)));
  const size = SIZES.find((s) => count <= MOST_LINES * perLine(s)) ?? SIZES.at(-1);
  const columns = perLine(size);
  const lines = Math.max(1, Math.ceil(count / columns));
  const pitch = size.height + size.gap;
  const context = sizedContext(canvas, width, lines * pitch - size.gap);
  context.font = `11px ${palette.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  sequence.table.forEach((block, i) => {
    const x = (i % columns) * (size.width + size.gap);
    const y = Math.floor(i / columns) * pitch;
    drawCell(context, palette, pool, block, x, y, size.width, size.height);
    if (size === NUMBERED) drawNumber(context, palette, pool, block, x, y);
    else drawSharedMark(context, palette, pool, block, x, y, size.width, size.height);
  });
}

function drawNumber(context, palette, pool, block, x, y) {
  const { width, height } = NUMBERED;
  const full = (pool.filled.get(block) ?? 1) > 0.5;
  const hues = pool.hues(block);
  if (hues.length > 1) {
    // To be read on stripes of any colour.
    context.strokeStyle = palette.hues[hues[0]];
    context.lineWidth = 4;
    context.lineJoin = "round";
    context.strokeText(String(block), x + width / 2, y + height / 2 + 0.5);
  }
  context.fillStyle = full ? palette.inks[hues[0]] : palette.ink;
  context.fillText(String(block), x + width / 2, y + height / 2 + 0.5);
  if (pool.refCounts[block] > 1) {
    context.beginPath();
    context.arc(x + width - 4.5, y + 4.5, 2, 0, 2 * Math.PI);
    context.fill();
  }
}
