// What travels in the table of cells: arrows at rest, and chunks on their way. Chunks
// stay in their row.
"use strict";

class FlightsView {
  constructor(svg, colours) {
    Object.assign(this, { svg, colours });
  }

  // Returns whether some arrows are arcs, which need room above their row.
  show(schedule) {
    this.schedule = schedule;
    return schedule.rounds
      .map(sendsOf)
      .some((sends) =>
        sends.some(
          (send) => Math.abs(send.source - send.target) > 1 && !this.wraps(send, sends),
        ),
      );
  }

  // Takes over where cells lie, in pixels of the table.
  place(table, cells, gap) {
    const edge = table.getBoundingClientRect();
    this.gap = gap;
    this.svg.setAttribute("width", edge.width);
    this.svg.setAttribute("height", edge.height);
    this.boxes = cells.map((column) =>
      column.map((cell) => {
        const own = cell.getBoundingClientRect();
        return { left: own.left - edge.left, top: own.top - edge.top, size: own.width };
      }),
    );
  }

  update(frame, secret) {
    this.frame = frame;
    this.secret = secret;
    this.draw();
  }

  // Whether all send around the ring and this one closes it.
  wraps(send, sends) {
    const ends = new Set([send.source, send.target]);
    const last = this.schedule.devices - 1;
    const step = (s) => (s.target - s.source + last + 1) % (last + 1);
    return (
      last > 1 &&
      ends.has(0) &&
      ends.has(last) &&
      sends.filter((other) => step(other) === step(send)).length > last
    );
  }

  // Where arcs land, from the middle of their target: side by side, and none crosses
  // another. Those from the left come first, and of each side the longest is outside.
  landings(sends) {
    const arcs = sends.filter((send) => Math.abs(send.source - send.target) > 1);
    const found = new Map();
    for (const arc of arcs) {
      const beside = arcs
        .filter((other) => other.target === arc.target && other.chunk === arc.chunk)
        .sort((a, b) => (a.source > a.target) - (b.source > b.target) || b.source - a.source);
      const apart =
        Math.min(0.9 / beside.length, 0.24) * this.boxes[arc.target][arc.chunk].size;
      found.set(arc, apart * (beside.indexOf(arc) - (beside.length - 1) / 2));
    }
    return found;
  }

  // The way of a send: straight to a neighbour, else over the cells between.
  way(send, landing = 0) {
    const [from, to] = [
      this.boxes[send.source][send.chunk],
      this.boxes[send.target][send.chunk],
    ];
    const [x0, x1] = [from, to].map((box) => box.left + box.size / 2);
    const y = from.top + from.size / 2;
    if (Math.abs(send.source - send.target) === 1)
      return [
        [x0, y],
        [(x0 + x1) / 2, y],
        [x1, y],
      ];
    const top = from.top - 4 - 5 * Math.sqrt(Math.abs(send.source - send.target));
    return [
      [x0, from.top],
      [(x0 + x1 + landing) / 2, 2 * top - from.top],
      [x1 + landing, from.top],
    ];
  }

  // What the next round sends, as arrows.
  draw() {
    const sends = this.secret ? [] : this.frame.sends;
    const landings = this.landings(sends);
    this.svg.replaceChildren(
      drawn("defs", {}, arrowhead("cell-head")),
      ...sends.flatMap((send) => this.arrows(send, sends, landings.get(send))),
    );
    this.packets = null;
  }

  arrows(send, sends, landing) {
    const [from, to] = [
      this.boxes[send.source][send.chunk],
      this.boxes[send.target][send.chunk],
    ];
    const arrow = (points) =>
      drawn("path", { d: line(points), class: "arrow", "marker-end": "url(#cell-head)" });
    const y = from.top + from.size / 2;
    const way = Math.sign(send.target - send.source);
    const straight = (x0, x1) =>
      arrow([
        [x0, y],
        [(x0 + x1) / 2, y],
        [x1, y],
      ]);
    const right = (box) => box.left + box.size;
    // Leaves at one side and comes in at the other.
    if (this.wraps(send, sends)) {
      const room = 0.8 * this.gap;
      return way < 0
        ? [straight(right(from), right(from) + room), straight(to.left - room, to.left)]
        : [straight(from.left, from.left - room), straight(right(to) + room, right(to))];
    }
    if (Math.abs(send.source - send.target) > 1) return [arrow(this.way(send, landing))];
    const back = sends.some(
      (other) =>
        other.source === send.target &&
        other.target === send.source &&
        other.chunk === send.chunk,
    );
    const aside = back ? 6 * way : 0;
    const ends = way > 0 ? [right(from), to.left] : [from.left, right(to)];
    return [
      arrow([
        [ends[0], y - aside],
        [(ends[0] + ends[1]) / 2, y - aside],
        [ends[1], y - aside],
      ]),
    ];
  }

  // 0 at the sources, 1 at the targets; null at rest.
  fly(t) {
    if (t === null) {
      this.draw();
      return;
    }
    if (!this.packets) {
      this.packets = this.frame.sends.map((send) => ({
        points: this.way(send),
        ...this.packet(send),
      }));
      this.svg.replaceChildren(...this.packets.map((packet) => packet.group));
    }
    for (const { group, points } of this.packets) {
      const [x, y] = at(points, t);
      group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    }
  }

  packet(send) {
    const held = this.frame.held[send.source][send.chunk].length;
    const size = this.boxes[send.source][send.chunk].size * 0.5;
    const rect = drawn("rect", {
      x: -size / 2,
      y: -size / 2,
      width: size,
      height: size,
      rx: size / 6,
    });
    rect.style.fill = this.colours[this.schedule.starts[send.chunk].length][held];
    return { group: drawn("g", { class: "packet" }, rect) };
  }
}
