// What a schedule does, computed from its data: holdings, bytes and seconds.
// The rules are those of jaxdp.schedule.holdings and jaxdp.cost; a test holds both
// against each other, for every algorithm and number of devices.
"use strict";

const ITEMSIZE = 4; // bytes of a float32

// A schedule with what it shares with others put back.
function unpacked(schedule, shared) {
  const part = (place) => shared[place];
  const ways = part(schedule.ways);
  return {
    ...schedule,
    ...Object.fromEntries(
      ["starts", "phases", "points", "links", "groups"].map((name) => [
        name,
        part(schedule[name]),
      ]),
    ),
    now: schedule.now.map(part),
    next: schedule.next.map((sentences) => sentences.map(part)),
    rounds: schedule.rounds.map((round) =>
      round.map(([op, way, chunks]) => ({ op, pairs: ways[way], chunks })),
    ),
  };
}

// The frames of a schedule: before every round, and after the last one.
function framesOf(schedule, sizeBytes, machine) {
  const chunkBytes = chunkBytesOf(schedule, sizeBytes);
  const held = Array.from({ length: schedule.devices }, (_, device) =>
    schedule.starts.map((starts) => (starts.includes(device) ? [device] : [])),
  );
  const sent = Array(schedule.devices).fill(0);
  const received = Array(schedule.devices).fill(0);
  const frames = [];
  let clock = 0;
  const keep = (round) =>
    frames.push({
      held: held.map((row) => row.map((devices) => [...devices])),
      sends: round ? sendsOf(round) : [],
      sent: [...sent],
      received: [...received],
      clock,
    });
  for (const round of schedule.rounds) {
    keep(round);
    for (const { source, target } of sendsOf(round)) {
      sent[source] += chunkBytes;
      received[target] += chunkBytes;
    }
    clock += roundSeconds(round, chunkBytes, machine);
    apply(round, held);
  }
  keep(null);
  return frames;
}

// The single sends of a round, in the order in which they are applied.
function sendsOf(round) {
  return round.flatMap(({ op, pairs, chunks }) =>
    chunks.flatMap((row) =>
      row.map((chunk, i) => ({ source: pairs[i][0], target: pairs[i][1], chunk, op })),
    ),
  );
}

// All send what they held before the round.
function apply(round, held) {
  const sends = sendsOf(round);
  const moved = sends.map(({ source, chunk }) => held[source][chunk]);
  sends.forEach(({ target, chunk, op }, i) => {
    const kept = op === "add" ? held[target][chunk] : [];
    held[target][chunk] = [...new Set([...kept, ...moved[i]])].sort((a, b) => a - b);
  });
}

// What all rounds take.
function clockOf(schedule, sizeBytes, machine) {
  const chunkBytes = chunkBytesOf(schedule, sizeBytes);
  return schedule.rounds.reduce(
    (sum, round) => sum + roundSeconds(round, chunkBytes, machine),
    0,
  );
}

// Buffers are padded to whole chunks.
function chunkBytesOf(schedule, sizeBytes) {
  return Math.ceil(Math.ceil(sizeBytes / ITEMSIZE) / schedule.chunks) * ITEMSIZE;
}

// A round ends with the device that takes longest for its bundles.
function roundSeconds(round, chunkBytes, machine) {
  const busy = new Map();
  for (const { pairs, chunks } of round) {
    for (const [device, seconds] of bundleSeconds(pairs, chunks.length * chunkBytes, machine)) {
      busy.set(device, (busy.get(device) || 0) + seconds);
    }
  }
  return Math.max(0, ...busy.values());
}

// How long each device is busy with one bundle; hosts may share one adapter.
function bundleSeconds(pairs, bytes, machine) {
  const host = (device) => Math.floor(device / machine.devices_per_host);
  const leaving = new Map();
  const entering = new Map();
  const across = pairs.filter(([source, target]) => host(source) !== host(target));
  for (const [source, target] of across) {
    leaving.set(host(source), (leaving.get(host(source)) || 0) + 1);
    entering.set(host(target), (entering.get(host(target)) || 0) + 1);
  }
  const busy = new Map();
  for (const [source, target] of pairs) {
    const inside = host(source) === host(target);
    const link = inside ? machine.link : machine.network;
    const sharing =
      link.shared && !inside
        ? Math.max(leaving.get(host(source)), entering.get(host(target)))
        : 1;
    const seconds = link.alpha_s + (sharing * bytes) / link.bytes_per_s;
    for (const device of [source, target]) {
      busy.set(device, Math.max(busy.get(device) || 0, seconds));
    }
  }
  return busy;
}

// Cells that the next round changes: "changes", or "complete" if it completes them.
function changesOf(schedule, frames, done) {
  const changes = new Map();
  if (done + 1 >= frames.length) return changes;
  frames[done + 1].held.forEach((row, device) =>
    row.forEach((devices, chunk) => {
      if (devices.join() === frames[done].held[device][chunk].join()) return;
      const complete = devices.length === schedule.starts[chunk].length;
      changes.set(`${device},${chunk}`, complete ? "complete" : "changes");
    }),
  );
  return changes;
}

// Three digits, and no more zeros than needed.
function shown(value) {
  return Number(value.toPrecision(3));
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (shown(bytes) >= 1000 && i < units.length - 1) {
    bytes /= 1024;
    i += 1;
  }
  return `${shown(bytes)} ${units[i]}`;
}

function secondsText(seconds) {
  const units = [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
    ["ns", 1e-9],
  ];
  if (!seconds) return "0 µs";
  const [unit, size] = units.find(([, least]) => shown(seconds / least) >= 1) || units[3];
  return `${shown(seconds / size)} ${unit}`;
}

function roundsText(count) {
  return `${count} round${count === 1 ? "" : "s"}`;
}

// "devices 0, 2 and 3".
function listed(numbers, one) {
  const names = numbers.map(String);
  const last = names.pop();
  if (!names.length) return `${one} ${last}`;
  return `${one}s ${names.join(", ")} and ${last}`;
}
