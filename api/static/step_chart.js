// What the last steps were made of: prompt tokens upwards, one token a sequence (and guessed ones)
// downwards, each side on a scale of its own.

import { sizedContext } from "./palette.js";

const BAR = 5;
const GAP = 1;
const LABELS = 44;

export function drawSteps(canvas, palette, steps) {
  const [width, height] = [canvas.clientWidth, 150];
  const context = sizedContext(canvas, width, height);
  const count = Math.floor((width - LABELS) / (BAR + GAP));
  const shown = steps.slice(-count).map(([step, sequences, prefill, decode, guessed]) => ({
    step, sequences, prefill, decode, guessed,
  }));
  const axis = Math.round(height * 0.58);
  const mostPrefill = Math.max(1, ...shown.map((s) => s.prefill));
  const mostDecode = Math.max(1, ...shown.map((s) => s.decode + s.guessed));
  shown.forEach((step, i) => {
    const x = LABELS + (count - shown.length + i) * (BAR + GAP);
    const up = (step.prefill / mostPrefill) * (axis - 14);
    const down = (step.decode / mostDecode) * (height - axis - 14);
    const further = (step.guessed / mostDecode) * (height - axis - 14);
    bar(context, palette.prefill, x, axis - 1 - up, up);
    bar(context, palette.decode, x, axis + 2, down);
    bar(context, palette.guessed, x, axis + 2 + down, further);
  });
  context.fillStyle = palette.line;
  context.fillRect(LABELS, axis, width - LABELS, 1);
  label(context, palette, mostPrefill, 14, shown.some((s) => s.prefill));
  label(context, palette, mostDecode, height - 12, shown.some((s) => s.decode));
}

function bar(context, colour, x, y, height) {
  if (height <= 0) return;
  context.fillStyle = colour;
  context.fillRect(x, y, BAR, Math.max(1, height));
}

function label(context, palette, most, y, any) {
  if (!any) return;
  context.fillStyle = palette.faint;
  context.font = `11px ${palette.font}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(String(most), LABELS - 8, y);
}

export function drawSparkline(canvas, palette, values) {
  const [width, height] = [canvas.clientWidth, 28];
  const context = sizedContext(canvas, width, height);
  if (values.length < 2) return;
  const most = Math.max(...values, 1e-9);
  const at = (i) => [(i / (values.length - 1)) * width, height - 2 - (values[i] / most) * (height - 4)];
  context.beginPath();
  values.forEach((_, i) => context.lineTo(...at(i)));
  context.strokeStyle = palette.decode;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.globalAlpha = 0.12;
  context.fillStyle = palette.decode;
  context.fill();
  context.globalAlpha = 1;
}
