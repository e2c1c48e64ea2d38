// One block as a small rectangle: the same in the map of the pool and in the block tables.
//
// What it is shows by shape, whose it is by colour: free is empty, cached has a small square in it,
// held is filled as far as it has tokens, shared has a stripe for each request and a dot.

const MOST_STRIPES = 4;

export function drawCell(context, palette, pool, block, x, y, width, height) {
  const kind = pool.kind(block);
  const radius = Math.min(width, height) >= 9 ? 2.5 : 0;
  context.fillStyle = [palette.free, palette.cached, palette.slot, palette.slot][kind];
  box(context, x, y, width, height, radius);
  if (kind === 1) drawCachedMark(context, palette, x, y, width, height);
  if (kind < 2) return;
  const hues = pool.hues(block).slice(0, MOST_STRIPES);
  const colours = hues.length ? hues.map((hue) => palette.hues[hue]) : [palette.unknown];
  const full = width * (pool.filled.get(block) ?? 1);
  fillStripes(context, colours, x, y, Math.max(1, full), height, radius);
}

export function drawSharedMark(context, palette, pool, block, x, y, width, height) {
  if (pool.kind(block) !== 3) return;
  const size = Math.min(width, height);
  if (size < 4) {
    drawTinyShared(context, palette, x, y, width, height);
    return;
  }
  const hue = pool.hues(block)[0];
  context.fillStyle = hue === undefined ? palette.paper : palette.inks[hue];
  context.beginPath();
  context.arc(x + width / 2, y + height / 2, Math.max(1, size / 5.5), 0, 2 * Math.PI);
  context.fill();
}

// Where there is no room for a dot: darker on light paper, lighter on dark.
function drawTinyShared(context, palette, x, y, width, height) {
  const alpha = context.globalAlpha;
  context.globalAlpha = alpha * 0.5;
  context.fillStyle = palette.ink;
  context.fillRect(x, y, width, height);
  context.globalAlpha = alpha;
}

function drawCachedMark(context, palette, x, y, width, height) {
  const size = Math.min(width, height);
  if (size < 4) return;
  const mark = Math.max(1, Math.round(size / 3));
  context.fillStyle = palette.cachedMark;
  context.fillRect(x + (width - mark) / 2, y + (height - mark) / 2, mark, mark);
}

// Equal stripes from top to bottom, one for each colour.
function fillStripes(context, colours, x, y, width, height, radius) {
  if (colours.length === 1) {
    context.fillStyle = colours[0];
    box(context, x, y, width, height, Math.min(radius, width / 2));
    return;
  }
  context.save();
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  context.clip();
  const stripe = height / colours.length;
  colours.forEach((colour, i) => {
    context.fillStyle = colour;
    context.fillRect(x, y + i * stripe, width, stripe + 0.5);
  });
  context.restore();
}

function box(context, x, y, width, height, radius) {
  if (!radius) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  context.fill();
}
