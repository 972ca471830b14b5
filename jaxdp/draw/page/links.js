// The picture of the devices: where they stand, and what travels between them.
"use strict";

const SIDE = 400; // of the picture, in units of its own
const MARGIN = 18;
const CROWDED = [9, 24]; // with more devices or links in use, chunks are dots without numbers

// The point of a quadratic Bezier curve at t, from 0 to 1.
const at = (points, t) => {
  const [a, b, c] = [(1 - t) * (1 - t), 2 * t * (1 - t), t * t];
  return [0, 1].map((i) => a * points[0][i] + b * points[1][i] + c * points[2][i]);
};

const line = (points) => {
  const [[x0, y0], [x1, y1], [x2, y2]] = points.map((p) => p.map((v) => v.toFixed(1)));
  return `M${x0} ${y0} Q${x1} ${y1} ${x2} ${y2}`;
};

// An SVG element.
function drawn(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function arrowhead(id) {
  return drawn(
    "marker",
    {
      id,
      viewBox: "0 0 10 10",
      refX: 8.5,
      refY: 5,
      markerWidth: 6.5,
      markerHeight: 6.5,
      orient: "auto-start-reverse",
      class: "head",
    },
    drawn("path", { d: "M0 1 L9 5 L0 9 z" }),
  );
}

// The part of a curve outside of two circles around its ends.
function trimmed(points, radius) {
  const apart = (t, end) => Math.hypot(...at(points, t).map((v, i) => v - points[end][i]));
  let [first, last] = [0, 1];
  while (first < 0.49 && apart(first, 0) < radius) first += 0.01;
  while (last > 0.51 && apart(last, 2) < radius) last -= 0.01;
  const middle = [0, 1].map(
    (i) =>
      (1 - first) * (1 - last) * points[0][i] +
      (first * (1 - last) + last * (1 - first)) * points[1][i] +
      first * last * points[2][i],
  );
  return [at(points, first), middle, at(points, last)];
}

class LinksView {
  constructor(svg, colours) {
    this.svg = svg;
    this.colours = colours;
    svg.setAttribute("viewBox", `0 0 ${SIDE} ${SIDE}`);
  }

  // Draws the devices and all links of a schedule.
  show(schedule) {
    const place = ([x, y]) => [x, y].map((v) => MARGIN + v * (SIDE - 2 * MARGIN));
    this.schedule = schedule;
    this.points = schedule.points.map(place);
    this.radius = schedule.devices > 9 ? 18 : schedule.devices > 5 ? 25 : 30;
    this.curves = new Map(
      schedule.links.map(([source, target, x, y]) => {
        const curve = [this.points[source], place([x, y]), this.points[target]];
        return [`${source},${target}`, trimmed(curve, this.radius + 4)];
      }),
    );
    this.nodes = this.points.map((point, device) => this.node(point, device));
    this.active = drawn("g");
    this.svg.replaceChildren(
      drawn("defs", {}, arrowhead("link-head")),
      ...schedule.groups.map((group) => this.host(group)),
      ...[...this.curves.values()].map((curve) =>
        drawn("path", { d: line(curve), class: "way" }),
      ),
      this.active,
      ...this.nodes.map((node) => node.group),
    );
  }

  // A frame around the devices of a host.
  host(group) {
    const room = this.radius + 9;
    const [xs, ys] = [0, 1].map((i) => group.map((device) => this.points[device][i]));
    const [left, top] = [Math.min(...xs) - room, Math.min(...ys) - room];
    return drawn("rect", {
      x: left,
      y: Math.max(top, 2),
      rx: 16,
      class: "host",
      width: Math.max(...xs) + room - left,
      height: Math.min(Math.max(...ys) + room, SIDE - 2) - Math.max(top, 2),
    });
  }

  // A number in a ring with a segment per chunk.
  node([x, y], device) {
    const segments = this.schedule.starts.map((_, chunk) =>
      drawn("path", { d: this.segment(x, y, chunk), class: "segment" }),
    );
    const text = drawn("text", { x, y, class: "device" });
    text.textContent = device;
    const disc = drawn("circle", { cx: x, cy: y, r: this.radius + 1.5, class: "disc" });
    return { segments, group: drawn("g", { "data-device": device }, disc, ...segments, text) };
  }

  segment(x, y, chunk) {
    const [outer, inner] = [this.radius, this.radius - (this.radius > 20 ? 9 : 7)];
    const count = this.schedule.chunks;
    const gap = count > 1 ? 0.5 / outer : 0.001; // an arc needs two different ends
    const [from, to] = [chunk, chunk + 1].map(
      (part, end) => 2 * Math.PI * (part / count - 0.25) + (end ? -gap : gap),
    );
    const point = (r, angle) =>
      [x + r * Math.cos(angle), y + r * Math.sin(angle)].map((v) => v.toFixed(2)).join(" ");
    const large = to - from > Math.PI ? 1 : 0;
    return (
      `M${point(outer, from)} A${outer} ${outer} 0 ${large} 1 ${point(outer, to)} ` +
      `L${point(inner, to)} A${inner} ${inner} 0 ${large} 0 ${point(inner, from)} z`
    );
  }

  // Colours the devices, and puts what is sent next on the middle of its link.
  update(frame, secret) {
    const starts = this.schedule.starts;
    this.nodes.forEach((node, device) =>
      node.segments.forEach((segment, chunk) => {
        const count = frame.held[device][chunk].length;
        segment.style.fill = count ? this.colours[starts[chunk].length][count] : "";
      }),
    );
    const loads = new Map();
    for (const send of frame.sends) {
      const key = `${send.source},${send.target}`;
      loads.set(key, [...(loads.get(key) || []), send]);
    }
    const crowded = this.nodes.length > CROWDED[0] || loads.size > CROWDED[1];
    this.packets = [...loads].map(([key, sends]) =>
      this.packet(key, sends, frame, secret, crowded),
    );
    this.active.replaceChildren(
      ...[...loads.keys()].map((key) =>
        drawn("path", {
          d: line(this.curves.get(key)),
          "marker-end": "url(#link-head)",
          class: loads.size > CROWDED[1] ? "way active many" : "way active",
        }),
      ),
      ...this.packets.map((packet) => packet.group),
    );
    this.fly(null);
  }

  packet(key, sends, frame, secret, crowded) {
    const { source, chunk } = sends[0];
    const [most, count] = [
      this.schedule.starts[chunk].length,
      frame.held[source][chunk].length,
    ];
    const label = secret ? "?" : packetLabel(sends.map((send) => send.chunk));
    const [width, height] = crowded ? [9, 9] : [Math.max(22, 9 + 8 * label.length), 19];
    const group = drawn(
      "g",
      { class: count === most && !secret ? "packet complete" : "packet" },
      drawn("rect", { x: -width / 2, y: -height / 2, width, height, rx: crowded ? 4.5 : 5 }),
    );
    if (!secret) group.firstChild.style.fill = this.colours[most][count];
    if (!crowded) {
      group.append(drawn("text"));
      group.lastChild.textContent = label;
    }
    return { group, curve: this.curves.get(key) };
  }

  // At a device, and at the parts of a chunk.
  point(device, chunk) {
    this.nodes.forEach((node, i) => {
      node.group.classList.toggle("pointed", i === device);
      node.segments.forEach((segment, j) => segment.classList.toggle("pointed", j === chunk));
    });
  }

  // 0 at the sources, 1 at the targets; null at rest, half-way.
  fly(t) {
    for (const { group, curve } of this.packets) {
      const [x, y] = at(curve, t === null ? 0.5 : t);
      group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    }
  }
}

// "3", "2, 3" or "4–7".
function packetLabel(chunks) {
  const sorted = [...chunks].sort((a, b) => a - b);
  const [first, last] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length < 3) return sorted.join(", ");
  return last - first === sorted.length - 1 ? `${first}–${last}` : `${sorted.length} chunks`;
}
