// What the reader does to the page: lists, buttons, keys and addresses.
"use strict";

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
  "?": () => {
    document.querySelector("details").open ^= true;
  },
};

addEventListener("keydown", (event) => {
  const { target, key } = event;
  const typing =
    target.matches("select") ||
    (target.matches("input[type=range]") && /^(Arrow|Home|End)/.test(key)) ||
    (target.matches("input[type=radio]") && /^(Arrow| )/.test(key));
  const pressing =
    target.matches("button, summary, input[type=checkbox]") && [" ", "Enter"].includes(key);
  if (typing || pressing || event.ctrlKey || event.metaKey || event.altKey) return;
  const does = KEYS[key.length === 1 ? key.toLowerCase() : key];
  if (!does) return;
  event.preventDefault();
  does();
});

// The lists to choose from.
function fill() {
  const collectives = [...new Set(data.algorithms.map((algorithm) => algorithm.collective))];
  find("algorithm").append(
    ...collectives.map((label) =>
      tagged(
        "optgroup",
        { label },
        ...data.algorithms
          .filter((algorithm) => algorithm.collective === label)
          .map((algorithm) => tagged("option", { value: algorithm.id }, algorithm.label)),
      ),
    ),
  );
  find("machine").append(
    ...data.machines.map(({ id, label }) => tagged("option", { value: id }, label)),
  );
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
  find("algorithm").addEventListener("change", (event) => {
    pause();
    choose(event.target.value, state.devices);
  });
  find("devices").addEventListener("change", (event) => {
    pause();
    choose(state.algorithm.id, Number(event.target.value));
    find("devices").querySelector("input:checked").focus();
  });
  find("by-hand").addEventListener("change", (event) => toggleHand(event.target.checked));
  find("size").addEventListener("input", (event) => {
    state.size = 2 ** event.target.value;
    price();
    show();
  });
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
  find("hint").addEventListener("click", () => {
    hand.hinted = true;
    show();
  });
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
