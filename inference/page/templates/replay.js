"use strict";
(() => {
  const data = JSON.parse(document.getElementById("replay-data").textContent);
  const at = (id) => document.getElementById(id);
  const svgNode = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const visible = (text) =>
    text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7") || "\u2205";
  const short = (text) => (text.length > 16 ? text.slice(0, 15) + "\u2026" : text);
  let round = 0, timer = null;

  // Tokens of a round that were drafted: all but the last, and the last too where a stop cut it.
  const drafted = (one) => Math.min(one.emitted.length, Math.max(one.path.length - 1, 0));

  function said(rounds, last) {
    const box = at("replay-said");
    box.replaceChildren();
    rounds.slice(0, last + 1).forEach((one, index) => {
      const accepted = drafted(one);
      one.emitted.forEach((text, place) => {
        const span = document.createElement("span");
        span.textContent = text;
        span.className = (index && place < accepted ? "accepted" : index ? "bonus" : "") +
          (index === last ? " new" : "");
        box.append(span);
      });
    });
    box.scrollTop = box.scrollHeight;
  }

  // Leaves get rows in the order drafted; a node stands in the middle of its children.
  function places(parents) {
    const depth = parents.map(() => 0), row = parents.map(() => 0);
    const children = parents.map(() => []);
    parents.forEach((parent, node) => {
      if (parent >= 0) { depth[node] = depth[parent] + 1; children[parent].push(node); }
    });
    let next = 0;
    const walk = (node) => {
      if (!children[node].length) { row[node] = next++; return; }
      children[node].forEach(walk);
      row[node] = (row[children[node][0]] + row[children[node].at(-1)]) / 2;
    };
    if (parents.length) walk(0);
    return { depth, row, rows: next };
  }

  function draw(one) {
    const box = at("replay-tree");
    box.replaceChildren();
    if (!one.parents.length) {
      box.textContent = "Round 0 is the prefill: the target reads the prompt and emits one token.";
      return;
    }
    const texts = one.texts.map((text) => short(visible(text)));
    const parents = [...one.parents], taken = new Set(one.path), accepted = drafted(one);
    let bonus = -1;
    if (one.emitted.length > accepted) {
      bonus = parents.length;
      parents.push(one.path.at(-1));
      texts.push(short(visible(one.emitted.at(-1))));
    }
    const { depth, row, rows } = places(parents);
    const widths = [];
    texts.forEach((text, node) => {
      widths[depth[node]] = Math.max(widths[depth[node]] || 0, 18 + 8 * text.length);
    });
    const left = [];
    widths.reduce((sum, width, level) => { left[level] = sum; return sum + width + 34; }, 4);
    const high = 34, total = left.at(-1) + widths.at(-1) + 6;
    const svg = svgNode("svg", { width: total, height: rows * high + 8, role: "img",
      "aria-label": `tree of ${one.parents.length - 1} drafted nodes, ${accepted} accepted` });
    parents.forEach((parent, node) => {
      if (parent < 0) return;
      const x1 = left[depth[parent]] + widths[depth[parent]], y1 = row[parent] * high + 19;
      const x2 = left[depth[node]], y2 = row[node] * high + 19, middle = (x1 + x2) / 2;
      svg.append(svgNode("path", { class: taken.has(node) || node === bonus ? "taken" : "",
        d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` }));
    });
    texts.forEach((text, node) => {
      const kind = node === 0 ? "root" : node === bonus ? "bonus"
        : taken.has(node) ? "accepted" : "rejected";
      const x = left[depth[node]], y = row[node] * high + 6;
      svg.append(svgNode("rect", { class: `n-${kind}`, x, y, rx: 6, height: 26,
        width: widths[depth[node]] }));
      const label = svgNode("text", { x: x + 9, y: y + 18 });
      label.textContent = text;
      svg.append(label);
    });
    box.append(svg);
  }

  function show() {
    const one = data[at("replay-which").value], last = one.rounds.length - 1;
    round = Math.max(0, Math.min(round, last));
    const now = one.rounds[round];
    at("replay-question").textContent = one.question;
    at("replay-round").max = last;
    at("replay-round").value = round;
    at("replay-back").disabled = round === 0;
    at("replay-next").disabled = round === last;
    const tokens = one.rounds.slice(1, round + 1).reduce((sum, r) => sum + r.emitted.length, 0);
    at("replay-count").textContent = `round ${round} of ${last}` + (one.cut ? " shown" : "") +
      (round ? `: ${Math.max(now.parents.length - 1, 0)} drafted, ${drafted(now)} accepted, ` +
        `${now.emitted.length} emitted, ${now.ms} ms; tau so far ${(tokens / round).toFixed(2)}` : "");
    said(one.rounds, round);
    draw(now);
  }

  // Begin where something was drafted.
  function start() {
    const rounds = data[at("replay-which").value].rounds;
    const first = rounds.findIndex((one) => one.path.length > 1);
    round = first < 0 ? rounds.length > 1 ? 1 : 0 : first;
    show();
  }

  const stop = () => { clearInterval(timer); timer = null; at("replay-play").textContent = "play"; };
  const step = (by) => { round += by; show(); };
  data.forEach((one, index) => {
    const option = document.createElement("option");
    option.value = index;
    option.textContent = `${one.drafter}: prompt ${one.title}`;
    at("replay-which").append(option);
  });
  at("replay-which").addEventListener("change", () => { stop(); start(); });
  at("replay-back").addEventListener("click", () => { stop(); step(-1); });
  at("replay-next").addEventListener("click", () => { stop(); step(1); });
  at("replay-round").addEventListener("input", (event) => {
    stop(); round = Number(event.target.value); show();
  });
  at("replay-play").addEventListener("click", () => {
    if (timer) { stop(); return; }
    at("replay-play").textContent = "pause";
    timer = setInterval(() => {
      if (at("replay-next").disabled) stop(); else step(1);
    }, 900);
  });
  // Show first the generation whose rounds accept most.
  const worth = (one) => one.rounds.reduce((sum, r) => sum + drafted(r), 0) / one.rounds.length;
  at("replay-which").value = data.reduce((best, one, index) =>
    (worth(one) > worth(data[best]) ? index : best), 0);
  start();
})();
