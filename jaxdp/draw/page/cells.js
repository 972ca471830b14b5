// The table of cells, a row for every chunk and a column for every device, and what
// travels in it. Chunks stay in their row.
"use strict";

const MOST_WRITTEN = 9; // with more devices, contributions are counted instead

class CellsView {
  constructor(table, flights, inspected, colours) {
    Object.assign(this, { table, flights, inspected, colours });
    this.pointed = () => {}; // told of the cell that the reader looks at
    table.addEventListener("keydown", (event) => this.walk(event));
    for (const type of ["mouseover", "focusin"]) {
      table.addEventListener(type, (event) => this.inspect(event.target.closest(".cell")));
    }
    table.addEventListener("mouseleave", () => this.inspect(null));
    table.addEventListener("focusout", () => this.inspect(null));
    new ResizeObserver(() => this.fit()).observe(table.closest(".sheet"));
  }

  show(schedule) {
    this.schedule = schedule;
    this.frame = null;
    this.long = schedule.rounds.some((round) => sendsOf(round).some((send) =>
      Math.abs(send.source - send.target) > 1 && !this.wraps(send, sendsOf(round))));
    const devices = [...Array(schedule.devices).keys()];
    const head = tagged("tr", {}, tagged("td"), ...devices.map((device) =>
      tagged("th", { scope: "col" }, tagged("span", { className: "word" }, "dev "), String(device))));
    this.cells = devices.map(() => []);
    const rows = schedule.starts.map((_, chunk) => tagged("tr", {},
      tagged("th", { scope: "row" }, tagged("span", { className: "word" }, "chunk "), String(chunk)),
      ...devices.map((device) => tagged("td", {}, this.cell(device, chunk)))));
    this.table.replaceChildren(tagged("caption", { className: "hidden" }, schedule.name),
      tagged("thead", {}, head), tagged("tbody", {}, ...rows));
    this.cells[0][0].tabIndex = 0;
    this.fit();
  }

  cell(device, chunk) {
    const button = tagged("button", { type: "button", className: "cell", tabIndex: -1 });
    Object.assign(button.dataset, { device, chunk });
    if (this.schedule.devices <= MOST_WRITTEN) { // a digit always has the same place
      const across = this.schedule.devices > 4 ? 3 : 2;
      button.append(tagged("span", { className: `digits across${across}` },
        ...this.schedule.points.map(() => tagged("i"))));
    }
    this.cells[device][chunk] = button;
    return button;
  }

  // Chooses the size of cells by the room there is.
  fit() {
    if (!this.schedule) return;
    const sheet = this.table.closest(".sheet");
    const narrow = sheet.clientWidth < 560;
    const room = sheet.clientWidth - (narrow ? 22 : 64);
    const pitch = Math.min(74, room / this.schedule.devices);
    const gap = Math.max(7, Math.min(20, pitch * 0.27));
    this.gap = gap;
    const rowGap = this.long ? 16 : 9;
    const tall = Math.max(28, 450 / this.schedule.chunks - rowGap);
    const cell = Math.max(25, Math.min(pitch - gap, tall, 54));
    sheet.classList.toggle("long", this.long);
    sheet.classList.toggle("narrow", narrow || pitch < 50);
    for (const [name, size] of Object.entries({ cell, gap, "row-gap": rowGap })) {
      sheet.style.setProperty(`--${name}`, `${size.toFixed(1)}px`);
    }
    const edge = this.table.getBoundingClientRect();
    this.flights.setAttribute("width", edge.width);
    this.flights.setAttribute("height", edge.height);
    this.boxes = this.cells.map((column) => column.map((button) => {
      const own = button.getBoundingClientRect();
      return { left: own.left - edge.left, top: own.top - edge.top, size: own.width };
    }));
    if (this.frame) this.drawArrows();
  }

  // Shows a frame. `changed` cells have just become what they are.
  update(frame, secret, changed = new Map()) {
    this.frame = frame;
    this.secret = secret;
    this.cells.forEach((column, device) => column.forEach((button, chunk) => {
      const held = frame.held[device][chunk];
      const most = this.schedule.starts[chunk].length;
      button.style.backgroundColor = held.length ? this.colours[most][held.length] : "";
      button.classList.toggle("complete", held.length === most);
      button.classList.toggle("fresh", changed.has(`${device},${chunk}`));
      this.write(button, held);
      button.setAttribute("aria-label", this.words(device, chunk));
    }));
    this.drawArrows();
    this.inspect(null);
  }

  write(button, held) { // whose contributions; or how many, if there is no room
    const digits = this.schedule.devices > MOST_WRITTEN ? [] : button.firstChild.children;
    if (!digits.length) button.textContent = held.length || "";
    [...digits].forEach((digit, device) => {
      const text = held.includes(device) ? String(device) : "";
      if (digit.textContent !== text) digit.textContent = text;
    });
  }

  words(device, chunk) {
    const held = this.frame.held[device][chunk];
    const most = this.schedule.starts[chunk].length;
    const what = !held.length ? "nothing"
      : held.length === most ? (most > 1 ? `complete, all ${most} contributions` : "complete")
        : `${held.length > 1 ? "the sum of " : "the contribution of "}${listed(held, "device")}, ${held.length} of ${most}`;
    return `Device ${device}, chunk ${chunk}: ${what}${this.secret ? "" : this.leaving(device, chunk)}`;
  }

  leaving(device, chunk) {
    const targets = this.frame.sends.filter((send) => send.source === device && send.chunk === chunk)
      .map((send) => send.target);
    const sources = this.frame.sends.filter((send) => send.target === device && send.chunk === chunk);
    const to = targets.length ? `; goes to ${listed(targets, "device")}` : "";
    const op = sources.length && sources[0].op === "add" ? "adds" : "stores";
    return to + (sources.length ? `; ${op} what ${listed(sources.map((send) => send.source), "device")} sends` : "");
  }

  inspect(button) {
    const { device, chunk } = button ? button.dataset : {};
    this.inspected.textContent = button ? this.words(Number(device), Number(chunk))
      : "Digits are the devices whose contributions a cell has.";
    this.pointed(button ? Number(device) : -1, button ? Number(chunk) : -1);
  }

  column(device) { // lifts what a device holds; none for -1
    this.cells.forEach((column, i) => column.forEach((cell) =>
      cell.classList.toggle("pointed", i === device)));
  }

  walk(event) { // arrow keys go from cell to cell
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    const from = event.target.closest(".cell");
    if (!step || !from) return;
    const [device, chunk] = ["device", "chunk"].map((name, i) => Number(from.dataset[name]) + step[i]);
    const to = this.cells[device] && this.cells[device][chunk];
    event.preventDefault();
    event.stopPropagation();
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  wraps(send, sends) { // whether all send around the ring and this one closes it
    const ends = new Set([send.source, send.target]);
    const last = this.schedule.devices - 1;
    const step = (s) => (s.target - s.source + last + 1) % (last + 1);
    return last > 1 && ends.has(0) && ends.has(last)
      && sends.filter((other) => step(other) === step(send)).length > last;
  }

  // Where arcs land, from the middle of their target: side by side, and none crosses
  // another. Those from the left come first, and of each side the longest is outside.
  landings(sends) {
    const arcs = sends.filter((send) => Math.abs(send.source - send.target) > 1);
    const found = new Map();
    for (const arc of arcs) {
      const beside = arcs.filter((other) => other.target === arc.target && other.chunk === arc.chunk)
        .sort((a, b) => (a.source > a.target) - (b.source > b.target) || b.source - a.source);
      const apart = Math.min(0.9 / beside.length, 0.24) * this.boxes[arc.target][arc.chunk].size;
      found.set(arc, apart * (beside.indexOf(arc) - (beside.length - 1) / 2));
    }
    return found;
  }

  // The way of a send: straight to a neighbour, else over the cells between.
  way(send, landing = 0) {
    const [from, to] = [this.boxes[send.source][send.chunk], this.boxes[send.target][send.chunk]];
    const [x0, x1] = [from, to].map((box) => box.left + box.size / 2);
    const y = from.top + from.size / 2;
    if (Math.abs(send.source - send.target) === 1) return [[x0, y], [(x0 + x1) / 2, y], [x1, y]];
    const top = from.top - 4 - 5 * Math.sqrt(Math.abs(send.source - send.target));
    return [[x0, from.top], [(x0 + x1 + landing) / 2, 2 * top - from.top], [x1 + landing, from.top]];
  }

  drawArrows() {
    const sends = this.secret ? [] : this.frame.sends;
    const landings = this.landings(sends);
    this.flights.replaceChildren(drawn("defs", {}, arrowhead("cell-head")),
      ...sends.flatMap((send) => this.arrows(send, sends, landings.get(send))));
    this.packets = null;
  }

  arrows(send, sends, landing) {
    const [from, to] = [this.boxes[send.source][send.chunk], this.boxes[send.target][send.chunk]];
    const arrow = (points) => drawn("path", { d: line(points), class: "arrow", "marker-end": "url(#cell-head)" });
    const y = from.top + from.size / 2;
    const way = Math.sign(send.target - send.source);
    const straight = (x0, x1) => arrow([[x0, y], [(x0 + x1) / 2, y], [x1, y]]);
    const right = (box) => box.left + box.size;
    if (this.wraps(send, sends)) { // leaves at one side and comes in at the other
      const room = 0.8 * this.gap;
      return way < 0 ? [straight(right(from), right(from) + room), straight(to.left - room, to.left)]
        : [straight(from.left, from.left - room), straight(right(to) + room, right(to))];
    }
    if (Math.abs(send.source - send.target) > 1) return [arrow(this.way(send, landing))];
    const back = sends.some((other) => other.source === send.target && other.target === send.source
      && other.chunk === send.chunk);
    const aside = back ? 6 * way : 0;
    const ends = way > 0 ? [right(from), to.left] : [from.left, right(to)];
    return [arrow([[ends[0], y - aside], [(ends[0] + ends[1]) / 2, y - aside], [ends[1], y - aside]])];
  }

  fly(t) { // 0 at the sources, 1 at the targets; null at rest
    if (t === null) {
      this.drawArrows();
      return;
    }
    if (!this.packets) {
      this.packets = this.frame.sends.map((send) => ({ points: this.way(send), ...this.packet(send) }));
      this.flights.replaceChildren(...this.packets.map((packet) => packet.group));
    }
    for (const { group, points } of this.packets) {
      const [x, y] = at(points, t);
      group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    }
  }

  packet(send) {
    const held = this.frame.held[send.source][send.chunk].length;
    const size = this.boxes[send.source][send.chunk].size * 0.5;
    const rect = drawn("rect", { x: -size / 2, y: -size / 2, width: size, height: size, rx: size / 6 });
    rect.style.fill = this.colours[this.schedule.starts[send.chunk].length][held];
    return { group: drawn("g", { class: "packet" }, rect) };
  }
}

function tagged(name, properties = {}, ...children) { // an HTML element
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
