// The table of cells: a row for every chunk and a column for every device.
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
    this.long = this.flights.show(schedule);
    const devices = [...Array(schedule.devices).keys()];
    const head = tagged(
      "tr",
      {},
      tagged("td"),
      ...devices.map((device) =>
        tagged(
          "th",
          { scope: "col" },
          tagged("span", { className: "word" }, "dev "),
          String(device),
        ),
      ),
    );
    this.cells = devices.map(() => []);
    const rows = schedule.starts.map((_, chunk) =>
      tagged(
        "tr",
        {},
        tagged(
          "th",
          { scope: "row" },
          tagged("span", { className: "word" }, "chunk "),
          String(chunk),
        ),
        ...devices.map((device) => tagged("td", {}, this.cell(device, chunk))),
      ),
    );
    this.table.replaceChildren(
      tagged("caption", { className: "hidden" }, schedule.name),
      tagged("thead", {}, head),
      tagged("tbody", {}, ...rows),
    );
    this.cells[0][0].tabIndex = 0;
    this.fit();
  }

  cell(device, chunk) {
    const button = tagged("button", { type: "button", className: "cell", tabIndex: -1 });
    Object.assign(button.dataset, { device, chunk });
    // A digit always has the same place.
    if (this.schedule.devices <= MOST_WRITTEN) {
      const across = this.schedule.devices > 4 ? 3 : 2;
      button.append(
        tagged(
          "span",
          { className: `digits across${across}` },
          ...this.schedule.points.map(() => tagged("i")),
        ),
      );
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
    const rowGap = this.long ? 16 : 9;
    const tall = Math.max(28, 450 / this.schedule.chunks - rowGap);
    const cell = Math.max(25, Math.min(pitch - gap, tall, 54));
    sheet.classList.toggle("long", this.long);
    sheet.classList.toggle("narrow", narrow || pitch < 50);
    for (const [name, size] of Object.entries({ cell, gap, "row-gap": rowGap })) {
      sheet.style.setProperty(`--${name}`, `${size.toFixed(1)}px`);
    }
    this.flights.place(this.table, this.cells, gap);
    if (this.frame) this.flights.draw();
  }

  // Shows a frame. `changed` cells have just become what they are.
  update(frame, secret, changed = new Map()) {
    this.frame = frame;
    this.secret = secret;
    this.cells.forEach((column, device) =>
      column.forEach((button, chunk) => {
        const held = frame.held[device][chunk];
        const most = this.schedule.starts[chunk].length;
        button.style.backgroundColor = held.length ? this.colours[most][held.length] : "";
        button.classList.toggle("complete", held.length === most);
        button.classList.toggle("fresh", changed.has(`${device},${chunk}`));
        this.write(button, held);
        button.setAttribute("aria-label", this.words(device, chunk));
      }),
    );
    this.flights.update(frame, secret);
    this.inspect(null);
  }

  // Whose contributions; or how many, if there is no room.
  write(button, held) {
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
    const leaving = this.secret ? "" : this.leaving(device, chunk);
    return `Device ${device}, chunk ${chunk}: ${heldText(held, most)}${leaving}`;
  }

  // What the next round does with a cell.
  leaving(device, chunk) {
    const sends = this.frame.sends.filter((send) => send.chunk === chunk);
    const out = sends.filter((send) => send.source === device).map((send) => send.target);
    const coming = sends.filter((send) => send.target === device);
    const sources = coming.map((send) => send.source);
    const does = coming.length && coming[0].op === "add" ? "adds" : "stores";
    const to = out.length ? `; goes to ${listed(out, "device")}` : "";
    return to + (sources.length ? `; ${does} what ${listed(sources, "device")} sends` : "");
  }

  inspect(button) {
    const { device, chunk } = button ? button.dataset : {};
    this.inspected.textContent = button
      ? this.words(Number(device), Number(chunk))
      : "Digits are the devices whose contributions a cell has.";
    this.pointed(button ? Number(device) : -1, button ? Number(chunk) : -1);
  }

  // Lifts what a device holds; none for -1.
  column(device) {
    this.cells.forEach((column, i) =>
      column.forEach((cell) => cell.classList.toggle("pointed", i === device)),
    );
  }

  // Arrow keys go from cell to cell.
  walk(event) {
    const step = {
      ArrowRight: [1, 0],
      ArrowLeft: [-1, 0],
      ArrowDown: [0, 1],
      ArrowUp: [0, -1],
    }[event.key];
    const from = event.target.closest(".cell");
    if (!step || !from) return;
    const [device, chunk] = ["device", "chunk"].map(
      (name, i) => Number(from.dataset[name]) + step[i],
    );
    const to = this.cells[device] && this.cells[device][chunk];
    event.preventDefault();
    event.stopPropagation();
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

function heldText(held, most) {
  if (!held.length) return "nothing";
  if (held.length === most)
    return most > 1 ? `complete, all ${most} contributions` : "complete";
  const what = held.length > 1 ? "the sum of" : "the contribution of";
  return `${what} ${listed(held, "device")}, ${held.length} of ${most}`;
}

// An HTML element.
function tagged(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
