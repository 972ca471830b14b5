// What the schedule costs so far: clock and bytes; and what others would cost.
"use strict";

const SMALLEST = 4; // bytes: the left end of the slider and of the curves

class CostsView {
  constructor(find) {
    this.find = find;
  }

  update(frames, done) {
    const [now, end] = [frames[done], frames[frames.length - 1]];
    this.find("clock").textContent = secondsText(now.clock);
    this.find("clock-of").textContent =
      `of ${secondsText(end.clock)}, ${roundsText(frames.length - 1)}`;
    this.timeline(frames, done);
    const most = Math.max(...end.sent, ...end.received);
    const moved = end.sent.includes(most) ? "sent" : "received";
    const busiest = end[moved].indexOf(most);
    const who = end[moved].every((bytes) => bytes === most) ? "each" : `device ${busiest}`;
    this.find("busiest").textContent = bytesText(now[moved][busiest]);
    this.find("busiest-what").textContent = `of ${bytesText(most)} ${moved} by ${who}`;
    this.bytes(now, end, most);
  }

  // A part for every round, as wide as it is long.
  timeline(frames, done) {
    const total = frames[frames.length - 1].clock;
    this.find("timeline").replaceChildren(
      ...frames.slice(1).map((frame, i) => {
        const part = tagged("i", { className: i < done ? "past" : "" });
        part.style.flexGrow = total ? (frame.clock - frames[i].clock) / total : 1;
        return part;
      }),
    );
  }

  bytes(now, end, most) {
    const bar = (kind, moved, total) => {
      const part = (className, bytes) => {
        const filled = tagged("i", { className });
        filled.style.width = `${most ? (100 * bytes) / most : 0}%`;
        return filled;
      };
      return tagged(
        "span",
        { className: `bar ${kind}` },
        part("rest", total),
        part("moved", moved),
      );
    };
    const rows = now.sent.map((sent, device) =>
      tagged(
        "div",
        {},
        tagged("b", {}, String(device)),
        tagged(
          "span",
          { className: "pair" },
          bar("sent", sent, end.sent[device]),
          bar("received", now.received[device], end.received[device]),
        ),
        tagged(
          "span",
          { className: "number" },
          bytesText(sent),
          tagged("br"),
          bytesText(now.received[device]),
        ),
      ),
    );
    const words = now.sent.map(
      (sent, device) =>
        `device ${device} sent ${bytesText(sent)} and received ${bytesText(now.received[device])}`,
    );
    this.find("bytes").replaceChildren(...rows);
    this.find("bytes").setAttribute("aria-label", words.join("; "));
  }

  // Seconds against bytes, both in powers of two: flat where latency is what costs.
  curves(algorithms, chosen, devices, sizeBytes, machine) {
    const sizes = [...Array(9).keys()].map((i) => SMALLEST * 16 ** i);
    const clocks = algorithms
      .filter((other) => other.schedules[devices])
      .map((other) => {
        const seconds = sizes.map((bytes) => clockOf(other.schedules[devices], bytes, machine));
        return { chosen: other === chosen, seconds };
      })
      .sort((a, b) => a.chosen - b.chosen);
    const all = clocks
      .flatMap(({ seconds }) => seconds)
      .filter((s) => s > 0)
      .map(Math.log2);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const across = (bytes) => (100 * Math.log2(bytes / SMALLEST)) / 32;
    const down = (s) => 52 - (48 * (Math.log2(s) - low)) / (high - low || 1);
    const point = (s, i) => `${across(sizes[i]).toFixed(2)} ${down(s).toFixed(2)}`;
    const curve = (seconds) => `M${seconds.map(point).join(" L")}`;
    this.find("curves").replaceChildren(
      ...(all.length
        ? [
            drawn("path", { d: `M${across(sizeBytes)} 0 V56`, class: "here" }),
            ...clocks.map(({ chosen: own, seconds }) =>
              drawn("path", { d: curve(seconds), class: own ? "own" : "" }),
            ),
          ]
        : []),
    );
  }

  // Other algorithms for the same collective, the quickest first.
  rivals(algorithms, chosen, devices, sizeBytes, machine, choose) {
    const rows = algorithms
      .filter((other) => other.schedules[devices])
      .map((other) => {
        const schedule = other.schedules[devices];
        return {
          other,
          clock: clockOf(schedule, sizeBytes, machine),
          rounds: schedule.rounds.length,
        };
      })
      .sort((a, b) => a.clock - b.clock);
    const longest = Math.max(...rows.map((row) => row.clock));
    this.find("rivals-title").textContent =
      `${chosen.collective} on ${devices} device${devices > 1 ? "s" : ""}`;
    this.find("rivals").replaceChildren(
      tagged(
        "tbody",
        {},
        ...rows.map(({ other, clock, rounds }) => {
          const name = tagged(
            "button",
            { type: "button", className: "link", onclick: () => choose(other.id) },
            other.label,
          );
          if (other === chosen) name.setAttribute("aria-current", "true");
          const bar = tagged("i");
          bar.style.width = `${longest ? (100 * clock) / longest : 0}%`;
          return tagged(
            "tr",
            { className: other === chosen ? "chosen" : "" },
            tagged("th", { scope: "row" }, name),
            tagged("td", { className: "time" }, bar),
            tagged("td", { className: "number" }, secondsText(clock)),
            tagged("td", { className: "number" }, roundsText(rounds)),
          );
        }),
      ),
    );
  }
}
