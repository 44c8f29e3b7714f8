// The playhead and its controls. Frames are drawn here, in the browser: Python receives the position only when the
// playhead rests or a step ends.
import { el, keepHeight, onKeys, reducedMotion } from "./shell.js";

const ICONS = {
  first: "M4 3v10M13 3.5 6.5 8l6.5 4.5z", back: "M10.5 3.5 5 8l5.5 4.5z", play: "M5 3l8 5-8 5z",
  pause: "M4.5 3.5h2v9h-2zM9.5 3.5h2v9h-2z", next: "M5.5 3.5 11 8l-5.5 4.5z",
};
const SPEEDS = [0.5, 1, 2, 4];

const icon = (name) => el("svg.tpl-icon", { viewBox: "0 0 16 16", "aria-hidden": "true" }, el("path", { d: ICONS[name] }));

const pace = (steps) => Math.max(0.2, Math.min(1.1, 18 / steps));

export class Player {
  // show(position, playing) draws; say(position) is [the step, what happens, how much was sent].
  constructor(root, model, { steps, show, say, seconds }) {
    Object.assign(this, { root, model, steps, show, say });
    this.secondsAStep = seconds ?? pace(steps);
    this.position = this.clamp(model.get("step"));
    this.speed = 1;
    this.playing = false;
    this.build();
    this.onModel = () => {
      const step = this.clamp(model.get("step"));
      if (Math.abs(step - this.sent) <= 1e-9) return;
      this.sent = step;
      this.go(step, false);
    };
    model.on("change:step", this.onModel);
    onKeys(root, ({ target }) => ({
      " ": target.closest?.("button, select") ? null : () => this.toggle(), ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1),
      Home: () => this.go(0), End: () => this.go(this.steps),
    }));
    this.sent = this.position;
    this.draw();
  }

  clamp(position) {
    return Math.min(Math.max(Number(position) || 0, 0), this.steps);
  }

  build() {
    const button = (name, label, act) => el("button.tpl-button", { type: "button", title: label, "aria-label": label, onclick: act }, icon(name));
    this.playButton = button("play", "play (space)", () => this.toggle());
    this.playButton.classList.add("tpl-play");
    this.slider = el("input.tpl-slider", {
      type: "range", min: 0, max: this.steps, step: "any", value: this.position, "aria-label": "position, in steps",
      oninput: () => this.seek(this.slider.value),
    });
    this.marks = el("div.tpl-marks", { "aria-hidden": "true" });
    this.markSteps();
    this.speedButton = el("button.tpl-button.tpl-speed", { type: "button", onclick: () => this.faster() });
    this.root.append(el("div.tpl-controls", {},
      button("first", "to the start (Home)", () => this.go(0)),
      button("back", "one step back (←)", () => this.step(-1)),
      this.playButton,
      button("next", "one step on (→)", () => this.step(1)),
      el("div.tpl-track", {}, this.slider, this.marks),
      this.speedButton));
    this.headText = el("b");
    this.sayText = el("span");
    this.sentText = el("span.tpl-sent");
    this.root.append(el("p.tpl-say", { "aria-live": "polite" }, this.headText, this.sayText, this.sentText));
    this.faster(0);
    [this.reserve, this.letGo] = keepHeight(this.root, this.sayText.parentElement, () => this.texts());
  }

  markSteps() {
    this.marks.replaceChildren(...Array.from({ length: this.steps <= 40 ? this.steps + 1 : 0 }, () => el("i")));
  }

  // The picture has changed, and now has this many steps. The model's step may be one that the previous picture lacked.
  restart(steps) {
    this.steps = steps;
    this.secondsAStep = pace(steps);
    this.slider.max = steps;
    this.markSteps();
    this.reserve();
    this.go(this.model.get("step"), false);
  }

  // The line below the controls, for about forty steps.
  texts() {
    const some = Array.from({ length: 41 }, (_, place) => place * Math.ceil(this.steps / 40)).filter((step) => step <= this.steps);
    return [...new Set(some)].map((step) => {
      const [head, words, sent] = this.say(step);
      return `${head} — ${words} · ${sent}`;
    });
  }

  faster(by = 1) {
    this.speed = SPEEDS[(SPEEDS.indexOf(this.speed) + by) % SPEEDS.length];
    this.speedButton.textContent = `${this.speed}×`;
    this.speedButton.setAttribute("aria-label", `speed ${this.speed} times`);
    this.speedButton.title = "speed";
  }

  // To the next whole step, in either direction.
  step(by) {
    const next = by > 0 ? Math.floor(this.position + 1e-6) + 1 : Math.ceil(this.position - 1e-6) - 1;
    this.go(next);
  }

  go(position, tell = true) {
    this.pause(false);
    clearTimeout(this.resting);
    this.position = this.clamp(position);
    this.draw();
    if (tell) this.sync();
  }

  // To a position that the reader is still choosing: Python receives it when the pointer rests.
  seek(position) {
    this.go(position, false);
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.sync(), 150);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.position >= this.steps) this.position = 0;
    this.playing = true;
    this.mark();
    let before = null;
    const tick = (now) => {
      const passed = before === null ? 0 : Math.min((now - before) / 1000, 0.1) * this.speed / this.secondsAStep;
      before = now;
      const whole = Math.floor(this.position);
      this.position = this.clamp(this.position + passed);
      this.draw();
      if (this.position >= this.steps) this.pause();
      else {
        if (Math.floor(this.position) > whole) this.sync();
        this.timer = requestAnimationFrame(tick);
      }
    };
    if (reducedMotion.matches) {
      // Reduced motion: one whole step at a time.
      const jump = () => {
        this.position = this.clamp(Math.floor(this.position + 1e-6) + 1);
        this.draw();
        if (this.position >= this.steps) this.pause();
        else this.jumps = setTimeout(jump, (1000 * Math.max(this.secondsAStep, 0.8)) / this.speed);
      };
      jump();
    } else this.timer = requestAnimationFrame(tick);
  }

  pause(tell = true) {
    if (!this.playing) return;
    this.playing = false;
    cancelAnimationFrame(this.timer);
    clearTimeout(this.jumps);
    this.mark();
    if (tell) this.sync();
  }

  mark() {
    const label = this.playing ? "pause (space)" : "play (space)";
    this.sayText.parentElement.setAttribute("aria-live", this.playing ? "off" : "polite"); // not every step is read out
    this.playButton.replaceChildren(icon(this.playing ? "pause" : "play"));
    this.playButton.setAttribute("aria-label", label);
    this.playButton.title = label;
  }

  draw() {
    this.slider.value = this.position;
    this.slider.parentElement.style.setProperty("--at", `${(100 * this.position) / this.steps}%`);
    this.show(this.position);
    const [head, words, sent] = this.say(this.position);
    const texts = [[this.headText, head], [this.sayText, ` — ${words}`], [this.sentText, sent ? ` · ${sent}` : ""]];
    for (const [node, text] of texts) if (node.textContent !== text) node.textContent = text;
    this.slider.setAttribute("aria-valuetext", head);
  }

  // Send the position of the playhead to Python, at most about four times a second while it plays.
  sync() {
    const now = performance.now();
    if (this.playing && now - (this.told ?? -1e9) < 250) return;
    this.told = now;
    this.sent = Math.round(this.position * 1000) / 1000;
    this.model.set("step", this.sent);
    this.model.save_changes();
  }

  destroy() {
    this.pause(false);
    clearTimeout(this.resting);
    this.letGo();
    this.model.off("change:step", this.onModel);
  }
}
