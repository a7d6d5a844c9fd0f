// The document that scene.py and trace_scene.py write, and what of it happens when.
import { bisectLeft, bisectRight } from "d3-array";

export interface Vertex { label: string; x: number; y: number; kind: "rank" | "switch" | "able" }
export interface Link { src: number; dst: number; bandwidth: number | null }
export interface Bound { rate: number; scope: string; sets: number[][] | null; lengths: number[] | null }
export interface Transfers { chunk: number[]; src: number[]; dst: number[]; step: number[]; reduce: number[]; via: number[][] }
export interface Bars { start_us: number[]; end_us: number[]; link: number[]; transfer: number[]; piece: number[]; chunk: number[] }
export interface Run { label: string; time_us: number; busbw: number | null; pieces: number | null; bars: Bars }
export interface Scene {
  title: string;
  facts: string[];
  vertices: Vertex[];
  links: Link[];
  is_grid: boolean;
  bound: Bound | null;
  chunks: string[];
  transfers: Transfers;
  representatives: boolean;
  runs: Run[];
  note: string | null;
}

/** What passes which link at an instant of one run. */
export class Playback {
  /** Numbers of the bars of each link, in order of time. */
  readonly ofLink: number[][];
  /** Part of the time that each link is busy. */
  readonly load: number[];
  /** Links that carry something, in the order of their ends. */
  readonly used: number[];
  /** When each step begins: its first bar. */
  readonly steps: { step: number; at: number }[];
  private readonly starts: number[][];
  private readonly arrivals: { times: number[]; sums: number[] }[];

  constructor(readonly scene: Scene, readonly run: Run) {
    const { bars } = run;
    this.ofLink = scene.links.map(() => []);
    bars.link.forEach((link, bar) => this.ofLink[link].push(bar));
    this.starts = this.ofLink.map((passing) => passing.map((bar) => bars.start_us[bar]));
    this.load = this.ofLink.map(
      (passing) => passing.reduce((sum, bar) => sum + bars.end_us[bar] - bars.start_us[bar], 0) / run.time_us,
    );
    this.used = scene.links.map((_, link) => link).filter((link) => this.ofLink[link].length > 0);
    this.used.sort((a, b) => scene.links[a].src - scene.links[b].src || scene.links[a].dst - scene.links[b].dst);
    const first = new Map<number, number>();
    bars.transfer.forEach((transfer, bar) => {
      const step = scene.transfers.step[transfer];
      if (transfer >= 0 && !(bars.start_us[bar] >= (first.get(step) ?? Infinity))) first.set(step, bars.start_us[bar]);
    });
    this.steps = [...first].map(([step, at]) => ({ step, at })).sort((a, b) => a.at - b.at || a.step - b.step);
    this.arrivals = this.countArrivals();
  }

  /** Bars on their way at an instant, of all links or of one chunk. */
  at(time: number, chunk: number | null = null): number[] {
    const { bars } = this.run;
    const found: number[] = [];
    for (const link of this.used) {
      // Bars of a link do not overlap: the last that has begun is the only one.
      const place = bisectRight(this.starts[link], time) - 1;
      const bar = place < 0 ? -1 : this.ofLink[link][place];
      if (bar >= 0 && time < bars.end_us[bar] && (chunk === null || bars.chunk[bar] === chunk)) found.push(bar);
    }
    return found;
  }

  /** Bars of one link whose begin is before a time, as a position in `ofLink`. */
  before(link: number, time: number): number {
    return bisectLeft(this.starts[link], time);
  }

  /** Part of all that a rank is sent which has come; null where it is sent nothing. */
  progress(rank: number, time: number): number | null {
    const { times, sums } = this.arrivals[rank];
    if (times.length === 0) return null;
    const place = bisectRight(times, time);
    return place === 0 ? 0 : sums[place - 1] / sums[sums.length - 1];
  }

  /** The step that began last, or -1. */
  stepAt(time: number): number {
    const place = bisectRight(this.steps.map((step) => step.at), time + 1e-9) - 1;
    return place < 0 ? -1 : place;
  }

  private countArrivals(): { times: number[]; sums: number[] }[] {
    const { bars } = this.run;
    const { transfers, links } = this.scene;
    const of: { time: number; amount: number }[][] = this.scene.vertices.map(() => []);
    if (!this.scene.representatives) {
      bars.link.forEach((link, bar) => {
        const to = links[link].dst;
        if (bars.transfer[bar] >= 0 && transfers.dst[bars.transfer[bar]] === to) {
          // A bar's length times its link's rate is what it brings.
          const amount = (bars.end_us[bar] - bars.start_us[bar]) * (links[link].bandwidth ?? 1);
          of[to].push({ time: bars.end_us[bar], amount });
        }
      });
    }
    return of.map((arrived) => {
      arrived.sort((a, b) => a.time - b.time);
      let sum = 0;
      return { times: arrived.map((one) => one.time), sums: arrived.map((one) => (sum += one.amount)) };
    });
  }
}

/** A link in words. */
export function linkName(scene: Scene, link: number): string {
  const { src, dst } = scene.links[link];
  const label = (vertex: number): string => scene.vertices[vertex].label;
  return src === dst ? `${label(src)} adds` : `${label(src)} to ${label(dst)}`;
}
