// Working a schedule out by hand: the reader marks what a round will change.
"use strict";

const MARKS = [undefined, "changes", "complete"]; // by clicks on a cell

class Hand {
  constructor(find, cells) {
    Object.assign(this, { find, cells });
    this.on = false;
    cells.table.addEventListener("click", (event) => this.mark(event.target.closest(".cell")));
    this.clear();
  }

  // Another schedule: what was known of the last one does not count.
  restart() {
    this.right = new Set();
    this.tried = new Set();
    this.clear();
  }

  clear() {
    this.marks = new Map();
    this.checked = false;
    this.hinted = false;
    this.find("verdict").textContent = "";
    for (const cell of this.cells.table.querySelectorAll(".cell")) delete cell.dataset.mark;
    for (const cell of this.cells.table.querySelectorAll(".cell")) delete cell.dataset.judged;
  }

  // Asks about the next round.
  ask(changes, done, rounds) {
    this.find("hand").hidden = !this.on;
    this.cells.table.classList.toggle("asking", this.on && !this.checked);
    this.changes = changes;
    this.done = done;
    const over = done === rounds;
    this.find("check").disabled = this.find("hint").disabled = over || this.checked;
    this.find("question").textContent = over
      ? "Nothing is left to send: step back, or choose another algorithm."
      : `Which cells will round ${done} change? Click a cell once if something is added or stored there, ` +
        "twice if that makes it complete.";
    this.find("score").textContent = this.tried.size
      ? `${this.right.size} of ${this.tried.size} rounds right at once`
      : "";
  }

  mark(cell) {
    if (!this.on || this.checked || !cell) return;
    const place = `${cell.dataset.device},${cell.dataset.chunk}`;
    const next = MARKS[(MARKS.indexOf(this.marks.get(place)) + 1) % MARKS.length];
    if (next) this.marks.set(place, next);
    else this.marks.delete(place);
    if (next) cell.dataset.mark = next;
    else delete cell.dataset.mark;
    const said =
      { changes: "changes", complete: "becomes complete" }[next] || "does not change";
    const words = this.cells.words(Number(cell.dataset.device), Number(cell.dataset.chunk));
    cell.setAttribute("aria-label", `${words}; marked: ${said}`);
  }

  // Compares the marks with what will happen; returns whether all are right.
  check() {
    const places = new Set([...this.marks.keys(), ...this.changes.keys()]);
    const wrong = [...places].filter(
      (place) => this.marks.get(place) !== this.changes.get(place),
    );
    for (const place of places) {
      const [device, chunk] = place.split(",");
      this.cells.cells[device][chunk].dataset.judged = wrong.includes(place)
        ? this.marks.has(place)
          ? "wrong"
          : "missed"
        : "right";
    }
    if (!this.tried.has(this.done) && !wrong.length && !this.hinted) this.right.add(this.done);
    this.tried.add(this.done);
    this.checked = true;
    this.find("verdict").textContent = wrong.length
      ? this.explained(wrong)
      : `Right: all ${this.changes.size} cells. Step forward to see it happen.`;
    this.find("verdict").className = wrong.length ? "no" : "yes";
    return !wrong.length;
  }

  explained(wrong) {
    const said = wrong.slice(0, 3).map((place) => {
      const [device, chunk] = place.split(",");
      const happens = {
        changes: "changes, but is not complete yet",
        complete: "becomes complete",
      }[this.changes.get(place)];
      return `Device ${device}, chunk ${chunk} ${happens || "does not change"}`;
    });
    const right = [...this.changes.keys()].filter((place) => !wrong.includes(place)).length;
    return `${right} of ${this.changes.size} right. ${said.join(". ")}${wrong.length > 3 ? "; and so on" : ""}.`;
  }
}
