// What is said of a schedule beside its picture: facts and bound, chunks, the program of a rank, links, what passes now.
import { select } from "d3-selection";
import { colourOf } from "./colours";
import { linkName, type Playback, type Scene } from "./scene";
import type { Shown } from "./map";

export interface Wishes { chunk(chunk: number | null): void; rank(rank: number | null): void; loads(on: boolean): void; bound(on: boolean): void }
const TABS = ["Schedule", "Chunks", "Rank", "Links", "Now"] as const;
type Tab = (typeof TABS)[number];
const MOST = 2000; // rows of a table: more would make the page slow

interface Line { at: number; end: number; does: string; peer: string; chunk: number; step: number }

export class Panel {
  private tab: Tab = "Schedule";
  private readonly body: HTMLElement;
  private playback: Playback | null = null;
  private lines: Line[] = [];
  private lastNow = "";

  constructor(private readonly scene: Scene, box: HTMLElement, private readonly id: string, private readonly wishes: Wishes, private readonly changed: () => void) {
    const tabs = select(box).append("div").attr("class", "tabs").attr("role", "tablist").attr("aria-label", "About this schedule");
    for (const name of TABS) {
      tabs.append("button").attr("type", "button").attr("role", "tab").attr("id", `${id}-${name}`)
        .attr("aria-controls", `${id}-tab`).text(name).on("click", () => this.open(name));
    }
    tabs.on("keydown", (event: KeyboardEvent) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move === undefined) return;
      event.stopPropagation();
      this.open(TABS[(TABS.indexOf(this.tab) + move + TABS.length) % TABS.length]);
      document.getElementById(`${id}-${this.tab}`)!.focus();
    });
    this.body = select(box).append("div").attr("class", "tab").attr("role", "tabpanel").attr("id", `${id}-tab`).attr("tabindex", 0).node()!;
  }

  open(tab: Tab): void {
    this.tab = tab;
    this.build();
    this.changed();
  }

  /** Something but the time has changed. */
  rebuild(playback: Playback, shown: Shown): void {
    this.playback = playback;
    this.shown = shown;
    this.build();
  }

  private shown: Shown = { time: 0, chunk: null, rank: null, loads: false, bound: false };

  private build(): void {
    const playback = this.playback;
    if (playback === null) return;
    for (const name of TABS) {
      const button = document.getElementById(`${this.id}-${name}`)!;
      button.setAttribute("aria-selected", String(name === this.tab));
      button.tabIndex = name === this.tab ? 0 : -1;
    }
    this.body.setAttribute("aria-labelledby", `${this.id}-${this.tab}`);
    this.body.replaceChildren();
    this.lastNow = "";
    const body = select(this.body);
    if (this.tab === "Schedule") this.buildSchedule(playback);
    else if (this.tab === "Chunks") this.buildChunks();
    else if (this.tab === "Rank") this.buildRank(playback);
    else if (this.tab === "Links") {
      const rows = [...playback.used].sort((a, b) => playback.load[b] - playback.load[a] || a - b);
      const cells = rows.map((link) => {
        const rate = this.scene.links[link].bandwidth;
        return [linkName(this.scene, link), rate === null ? "" : rate.toFixed(1), `${(100 * playback.load[link]).toFixed(1)} %`, String(playback.ofLink[link].length)];
      });
      table(this.body, ["link", ">GB/s", ">busy", ">bars"], cells);
      body.append("p").attr("class", "note").text(`${this.scene.links.length - rows.length} links carry nothing.`);
    } else this.update(this.shown);
  }

  /** The present has moved. */
  update(shown: Shown): void {
    this.shown = shown;
    const playback = this.playback;
    if (playback === null) return;
    if (this.tab === "Now") {
      const { bars } = playback.run;
      const rows = playback.at(shown.time, shown.chunk).map((bar) => [
        linkName(this.scene, bars.link[bar]), String(bars.chunk[bar]), String(bars.piece[bar]),
        `${bars.start_us[bar].toFixed(2)} to ${bars.end_us[bar].toFixed(2)}`,
      ]);
      const key = JSON.stringify(rows);
      if (key === this.lastNow) return;
      this.lastNow = key;
      this.body.replaceChildren();
      table(this.body, ["link", ">chunk", ">piece", "µs"], rows);
      if (rows.length === 0) select(this.body).append("p").attr("class", "note").text("Nothing is on its way.");
    } else if (this.tab === "Rank") {
      this.body.querySelectorAll("tbody tr").forEach((row, place) => {
        const line = this.lines[place];
        row.classList.toggle("here", line !== undefined && line.at <= shown.time && shown.time < line.end);
      });
    }
  }

  private buildSchedule(playback: Playback): void {
    const { run } = playback, body = select(this.body);
    const time = `${run.label}: ${run.time_us.toPrecision(4)} µs` + (run.busbw === null ? "" : `, ${run.busbw.toFixed(1)} GB/s busbw, ${run.pieces === 1 ? "chunks in one piece" : `${run.pieces} pieces a chunk`}`);
    body.append("pre").text([...this.scene.facts, time].join("\n"));
    const { bound } = this.scene;
    this.check("Links show how busy they are", this.shown.loads, (on) => this.wishes.loads(on));
    if (bound) {
      const what = bound.sets === null ? "the link lengths that prove it: a wide link is a long one"
        : bound.sets.length === 1 ? "the cut that proves it: what is inside, and the links that leave it" : "the partition that proves it: its sets, and the links between them";
      this.check("Show the bound", this.shown.bound, (on) => this.wishes.bound(on));
      body.append("p").attr("class", "note").text(`Bound: ${bound.rate.toFixed(2)} GB/s over ${bound.scope}. The box marks ${what}.`);
    }
    body.append("p").attr("class", "note").text("A ring around a rank is the part that has come of all that it is sent. Drag and wheel move the map; a click on a rank shows its program.");
    if (this.scene.note) body.append("p").attr("class", "note").text(this.scene.note);
  }

  private check(text: string, on: boolean, wish: (on: boolean) => void): void {
    const label = select(this.body).append("p").append("label");
    label.append("input").attr("type", "checkbox").property("checked", on).on("change", (event: Event) => wish((event.target as HTMLInputElement).checked));
    label.append("span").text(` ${text}`);
  }

  private buildChunks(): void {
    const body = select(this.body);
    const list = body.append("ul").attr("class", "chunks");
    this.scene.chunks.slice(0, MOST).forEach((title, chunk) => {
      const button = list.append("li").append("button").attr("type", "button").attr("aria-pressed", String(this.shown.chunk === chunk));
      button.append("span").attr("class", "swatch").style("background", colourOf(chunk));
      button.append("span").text(`chunk ${chunk}: ${title}`);
      button.on("click", () => this.wishes.chunk(this.shown.chunk === chunk ? null : chunk));
    });
    if (this.scene.chunks.length > MOST) body.append("p").attr("class", "note").text(`${this.scene.chunks.length - MOST} more chunks: [ and ] reach them.`);
  }

  private buildRank(playback: Playback): void {
    const body = select(this.body);
    const choice = body.append("label").text("Rank ").append("select");
    choice.append("option").attr("value", "").text("choose one");
    this.scene.vertices.forEach((vertex, index) => {
      if (vertex.kind === "rank") choice.append("option").attr("value", index).property("selected", index === this.shown.rank).text(vertex.label);
    });
    choice.on("change", (event: Event) => {
      const { value } = event.target as HTMLSelectElement;
      this.wishes.rank(value === "" ? null : Number(value));
    });
    if (this.shown.rank === null) return;
    this.lines = programOf(this.scene, playback, this.shown.rank);
    const shownLines = this.lines.slice(0, MOST);
    table(this.body, [">µs", "what", ">chunk", ">step"], shownLines.map((line) => [line.at.toFixed(2), `${line.does} ${line.peer}`, String(line.chunk), String(line.step)]));
    if (this.lines.length > MOST) body.append("p").attr("class", "note").text(`${this.lines.length - MOST} more.`);
    if (this.scene.representatives) body.append("p").attr("class", "note").text("Of the representatives alone: synth program shows all that a rank does.");
    this.update(this.shown);
  }
}

/** What a rank sends and receives, by when it begins and ends in this run. */
export function programOf(scene: Scene, playback: Playback, rank: number): Line[] {
  const { transfers } = scene, { bars } = playback.run;
  const spans = new Map<number, [number, number]>();
  bars.transfer.forEach((transfer, bar) => {
    if (transfer < 0 || (transfers.src[transfer] !== rank && transfers.dst[transfer] !== rank)) return;
    const [from, to] = spans.get(transfer) ?? [Infinity, 0];
    spans.set(transfer, [Math.min(from, bars.start_us[bar]), Math.max(to, bars.end_us[bar])]);
  });
  const lines = [...spans].map(([transfer, [at, end]]) => {
    const sends = transfers.src[transfer] === rank;
    const peer = scene.vertices[sends ? transfers.dst[transfer] : transfers.src[transfer]].label;
    const does = sends ? "sends to" : transfers.reduce[transfer] ? "receives and adds from" : "receives from";
    return { at, end, does, peer, chunk: transfers.chunk[transfer], step: transfers.step[transfer] };
  });
  return lines.sort((a, b) => a.at - b.at || a.chunk - b.chunk);
}

/** A table; a head that begins with > is of numbers. */
function table(into: HTMLElement, head: string[], rows: string[][]): void {
  const made = select(into).append("table");
  const classes = head.map((name) => (name.startsWith(">") ? "n" : null));
  const top = made.append("thead").append("tr");
  head.forEach((name, column) => top.append("th").attr("scope", "col").attr("class", classes[column]).text(name.replace(/^>/, "")));
  const body = made.append("tbody");
  for (const cells of rows) {
    const row = body.append("tr");
    cells.forEach((cell, column) => row.append("td").attr("class", classes[column]).text(cell));
  }
}
