// The fabric on paper, with what is on its way at an instant.
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { colourOf, colourOfLoad, fromStyle, PALETTE } from "./colours";
import type { Playback, Scene } from "./scene";

export interface Shown { time: number; chunk: number | null; rank: number | null; loads: boolean; bound: boolean }
type Point = [number, number];

const BOW = 0.1; // of a link's length: its two directions lie side by side
const WIDE_BOW = 0.18;
const MANY = 800; // links busy at once from which on pieces are squares and lines thin: a frame would take too long
const LONG = 2.4; // spacings; on a grid such a link goes round, and passes the vertices between in a bow

export class FabricMap {
  readonly canvas = document.createElement("canvas");
  private readonly base = document.createElement("canvas");
  private readonly busy = document.createElement("canvas");
  private busyWith = "";
  private transform: ZoomTransform = zoomIdentity;
  private stale = true;
  private scale = 1;
  private radius = 9;

  constructor(private readonly scene: Scene, private readonly box: HTMLElement, changed: () => void, picked: (rank: number) => void) {
    box.append(this.canvas);
    const behaviour = zoom<HTMLCanvasElement, unknown>().scaleExtent([0.5, 40]).on("zoom", (event) => {
      this.transform = event.transform;
      this.stale = true;
      changed();
    });
    select(this.canvas).call(behaviour).on("dblclick.zoom", null);
    this.canvas.addEventListener("click", (event) => {
      const vertex = this.vertexAt(event.offsetX, event.offsetY);
      if (vertex !== null && scene.vertices[vertex].kind === "rank") picked(vertex);
    });
    new ResizeObserver(() => { this.stale = true; changed(); }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.stale = true; changed(); });
  }

  /** The next picture begins with the links drawn anew: something but the time has changed. */
  refresh(): void {
    this.stale = true;
  }

  draw(playback: Playback, shown: Shown): void {
    const ratio = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.box;
    if (width === 0 || height === 0) return;
    for (const one of [this.canvas, this.base, this.busy]) {
      if (one.width !== Math.round(width * ratio) || one.height !== Math.round(height * ratio)) {
        one.width = Math.round(width * ratio);
        one.height = Math.round(height * ratio);
        this.stale = true;
      }
    }
    this.fit(width, height);
    if (this.stale) {
      this.drawLinks(playback, shown, ratio);
      this.curves = this.scene.links.map((link, index) => (link.src === link.dst ? null : this.curve(index)));
      this.busyWith = "";
      this.stale = false;
    }
    const context = this.canvas.getContext("2d")!;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    const passing = playback.at(shown.time, shown.chunk);
    this.drawBusy(passing, playback, ratio);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.busy, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawPieces(context, passing, playback, shown);
    this.drawVertices(context, playback, shown);
  }

  private fit(width: number, height: number): void {
    const { vertices } = this.scene;
    const xs = vertices.map((vertex) => vertex.x), ys = vertices.map((vertex) => vertex.y);
    const [left, right] = extent(xs), [low, high] = extent(ys);
    // What goes round a grid bows out of it.
    const bows = this.scene.is_grid ? WIDE_BOW : 0;
    this.scale = Math.min(width / ((right - left) * (1 + bows) + 1), height / ((high - low) * (1 + bows) + 1));
    this.radius = Math.max(2.5, Math.min(20, 0.24 * this.scale)) * Math.sqrt(this.transform.k);
    const middle: Point = [(left + right) / 2, (low + high) / 2];
    this.place = (vertex) => this.transform.apply([
      width / 2 + (vertices[vertex].x - middle[0]) * this.scale,
      height / 2 - (vertices[vertex].y - middle[1]) * this.scale,
    ]);
  }

  private place: (vertex: number) => Point = () => [0, 0];
  private curves: ([Point, Point, Point] | null)[] = [];

  /** Ends and control point of a link's curve, cut at the rims of its vertices. */
  private curve(link: number): [Point, Point, Point] {
    const { src, dst } = this.scene.links[link];
    const [a, b] = [this.place(src), this.place(dst)];
    const long = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1;
    const spacings = long / (this.scale * this.transform.k);
    const bow = this.scene.is_grid && spacings > LONG ? WIDE_BOW : BOW;
    const control: Point = [(a[0] + b[0]) / 2 - (b[1] - a[1]) * bow, (a[1] + b[1]) / 2 + (b[0] - a[0]) * bow];
    const rim = (this.radius + 2) / long;
    const toward = (from: Point, to: Point): Point => [from[0] + (to[0] - from[0]) * 2 * rim, from[1] + (to[1] - from[1]) * 2 * rim];
    return [toward(a, control), control, toward(b, control)];
  }

  private drawLinks(playback: Playback, shown: Shown, ratio: number): void {
    const context = this.base.getContext("2d")!;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.base.width, this.base.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { links, bound } = this.scene;
    if (shown.bound && bound?.sets) this.drawSets(context, bound.sets);
    const fastest = Math.max(...links.map((link) => link.bandwidth ?? 1));
    const longest = bound?.lengths ? Math.max(...bound.lengths) : 0;
    const [quiet, line, accent] = [fromStyle("quiet"), fromStyle("line"), fromStyle("accent")];
    const carrying = shown.chunk === null ? null : linksOf(this.scene, playback, shown.chunk);
    links.forEach((link, index) => {
      if (link.src === link.dst) return;
      let colour = line, width = 0.6 + 1.6 * Math.sqrt((link.bandwidth ?? fastest) / fastest);
      if (shown.loads) [colour, width] = [colourOfLoad(playback.load[index] ?? 0), width + 1];
      if (carrying?.has(index)) [colour, width] = [colourOf(shown.chunk!), width + 1.2];
      if (shown.bound && bound) {
        const crosses = bound.sets?.some((set) => set.includes(link.src) && !set.includes(link.dst));
        const priced = bound.lengths ? (bound.lengths[index] ?? 0) / longest : 0;
        if (crosses) [colour, width] = [accent, 3];
        else if (priced > 0) [colour, width] = [accent, 0.8 + 3 * priced];
      }
      this.strokeLink(context, index, colour, width, links.length < 400 || Boolean(carrying?.has(index)), quiet);
    });
  }

  private strokeLink(context: CanvasRenderingContext2D, link: number, colour: string, width: number, headed: boolean, head: string): void {
    const [a, c, b] = this.curve(link);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(...a);
    context.quadraticCurveTo(...c, ...b);
    context.stroke();
    if (!headed) return;
    const angle = Math.atan2(b[1] - c[1], b[0] - c[0]), size = 3 + width;
    context.fillStyle = colour === fromStyle("line") ? head : colour;
    context.beginPath();
    context.moveTo(...b);
    context.lineTo(b[0] - size * Math.cos(angle - 0.45), b[1] - size * Math.sin(angle - 0.45));
    context.lineTo(b[0] - size * Math.cos(angle + 0.45), b[1] - size * Math.sin(angle + 0.45));
    context.fill();
  }

  private drawSets(context: CanvasRenderingContext2D, sets: number[][]): void {
    sets.forEach((set, index) => {
      context.fillStyle = sets.length === 1 ? fromStyle("set") : `${colourOf(index)}38`;
      for (const vertex of set) {
        context.beginPath();
        context.arc(...this.place(vertex), this.radius * 1.9, 0, 2 * Math.PI);
        context.fill();
      }
    });
  }

  /** Links that carry something, in its colour: drawn anew only when others do, not at every frame. */
  private drawBusy(passing: number[], playback: Playback, ratio: number): void {
    const { bars } = playback.run;
    const busyWith = passing.map((bar) => bars.link[bar] * PALETTE.length + (bars.chunk[bar] % PALETTE.length)).join();
    if (busyWith === this.busyWith) return;
    this.busyWith = busyWith;
    const context = this.busy.getContext("2d")!;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.busy.width, this.busy.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.lineWidth = passing.length > MANY ? 1 : 2;
    for (const bar of passing) {
      const curve = this.curves[bars.link[bar]];
      if (curve === null) continue;
      const [a, c, b] = curve;
      context.strokeStyle = colourOf(bars.chunk[bar]);
      context.beginPath(); // a path of all of them crosses itself too often
      context.moveTo(...a);
      context.quadraticCurveTo(...c, ...b);
      context.stroke();
    }
  }

  /** The pieces on their way, each at its place. */
  private drawPieces(context: CanvasRenderingContext2D, passing: number[], playback: Playback, shown: Shown): void {
    const { bars } = playback.run;
    const size = Math.max(2.5, this.radius * 0.5);
    const isDense = passing.length > MANY;
    const named: { chunk: number; at: Point }[] = [];
    context.lineWidth = 2;
    for (const bar of passing) {
      const link = bars.link[bar], curve = this.curves[link];
      const part = (shown.time - bars.start_us[bar]) / Math.max(bars.end_us[bar] - bars.start_us[bar], 1e-12);
      context.strokeStyle = context.fillStyle = colourOf(bars.chunk[bar]);
      if (curve === null) { // a switch that adds
        context.beginPath();
        context.arc(...this.place(this.scene.links[link].src), this.radius * 1.4, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * part);
        context.stroke();
        continue;
      }
      const [a, c, b] = curve;
      const on = (i: 0 | 1): number => (1 - part) ** 2 * a[i] + 2 * part * (1 - part) * c[i] + part ** 2 * b[i];
      const at: Point = [on(0), on(1)];
      if (isDense) {
        context.fillRect(at[0] - size / 2, at[1] - size / 2, size, size);
        continue;
      }
      context.beginPath();
      context.arc(...at, size, 0, 2 * Math.PI);
      context.fill();
      if (size >= 6) named.push({ chunk: bars.chunk[bar], at });
    }
    context.font = `${Math.round(1.5 * size)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = "#fff";
    for (const { chunk, at } of named) context.fillText(String(chunk), ...at);
  }

  private drawVertices(context: CanvasRenderingContext2D, playback: Playback, shown: Shown): void {
    const [paper, ink, soft, accent] = ["paper", "ink", "soft", "accent"].map(fromStyle);
    const r = this.radius;
    context.font = `${Math.max(8, Math.round(0.85 * r))}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.scene.vertices.forEach((vertex, index) => {
      const [x, y] = this.place(index);
      context.fillStyle = vertex.kind === "rank" ? paper : soft;
      context.strokeStyle = ink;
      context.lineWidth = index === shown.rank ? 3 : 1;
      context.beginPath();
      if (vertex.kind === "rank") context.arc(x, y, r, 0, 2 * Math.PI);
      else if (vertex.kind === "switch") context.rect(x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r);
      else for (let corner = 0; corner < 7; corner++) context.lineTo(x + 1.1 * r * Math.cos((corner * Math.PI) / 3), y + 1.1 * r * Math.sin((corner * Math.PI) / 3));
      context.fill();
      context.stroke();
      const come = playback.progress(index, shown.time);
      if (vertex.kind === "rank" && come !== null && come > 0) {
        context.strokeStyle = accent;
        context.lineWidth = Math.max(1.5, 0.2 * r);
        context.beginPath();
        context.arc(x, y, 0.82 * r, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * come);
        context.stroke();
      }
      if (r >= 6) {
        context.fillStyle = ink;
        const below = vertex.kind !== "rank" && vertex.label.length > 3;
        context.fillText(vertex.label, x, below ? y + 1.6 * r : y);
      }
    });
  }

  private vertexAt(x: number, y: number): number | null {
    const found = this.scene.vertices.findIndex((_, vertex) => {
      const [vx, vy] = this.place(vertex);
      return Math.hypot(vx - x, vy - y) <= this.radius + 2;
    });
    return found < 0 ? null : found;
  }
}

/** Links that a chunk passes in a run. */
export function linksOf(scene: Scene, playback: Playback, chunk: number): Set<number> {
  const { bars } = playback.run;
  return new Set(scene.links.map((_, link) => link).filter((link) => playback.ofLink[link].some((bar) => bars.chunk[bar] === chunk)));
}

function extent(values: number[]): [number, number] {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}
