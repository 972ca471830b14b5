// The state of the page, and what the reader does to it.
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
  algorithm: null, devices: 0, done: 0, size: data.size_bytes, machine: null, playing: false,
};
const links = new LinksView(find("links"), data.colours);
const cells = new CellsView(find("cells"), find("flights"), find("inspected"), data.colours);
const costs = new CostsView(find);
const hand = new Hand(find, cells);
let schedule, frames, flight = null, timer = null, remembering = null;

// Shows an algorithm; devices that it does not exist for become the nearest that it does.
function choose(id, devices, done = 0) {
  state.algorithm = data.algorithms.find((algorithm) => algorithm.id === id);
  const offered = Object.keys(state.algorithm.schedules).map(Number);
  state.devices = offered.reduce((best, n) => (Math.abs(n - devices) < Math.abs(best - devices) ? n : best));
  schedule = state.algorithm.schedules[state.devices];
  find("algorithm").value = id;
  find("devices").replaceChildren(...offered.map((n) => {
    const radio = tagged("input", { type: "radio", name: "devices", value: n, checked: n === state.devices });
    return tagged("label", {}, radio, tagged("span", {}, String(n)));
  }));
  find("about").replaceChildren(...state.algorithm.about.map((text) => tagged("p", {}, text)));
  find("done").max = schedule.rounds.length;
  find("phases").replaceChildren(...schedule.phases.map(([title, rounds]) => {
    const part = tagged("i", { title }, title.split(",")[0] === "Nothing to send" ? "" : title.split(", until")[0]);
    part.style.flexGrow = rounds;
    return part;
  }));
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
  const rivals = data.algorithms.filter(({ collective }) => collective === state.algorithm.collective);
  const given = [rivals, state.algorithm, state.devices, state.size, state.machine];
  costs.rivals(...given, (id) => { pause(); choose(id, state.devices); });
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
  find("next").replaceChildren(...(next ? [tagged("b", {}, `Round ${done}: `), next,
    ...(secret || !detail ? [] : [" ", tagged("span", { className: "detail" }, detail)])] : ["Done."]));
  find("done").value = done;
  find("done").setAttribute("aria-valuetext", `${done} of ${last} rounds done`);
  find("done").style.setProperty("--share", last ? done / last : 1);
  find("count").replaceChildren(`${done} of ${last}`,
    tagged("span", { className: "word" }, roundsText(last).replace(/\d+/, "")));
  find("first").disabled = find("back").disabled = done === 0;
  find("last").disabled = find("forward").disabled = done === last;
}

// Lets a round happen: what is sent travels, then the cells change.
function forward(then) {
  if (flight) land();
  if (state.done === frames.length - 1) return;
  const changed = changesOf(schedule, frames, state.done);
  const arrive = () => { go(state.done + 1, changed); if (then) then(); };
  if (still.matches) { arrive(); return; }
  const long = FLIGHT_MS / Number(find("speed").value);
  let start = null;
  links.update(frames[state.done], false);
  const tick = (time) => {
    start = start === null ? time : start;
    const t = Math.min(1, (time - start) / long);
    const eased = t < 0.5 ? 4 * t ** 3 : 1 - (2 - 2 * t) ** 3 / 2;
    links.fly(eased);
    cells.fly(eased);
    if (t < 1) { flight.id = requestAnimationFrame(tick); return; }
    flight = null;
    arrive();
  };
  flight = { id: requestAnimationFrame(tick), arrive };
}

function land() { // at once, if something is travelling
  if (!flight) return;
  cancelAnimationFrame(flight.id);
  flight = null;
}

function step() { // forward; a second press while chunks travel lets them arrive
  pause();
  if (!flight) { forward(); return; }
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
    if (state.done === frames.length - 1) { pause(); return; }
    forward(() => { timer = setTimeout(next, REST_MS / Number(find("speed").value)); });
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

// "#ring-4-3" is the ring on 4 devices after 3 rounds.
function read() {
  const [id, devices, done] = location.hash.slice(1).split("-");
  const known = data.algorithms.find((algorithm) => algorithm.id === id);
  if (!known) return false;
  pause();
  choose(id, Number(devices) || state.devices || data.start[1], Number(done) || 0);
  return true;
}

const KEYS = {
  ArrowRight: step,
  ArrowLeft: () => jump(state.done - 1),
  Home: () => jump(0),
  End: () => jump(frames.length - 1),
  " ": () => (state.playing ? pause() : play()),
  h: () => toggleHand(!hand.on),
  c: check,
  "?": () => { document.querySelector("details").open ^= true; },
};

addEventListener("keydown", (event) => {
  const { target, key } = event;
  const typing = target.matches("select")
    || (target.matches("input[type=range]") && /^(Arrow|Home|End)/.test(key))
    || (target.matches("input[type=radio]") && /^(Arrow| )/.test(key));
  const pressing = target.matches("button, summary, input[type=checkbox]") && [" ", "Enter"].includes(key);
  if (typing || pressing || event.ctrlKey || event.metaKey || event.altKey) return;
  const does = KEYS[key.length === 1 ? key.toLowerCase() : key];
  if (!does) return;
  event.preventDefault();
  does();
});

function fill() { // the lists to choose from
  const collectives = [...new Set(data.algorithms.map((algorithm) => algorithm.collective))];
  find("algorithm").append(...collectives.map((label) => tagged("optgroup", { label },
    ...data.algorithms.filter((algorithm) => algorithm.collective === label)
      .map((algorithm) => tagged("option", { value: algorithm.id }, algorithm.label)))));
  find("machine").append(...data.machines.map(({ id, label }) => tagged("option", { value: id }, label)));
  find("machine").value = data.machine;
  state.machine = data.machines.find(({ id }) => id === data.machine);
  find("size").value = Math.round(Math.log2(state.size));
  const complete = data.colours[4];
  ["first", "most", "complete"].forEach((name, i) => {
    find(`key-${name}`).style.setProperty("--swatch", complete[[1, 3, 4][i]]);
  });
}

function listen() {
  find("choose").addEventListener("submit", (event) => event.preventDefault());
  find("algorithm").addEventListener("change", (event) => { pause(); choose(event.target.value, state.devices); });
  find("devices").addEventListener("change", (event) => {
    pause();
    choose(state.algorithm.id, Number(event.target.value));
    find("devices").querySelector("input:checked").focus();
  });
  find("by-hand").addEventListener("change", (event) => toggleHand(event.target.checked));
  find("size").addEventListener("input", (event) => { state.size = 2 ** event.target.value; price(); show(); });
  find("machine").addEventListener("change", (event) => {
    state.machine = data.machines.find(({ id }) => id === event.target.value);
    price();
    show();
  });
  find("done").addEventListener("input", (event) => jump(Number(event.target.value)));
  find("first").addEventListener("click", KEYS.Home);
  find("back").addEventListener("click", KEYS.ArrowLeft);
  find("play").addEventListener("click", KEYS[" "]);
  find("forward").addEventListener("click", step);
  find("last").addEventListener("click", KEYS.End);
  find("check").addEventListener("click", check);
  find("hint").addEventListener("click", () => { hand.hinted = true; show(); });
  addEventListener("hashchange", read);
  cells.pointed = (device, chunk) => links.point(device, chunk);
  for (const type of ["mouseover", "mouseout"]) {
    find("links").addEventListener(type, (event) => {
      const node = event.target.closest("[data-device]");
      cells.column(type === "mouseover" && node ? Number(node.dataset.device) : -1);
    });
  }
}

fill();
listen();
if (!read()) choose(...data.start);
