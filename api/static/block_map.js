// The pool as a map, a cell for each block in the order of their numbers. Points at one of them by
// mouse, finger or arrow keys; lights up the blocks of a sequence and numbers them in its order.

import { drawCell, drawSharedMark } from "./cell.js";
import { sizedContext } from "./palette.js";

const LARGEST_PITCH = 26;
const SMALLEST_PITCH = 2;
const SMALLEST_NUMBERED = 13; // cells with room for a number
const DIM = 0.25;

// The largest cells with which the whole pool is at most `height` high.
function layOut(numBlocks, width, height) {
  for (let pitch = LARGEST_PITCH; ; pitch--) {
    const columns = Math.max(1, Math.floor(width / pitch));
    const rows = Math.ceil(numBlocks / columns);
    if (rows * pitch <= height || pitch === SMALLEST_PITCH) {
      const gap = pitch >= 9 ? 2 : pitch >= 4 ? 1 : 0;
      return { pitch, columns, rows, size: pitch - gap };
    }
  }
}

export class BlockMap {
  #canvas;
  #marks; // a canvas above it
  #onPoint;
  #pool = null;
  #palette = null;
  #layout = null;
  #drawn = new Uint32Array(0); // the look of each cell as it is on the canvas
  #lit = null; // sequence whose blocks are lit
  #cursor = -1;

  // onPoint(block, pinned): block is -1 where none is pointed at
  constructor(canvas, marks, onPoint) {
    this.#canvas = canvas;
    this.#marks = marks;
    this.#onPoint = onPoint;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event)));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.#point(-1));
    canvas.addEventListener("click", (event) => this.#point(this.#blockAt(event), true));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.addEventListener("blur", () => this.#point(-1));
  }

  show(pool, palette, lit) {
    if (palette !== this.#palette || pool.numBlocks !== this.#pool?.numBlocks) this.#layout = null;
    this.#pool = pool;
    this.#palette = palette;
    this.#lit = lit;
    if (!this.#layout) this.#arrange();
    this.#drawCells();
    this.#drawMarks();
  }

  // The page has another width.
  resize() {
    if (!this.#pool) return;
    this.#layout = null;
    this.show(this.#pool, this.#palette, this.#lit);
  }

  #arrange() {
    const width = this.#canvas.clientWidth;
    const height = Math.max(240, Math.min(460, window.innerHeight * 0.55));
    this.#layout = layOut(this.#pool.numBlocks, width, height);
    const { rows, pitch } = this.#layout;
    for (const canvas of [this.#canvas, this.#marks]) sizedContext(canvas, width, rows * pitch);
    this.#drawn = new Uint32Array(this.#pool.numBlocks);
    this.#canvas.dataset.columns = this.#layout.columns;
    this.#canvas.dataset.pitch = pitch;
  }

  #drawCells() {
    const pool = this.#pool;
    const { pitch, columns, size } = this.#layout;
    const context = this.#canvas.getContext("2d");
    const lit = this.#lit && new Set(this.#lit.table);
    for (let block = 0; block < pool.numBlocks; block++) {
      const look = this.#look(block, lit);
      if (look === this.#drawn[block]) continue;
      this.#drawn[block] = look;
      const x = (block % columns) * pitch;
      const y = Math.floor(block / columns) * pitch;
      context.clearRect(x, y, pitch, pitch);
      context.globalAlpha = lit && !lit.has(block) ? DIM : 1;
      drawCell(context, this.#palette, pool, block, x, y, size, size);
      drawSharedMark(context, this.#palette, pool, block, x, y, size, size);
    }
    context.globalAlpha = 1;
  }

  // All that a cell's drawing depends on, as one number; never 0.
  #look(block, lit) {
    const pool = this.#pool;
    let look = pool.kind(block) + 1;
    if (lit && !lit.has(block)) look |= 8;
    if (look >= 3) {
      look |= Math.round((pool.filled.get(block) ?? 1) * 32) << 4;
      const hues = pool.more.has(block) ? pool.hues(block).slice(0, 4) : pool.hues(block);
      look |= hues.length << 10;
      for (let i = 0; i < hues.length; i++) look |= hues[i] << (14 + 3 * i);
    }
    return look;
  }

  // Over the cells: where each lit block is in its sequence, and the cursor.
  #drawMarks() {
    const { pitch, rows, columns, size } = this.#layout;
    const context = sizedContext(this.#marks, this.#canvas.clientWidth, rows * pitch);
    if (this.#lit && size >= SMALLEST_NUMBERED) this.#drawNumbers(context, this.#lit);
    if (this.#cursor >= 0) {
      context.strokeStyle = this.#palette.ink;
      context.lineWidth = 2;
      const x = (this.#cursor % columns) * pitch;
      const y = Math.floor(this.#cursor / columns) * pitch;
      context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  #drawNumbers(context, sequence) {
    const { pitch, columns, size } = this.#layout;
    const [colour, ink] = [this.#palette.hues[sequence.hue], this.#palette.inks[sequence.hue]];
    context.textAlign = "center";
    context.textBaseline = "middle";
    sequence.table.forEach((block, i) => {
      const x = (block % columns) * pitch;
      const y = Math.floor(block / columns) * pitch;
      const whole = (this.#pool.filled.get(block) ?? 1) > 0.5;
      if (this.#pool.more.has(block)) {
        context.fillStyle = colour;
        context.beginPath();
        context.roundRect(x, y, size, size, 2.5);
        context.fill();
      }
      context.font = `${Math.round(size * (i < 100 ? 0.62 : 0.5))}px ${this.#palette.font}`;
      context.fillStyle = whole ? ink : this.#palette.ink;
      context.fillText(String(i), x + size / 2, y + size / 2 + 0.5);
    });
  }

  #blockAt(event) {
    if (!this.#layout) return -1;
    const { pitch, columns } = this.#layout;
    const column = Math.floor(event.offsetX / pitch);
    const block = Math.floor(event.offsetY / pitch) * columns + column;
    return column < columns && block >= 0 && block < this.#pool.numBlocks ? block : -1;
  }

  #onKey(event) {
    if (!this.#layout) return;
    const { columns } = this.#layout;
    const last = this.#pool.numBlocks - 1;
    const at = this.#cursor;
    const moves = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns,
      Home: 0, End: last, Enter: at, " ": at, Escape: -1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const to = at < 0 && event.key.startsWith("Arrow") ? 0 : moves[event.key];
    if (to < -1 || to > last) return;
    this.#point(to, event.key === "Enter" || event.key === " ");
  }

  #point(block, pinned = false) {
    if (block === this.#cursor && !pinned) return;
    this.#cursor = block;
    if (this.#layout) this.#drawMarks();
    this.#onPoint(block, pinned);
  }
}
