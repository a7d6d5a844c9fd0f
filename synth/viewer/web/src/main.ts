// The page: one clock for all scenes, and what keys and buttons do.
import { select } from "d3-selection";
import { Lanes } from "./lanes";
import { FabricMap, type Shown } from "./map";
import { Panel } from "./panel";
import { Playback, type Scene } from "./scene";

const SECONDS = 12; // that a run takes at speed 1
const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4];

/** One scene with its map, timeline and panel. */
class View {
  readonly shown: Shown = { time: 0, chunk: null, rank: null, loads: false, bound: false };
  playback: Playback;
  private readonly map: FabricMap;
  private readonly lanes: Lanes;
  private readonly panel: Panel;

  constructor(readonly scene: Scene, into: HTMLElement, place: number, private readonly page: { changed(): void; seek(time: number): void }) {
    this.playback = new Playback(scene, scene.runs[0]);
    const article = select(into).append("article").attr("aria-label", scene.title);
    article.append("h1").text(scene.title);
    const stage = article.append("div").attr("class", "stage");
    const left = stage.append("div");
    const map = left.append("div").attr("class", "map").node()!;
    const lanes = left.append("div").attr("class", "lanes").attr("tabindex", 0).attr("role", "group").attr("aria-label", "Timeline of links").node()!;
    const panel = stage.append("div").attr("class", "panel").node()!;
    const changed = (): void => page.changed();
    this.map = new FabricMap(scene, map, changed, (rank) => { this.wishes.rank(rank); this.panel.open("Rank"); });
    this.lanes = new Lanes(scene, lanes, changed, (time, chunk) => { page.seek(time); this.wishes.chunk(chunk); });
    this.panel = new Panel(scene, panel, `view${place}`, this.wishes, changed);
    this.map.canvas.setAttribute("role", "img");
    this.lanes.canvas.setAttribute("role", "img");
  }

  private readonly wishes = {
    chunk: (chunk: number | null): void => this.set({ chunk }),
    rank: (rank: number | null): void => this.set({ rank }),
    loads: (loads: boolean): void => this.set({ loads }),
    bound: (bound: boolean): void => this.set({ bound }),
  };

  set(change: Partial<Shown>): void {
    Object.assign(this.shown, change);
    this.map.refresh();
    this.lanes.refresh();
    this.panel.rebuild(this.playback, this.shown);
    this.page.changed();
  }

  choose(size: string): void {
    const run = this.scene.runs.find((one) => one.label === size) ?? this.scene.runs[0];
    if (run !== this.playback.run) this.playback = new Playback(this.scene, run);
    this.set({});
  }

  nextChunk(move: 1 | -1): void {
    const count = this.scene.chunks.length, { chunk } = this.shown;
    this.set({ chunk: chunk === null ? (move === 1 ? 0 : count - 1) : (chunk + move + count) % count });
  }

  draw(time: number, until: number): void {
    this.shown.time = time;
    this.map.draw(this.playback, this.shown);
    this.lanes.draw(this.playback, time, until, this.shown.chunk);
    this.panel.update(this.shown);
  }

  inWords(time: number): string {
    const { playback, shown } = this;
    const busy = playback.at(time, shown.chunk).length;
    const place = playback.stepAt(time), steps = playback.steps.length;
    const of = shown.chunk === null ? "" : ` with chunk ${shown.chunk}`;
    return `${busy} of ${playback.used.length} used links busy${of}, ${place + 1} of ${steps} steps begun`;
  }

  describe(time: number): void {
    this.map.canvas.setAttribute("aria-label", `Map of ${this.scene.title}: ${this.inWords(time)}`);
    const left = this.lanes.left > 0 ? `; ${this.lanes.left} links that are busy for less are left out` : "";
    this.lanes.canvas.setAttribute("aria-label", `Timeline of ${this.playback.used.length} links${left}. The tabs beside it say the same in words.`);
  }
}

class Page {
  private time = 0;
  private playing = false;
  private last = 0;
  private due = false;
  private readonly views: View[];
  private readonly element = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;

  constructor(scenes: Scene[]) {
    const main = this.element("views");
    main.classList.toggle("two", scenes.length > 1);
    this.views = scenes.map((scene, place) => new View(scene, main, place, { changed: () => this.redraw(), seek: (time) => this.seek(time) }));
    const sizes = [...new Set(scenes.flatMap((scene) => scene.runs.map((run) => run.label)))];
    const size = select(this.element("size"));
    sizes.forEach((label) => size.append("option").text(label));
    this.element("size-label").hidden = sizes.length < 2;
    size.on("change", () => this.choose(this.element<HTMLSelectElement>("size").value));
    const speed = select(this.element("speed"));
    SPEEDS.forEach((value) => speed.append("option").attr("value", value).property("selected", value === 1).text(`${value} x`));
    select(this.element("play")).on("click", () => this.play(!this.playing));
    select(this.element("back")).on("click", () => this.step(-1));
    select(this.element("on")).on("click", () => this.step(1));
    select(this.element("time")).on("input", () => this.seek((Number(this.element<HTMLInputElement>("time").value) / 1000) * this.until));
    addEventListener("keydown", (event) => this.key(event));
    this.choose(sizes[0]);
  }

  private get until(): number {
    return Math.max(...this.views.map((view) => view.playback.run.time_us));
  }

  private choose(size: string): void {
    this.views.forEach((view) => view.choose(size));
    this.seek(0);
  }

  seek(time: number): void {
    this.time = Math.min(Math.max(time, 0), this.until);
    this.redraw();
  }

  private play(on: boolean): void {
    if (on && this.time >= this.until) this.time = 0;
    this.playing = on;
    this.last = performance.now();
    const button = this.element("play");
    button.textContent = on ? "Pause" : "Play";
    button.setAttribute("aria-pressed", String(on));
    this.redraw();
  }

  private step(move: 1 | -1): void {
    this.play(false);
    const times = [...new Set(this.views.flatMap((view) => view.playback.steps.map((step) => step.at)))].sort((a, b) => a - b);
    const next = move === 1 ? times.find((at) => at > this.time + 1e-9) : times.findLast((at) => at < this.time - 1e-9);
    this.seek(next ?? (move === 1 ? this.until : 0));
  }

  private key(event: KeyboardEvent): void {
    const at = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT"].includes(at.tagName)) return;
    if (event.key === " " && at.tagName === "BUTTON") return; // it presses the button
    if (event.key.startsWith("Arrow") && (at.tagName === "INPUT" || at.classList.contains("lanes") || at.classList.contains("tab"))) return;
    const move = (event.shiftKey ? 0.1 : 0.01) * this.until;
    const does: Record<string, () => void> = {
      " ": () => this.play(!this.playing),
      ArrowRight: () => this.seek(this.time + move),
      ArrowLeft: () => this.seek(this.time - move),
      Home: () => this.seek(0),
      End: () => this.seek(this.until),
      ".": () => this.step(1),
      ",": () => this.step(-1),
      "]": () => this.views.forEach((view) => view.nextChunk(1)),
      "[": () => this.views.forEach((view) => view.nextChunk(-1)),
      Escape: () => this.views.forEach((view) => view.set({ chunk: null })),
    };
    if (!(event.key in does)) return;
    event.preventDefault();
    does[event.key]();
  }

  private redraw(): void {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame((now) => {
      this.due = false;
      if (this.playing) {
        const speed = Number(this.element<HTMLSelectElement>("speed").value);
        this.time = Math.min(this.time + ((now - this.last) / 1000) * (this.until / SECONDS) * speed, this.until);
        this.last = now;
      }
      this.draw();
      if (this.playing && this.time >= this.until) this.play(false);
      else if (this.playing) this.redraw();
    });
  }

  private draw(): void {
    const { until } = this;
    this.views.forEach((view) => view.draw(this.time, until));
    const slider = this.element<HTMLInputElement>("time");
    slider.value = String(Math.round((1000 * this.time) / until));
    slider.setAttribute("aria-valuetext", `${this.time.toPrecision(4)} of ${until.toPrecision(4)} µs`);
    const words = this.views.map((view) => view.inWords(this.time)).join(" | ");
    this.element("now").textContent = `${this.time.toFixed(2)} of ${until.toFixed(2)} µs: ${words}`;
    if (!this.playing) this.views.forEach((view) => view.describe(this.time));
  }
}

new Page((JSON.parse(document.getElementById("data")!.textContent!) as { scenes: Scene[] }).scenes);
