// Colours that stay apart for colour-blind eyes (Okabe and Ito 2008); every coloured thing has a number or a name, too.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8f7f00", "#7a5195"];

export function colourOf(chunk: number): string {
  return PALETTE[chunk % PALETTE.length];
}

/** A colour of the page's style, which follows the colour scheme. */
export function fromStyle(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** From pale to dark with a load from 0 to 1. */
export function colourOfLoad(load: number): string {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const light = dark ? 28 + 55 * load : 85 - 55 * load;
  return `hsl(210 ${40 + 45 * load}% ${light}%)`;
}
