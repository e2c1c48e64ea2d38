// Colours of the dashboard's drawings, as the style sheet has them for light and dark.

export const NUM_HUES = 8;

export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const hues = Array.from({ length: NUM_HUES }, (_, i) => colour(`--hue-${i}`));
  return {
    hues,
    inks: hues.map(inkOn),
    unknown: colour("--unknown"),
    free: colour("--free"),
    cached: colour("--cached"),
    cachedMark: colour("--cached-mark"),
    slot: colour("--slot"),
    ink: colour("--ink"),
    faint: colour("--faint"),
    line: colour("--line"),
    paper: colour("--paper"),
    prefill: colour("--prefill"),
    decode: colour("--decode"),
    guessed: colour("--guessed"),
    font: style.getPropertyValue("font-family") || "sans-serif",
  };
}

// Black or white, whichever is easier to read on `hex` (#rrggbb): WCAG's relative luminance.
export function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}

// A canvas' context in CSS pixels, cleared, at the screen's resolution or finer: where a pixel of the
// page is no whole number of the canvas', the edges of what was cleared would stay.
export function sizedContext(canvas, width, height) {
  const ratio = Math.ceil(window.devicePixelRatio || 1);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
