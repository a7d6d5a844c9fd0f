// The timeline: a row per link, a bar per piece, a line at the present.
import { scaleLinear } from "d3-scale";
import { colourOf, fromStyle } from "./colours";
import { linkName, type Playback, type Scene } from "./scene";

const [NAME, HEAD] = [110, 18]; // px: names at the left, the axis above
export const MOST_ROWS = 1000; // a canvas is at most some 16,000 px high

export class Lanes {
  readonly canvas = document.createElement("canvas");
  private readonly present = document.createElement("div");
  private stale = true;
  private rows: number[] = [];
  private row = 14;

  constructor(private readonly scene: Scene, private readonly box: HTMLElement, changed: () => void, seek: (time: number, chunk: number | null) => void) {
    this.present.className = "present";
    box.append(this.canvas, this.present);
    new ResizeObserver(() => { this.stale = true; changed(); }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.stale = true; changed(); });
    this.canvas.addEventListener("click", (event) => {
      const found = this.under(event.offsetX, event.offsetY);
      seek(Math.max(0, found.time), found.bar === null ? null : this.playback!.run.bars.chunk[found.bar]);
    });
    this.canvas.addEventListener("mousemove", (event) => {
      const { bar } = this.under(event.offsetX, event.offsetY);
      this.canvas.title = bar === null ? "" : this.inWords(bar);
    });
  }

  private playback: Playback | null = null;
  private until = 1;

  refresh(): void {
    this.stale = true;
  }

  /** Rows that are left out: of links that are busy for less than all others. */
  get left(): number {
    return this.playback === null ? 0 : this.playback.used.length - this.rows.length;
  }

  draw(playback: Playback, time: number, until: number, chunk: number | null): void {
    const ratio = devicePixelRatio || 1, width = this.box.clientWidth;
    if (width === 0) return;
    if (playback !== this.playback) {
      const busiest = [...playback.used].sort((a, b) => playback.load[b] - playback.load[a]).slice(0, MOST_ROWS);
      const kept = new Set(busiest);
      this.rows = playback.used.filter((link) => kept.has(link));
      this.row = this.rows.length <= 64 ? 14 : 8;
      [this.playback, this.stale] = [playback, true];
    }
    const height = HEAD + this.row * this.rows.length + 4;
    this.until = until;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = this.present.style.height = `${height}px`;
      this.stale = true;
    }
    const x = scaleLinear([0, until], [NAME, width - 8]);
    if (this.stale) this.drawBars(playback, x, chunk, width, height, ratio);
    this.stale = false;
    // The present moves over the picture: to draw the bars anew at every frame would be slow.
    this.present.style.transform = `translateX(${x(time)}px)`;
  }

  private drawBars(playback: Playback, x: (time: number) => number, chunk: number | null, width: number, height: number, ratio: number): void {
    const context = this.canvas.getContext("2d")!;
    const { bars } = playback.run;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const [quiet, line, ink] = ["quiet", "line", "ink"].map(fromStyle);
    for (const tick of scaleLinear([0, this.until], [0, 1]).ticks(6)) {
      context.fillStyle = quiet;
      context.textAlign = "center";
      context.fillText(`${tick} µs`, x(tick), HEAD / 2);
      context.fillStyle = line;
      context.fillRect(x(tick), HEAD, 0.5, height);
    }
    context.textAlign = "left";
    this.rows.forEach((link, place) => {
      const top = HEAD + this.row * place;
      if (this.row >= 12 || place % 2 === 0) {
        context.fillStyle = ink;
        context.fillText(linkName(this.scene, link), 4, top + this.row / 2, NAME - 8);
      }
      for (const bar of playback.ofLink[link]) {
        const [from, to] = [x(bars.start_us[bar]), x(bars.end_us[bar])];
        context.globalAlpha = chunk === null || bars.chunk[bar] === chunk ? 1 : 0.15;
        context.fillStyle = colourOf(bars.chunk[bar]);
        context.fillRect(from, top + 1, Math.max(to - from - (to - from > 3 ? 0.6 : 0), 0.5), this.row - 2);
      }
      context.globalAlpha = 1;
    });
  }

  private under(px: number, py: number): { time: number; bar: number | null } {
    const time = scaleLinear([NAME, this.box.clientWidth - 8], [0, this.until])(px);
    const link = this.rows[Math.floor((py - HEAD) / this.row)];
    if (this.playback === null || link === undefined || py < HEAD) return { time, bar: null };
    const place = this.playback.before(link, time) - 1;
    const bar = place < 0 ? -1 : this.playback.ofLink[link][place];
    return { time, bar: bar >= 0 && time < this.playback.run.bars.end_us[bar] ? bar : null };
  }

  private inWords(bar: number): string {
    const { bars } = this.playback!.run;
    const span = `${bars.start_us[bar].toFixed(2)} to ${bars.end_us[bar].toFixed(2)} µs`;
    return `${linkName(this.scene, bars.link[bar])}: chunk ${bars.chunk[bar]}, piece ${bars.piece[bar]}, ${span}`;
  }
}
