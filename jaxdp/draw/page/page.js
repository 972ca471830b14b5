// The state of the page: which schedule, and how many rounds are done.
"use strict";

const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
for (const { schedules } of data.algorithms) {
  for (const n of Object.keys(schedules)) schedules[n] = unpacked(schedules[n], data.shared);
}
const still = matchMedia("(prefers-reduced-motion: reduce)");
const FLIGHT_MS = 900; // of what is sent in a round
const REST_MS = 700; // between rounds, while playing
const REMEMBER_MS = 120;

const state = {
  algorithm: null,
  devices: 0,
  done: 0,
  size: data.size_bytes,
  machine: null,
  playing: false,
};
const links = new LinksView(find("links"), data.colours);
const cells = new CellsView(
  find("cells"),
  new FlightsView(find("flights"), data.colours),
  find("inspected"),
  data.colours,
);
const costs = new CostsView(find);
const hand = new Hand(find, cells);
let schedule,
  frames,
  flight = null,
  timer = null,
  remembering = null;

// Shows an algorithm; devices that it does not exist for become the nearest that it does.
function choose(id, devices, done = 0) {
  state.algorithm = data.algorithms.find((algorithm) => algorithm.id === id);
  const offered = Object.keys(state.algorithm.schedules).map(Number);
  state.devices = offered.reduce((best, n) =>
    Math.abs(n - devices) < Math.abs(best - devices) ? n : best,
  );
  schedule = state.algorithm.schedules[state.devices];
  find("algorithm").value = id;
  find("devices").replaceChildren(
    ...offered.map((n) => {
      const radio = tagged("input", {
        type: "radio",
        name: "devices",
        value: n,
        checked: n === state.devices,
      });
      return tagged("label", {}, radio, tagged("span", {}, String(n)));
    }),
  );
  find("about").replaceChildren(...state.algorithm.about.map((text) => tagged("p", {}, text)));
  find("done").max = schedule.rounds.length;
  find("phases").replaceChildren(
    ...schedule.phases.map(([title, rounds]) => {
      const part = tagged(
        "i",
        { title },
        title.split(",")[0] === "Nothing to send" ? "" : title.split(", until")[0],
      );
      part.style.flexGrow = rounds;
      return part;
    }),
  );
  links.show(schedule);
  cells.show(schedule);
  hand.restart();
  price();
  go(done);
}

// Counts bytes and seconds anew: another schedule, buffer or hardware.
function price() {
  frames = framesOf(schedule, state.size, state.machine);
  find("size-text").textContent = bytesText(state.size);
  find("size").setAttribute("aria-valuetext", bytesText(state.size));
  const rivals = data.algorithms.filter(
    ({ collective }) => collective === state.algorithm.collective,
  );
  const given = [rivals, state.algorithm, state.devices, state.size, state.machine];
  costs.rivals(...given, (id) => {
    pause();
    choose(id, state.devices);
  });
  costs.curves(...given);
}

// Shows the moment after so many rounds.
function go(done, changed) {
  land();
  const last = frames.length - 1;
  if (done !== state.done) hand.clear();
  state.done = Math.max(0, Math.min(last, done));
  show(changed);
  remember();
}

// Writes the moment into the address, a little later: browsers allow it a few times
// a second only.
function remember() {
  clearTimeout(remembering);
  const address = `#${state.algorithm.id}-${state.devices}-${state.done}`;
  remembering = setTimeout(() => history.replaceState(null, "", address), REMEMBER_MS);
}

function show(changed) {
  const { done } = state;
  const last = frames.length - 1;
  const secret = hand.on && !hand.hinted && !hand.checked;
  links.update(frames[done], secret);
  cells.update(frames[done], secret, changed);
  costs.update(frames, done);
  hand.ask(changesOf(schedule, frames, done), done, last);
  find("now").textContent = schedule.now[done];
  const [next, detail] = schedule.next[done] || ["", ""];
  find("next").replaceChildren(
    ...(next
      ? [
          tagged("b", {}, `Round ${done}: `),
          next,
          ...(secret || !detail ? [] : [" ", tagged("span", { className: "detail" }, detail)]),
        ]
      : ["Done."]),
  );
  find("done").value = done;
  find("done").setAttribute("aria-valuetext", `${done} of ${last} rounds done`);
  find("done").style.setProperty("--share", last ? done / last : 1);
  find("count").replaceChildren(
    `${done} of ${last}`,
    tagged("span", { className: "word" }, roundsText(last).replace(/\d+/, "")),
  );
  find("first").disabled = find("back").disabled = done === 0;
  find("last").disabled = find("forward").disabled = done === last;
}

// Lets a round happen: what is sent travels, then the cells change.
function forward(then) {
  if (flight) land();
  if (state.done === frames.length - 1) return;
  const changed = changesOf(schedule, frames, state.done);
  const arrive = () => {
    go(state.done + 1, changed);
    if (then) then();
  };
  if (still.matches) {
    arrive();
    return;
  }
  const long = FLIGHT_MS / Number(find("speed").value);
  let start = null;
  links.update(frames[state.done], false);
  const tick = (time) => {
    start = start === null ? time : start;
    const t = Math.min(1, (time - start) / long);
    const eased = t < 0.5 ? 4 * t ** 3 : 1 - (2 - 2 * t) ** 3 / 2;
    links.fly(eased);
    cells.flights.fly(eased);
    if (t < 1) {
      flight.id = requestAnimationFrame(tick);
      return;
    }
    flight = null;
    arrive();
  };
  flight = { id: requestAnimationFrame(tick), arrive };
}

// At once, if something is travelling.
function land() {
  if (!flight) return;
  cancelAnimationFrame(flight.id);
  flight = null;
}

// Forward; a second press while chunks travel lets them arrive.
function step() {
  pause();
  if (!flight) {
    forward();
    return;
  }
  const { arrive } = flight;
  land();
  arrive();
}

function play() {
  state.playing = true;
  document.body.classList.add("playing");
  find("play").setAttribute("aria-label", "Pause");
  if (state.done === frames.length - 1) go(0);
  const next = () => {
    if (!state.playing) return;
    if (state.done === frames.length - 1) {
      pause();
      return;
    }
    forward(() => {
      timer = setTimeout(next, REST_MS / Number(find("speed").value));
    });
  };
  next();
}

function pause() {
  clearTimeout(timer);
  state.playing = false;
  document.body.classList.remove("playing");
  find("play").setAttribute("aria-label", "Play");
}

function jump(done) {
  pause();
  go(done);
}

function toggleHand(on) {
  pause();
  hand.on = on;
  find("by-hand").checked = on;
  hand.clear();
  go(state.done);
}

function check() {
  if (!hand.on || find("check").disabled) return;
  hand.check();
  show();
}
