"use strict";
// Draws the report that stands in #report. Its fields are those of moe_serve/experts/report.py.

const report = JSON.parse(byId("report").textContent);
const { ranks, cost, experts, drift } = report;
const hasRanks = ranks !== null && ranks.num_ranks > 1;
const layerOptions = report.load.map((_, layer) => [layer, String(layer)]);
const redraws = [];

function drawHead() {
  byId("model").textContent = report.model;
  const { total, ...phases } = report.tokens;
  const named = Object.entries(phases).filter(([, count]) => count)
    .map(([name, count]) => `${whole(count)} ${name}`);
  const inPhases = named.length ? ` (${named.join(", ")})` : "";
  const parts = [`${report.num_layers} MoE layers`, `${report.num_experts} experts`,
    `${report.top_k} per token`, `${whole(total)} tokens${inPhases}`];
  if (report.num_steps) parts.push(`${whole(report.num_steps)} steps`);
  if (report.seconds) parts.push(`${fixed(report.seconds, 1)} s`);
  byId("sizes").textContent = parts.join(" · ");
}

function tile(value, text) {
  byId("tiles").append(
    make("div", { class: "tile" }, make("b", {}, value), make("span", {}, text)));
}

function drawTiles() {
  if (hasRanks) {
    tile(`${fixed(ranks.busiest.x_mean, 2)}x`, "the mean: load of a layer's busiest rank");
    tile(fixed(ranks.balancedness.mean, 2), `balancedness (1 is even); lowest ` +
      `${fixed(ranks.balancedness.min, 2)}, in layer ${ranks.balancedness.worst_layer}`);
  }
  if (hasRanks && cost) {
    const of = cost.step_ms === null
      ? `of ${milliseconds(cost.expert_ms)} ms of expert time`
      : `of each ${milliseconds(cost.step_ms)} ms step (${percent(cost.lost_share_of_step)})`;
    tile(`${milliseconds(cost.lost_ms)} ms`, `waited for slowest ranks, about, ${of}`);
  }
  const dead = sum(experts.dead.map((list) => list.length));
  tile(`${fixed(experts.hottest.max, 1)}x`, "the mean of its layer: load of the hottest expert");
  tile(fixed(experts.entropy.mean, 2), "entropy over experts (1 is even), mean of layers");
  tile(whole(dead), `of ${whole(report.num_layers * report.num_experts)} experts never chosen`);
}

function drawMap() {
  show("map-section");
  const map = new LoadMap(byId("map"), report, (layer) => {
    byId("values").open = true;
    byId("values-layer").value = layer;
    drawValues(layer);
  });
  map.drawLegend(byId("legend"));
  fillSelect(byId("values-layer"), layerOptions, drawValues);
  byId("values").addEventListener("toggle", () => drawValues(byId("values-layer").value));
  redraws.push(() => map.draw());
}

function drawValues(layer) {
  const row = report.load[layer];
  const total = sum(row) || 1;
  const order = row.map((_, expert) => expert).sort((a, b) => row[b] - row[a] || a - b);
  byId("values-table").replaceChildren(table(["expert", "load", "x mean", "share"],
    order.map((expert) => [expert, whole(row[expert]),
      fixed((row[expert] * row.length) / total, 2), percent(row[expert] / total, 2)])));
}

function drawRanks() {
  show("ranks-section");
  byId("ranks-source").textContent = `${ranks.source === "measured"
    ? "Rows that ranks computed." : "Predicted: replicas share their expert's load evenly."} ` +
    `${ranks.num_slots} slots in each layer, ${ranks.num_redundant} of them redundant; ` +
    `placement: ${ranks.placement}.`;
  const select = byId("ranks-layer");
  const worst = ranks.balancedness.worst_layer;
  fillSelect(select, [["", "all together"], ...layerOptions.map(([layer, text]) =>
    [layer, layer === worst ? `${text} (least even)` : text])], drawRankBars);
  // What waits for its busiest rank is each layer, not their sum.
  select.value = worst;
  redraws.push(drawRankBars);
}

function drawRankBars() {
  const layer = byId("ranks-layer").value;
  const load = layer === ""
    ? ranks.load[0].map((_, rank) => sum(ranks.load.map((row) => row[rank])))
    : ranks.load[layer];
  const mean = sum(load) / load.length || 1;
  const busiest = load.indexOf(Math.max(...load));
  bars(load.map((value) => value / mean), {
    into: byId("ranks-bars"), label: "Load of each rank over the mean",
    top: Math.max(1.1, load[busiest] / mean), mean: 1,
    high: sum(load) ? [busiest] : [], format: (value) => `${fixed(value, 2)}x`, axis: "rank",
    tip: (rank) =>
      `Rank ${rank}: ${whole(load[rank])} rows, ${fixed(load[rank] / mean, 2)} x the mean`,
  });
  byId("ranks-table").replaceChildren(table(["rank", "slots", "rows", "x mean"],
    load.map((value, rank) =>
      [rank, ranks.slots_of_ranks[rank], whole(value), fixed(value / mean, 3)])));
}

function drawLayers() {
  show("layers-section");
  byId("layers-title").textContent =
    hasRanks ? "Balancedness of each layer" : "Evenness of each layer";
  byId("layers-text").textContent = hasRanks
    ? "Mean over ranks / maximum over ranks: 1 is even; its inverse is what the busiest rank gets."
    : "Entropy over experts, where 1 is an even load.";
  const values = hasRanks ? ranks.balancedness.layers : experts.entropy.layers;
  const lowest = values.indexOf(Math.min(...values));
  redraws.push(() => bars(values, {
    into: byId("layers-bars"), label: byId("layers-title").textContent, top: 1,
    mean: sum(values) / values.length, high: [lowest], format: (value) => fixed(value, 2),
    axis: "layer", tip: (layer) => `Layer ${layer}: ${fixed(values[layer], 3)}`,
  }));
  const names = ["layer", "hottest, x mean", "entropy", "Gini", "never chosen"];
  const shares = Object.entries(experts.hot_share);
  names.push(...shares.map(([count]) => `share of ${count} hottest`));
  if (hasRanks) names.push("balancedness");
  if (hasRanks && cost) names.push("ms lost a step");
  byId("layers-table").replaceChildren(table(names, report.load.map((_, layer) => [
    layer, fixed(experts.hottest.layers[layer], 2), fixed(experts.entropy.layers[layer], 3),
    fixed(experts.gini.layers[layer], 3), experts.dead[layer].length,
    ...shares.map(([, share]) => percent(share.layers[layer])),
    ...(hasRanks ? [fixed(ranks.balancedness.layers[layer], 3)] : []),
    ...(hasRanks && cost ? [fixed(cost.lost_ms_of_layers[layer], 4)] : []),
  ])));
}

function drawRebalancing() {
  show("rebalancing-section");
  const names = ["placement", "slots", "redundant", "balancedness", "lowest layer",
    "expert ms a step", "moves", "MiB to move", "more MiB on a rank"];
  byId("rebalancing-table").replaceChildren(table(names, report.rebalancing.map((row) => [
    row.name, row.num_slots, row.num_redundant, fixed(row.balancedness_mean, 3),
    fixed(row.balancedness_min, 3), fixed(row.expert_ms, 3), whole(row.moves),
    mebibytes(row.moved_bytes), mebibytes(row.more_bytes_of_rank)])));
}

function drawHot() {
  show("hot-section");
  const names = ["layer", "expert", "x mean", "load", ...(ranks ? ["on ranks"] : [])];
  byId("hot-table").replaceChildren(table(names, report.hot.map((hot) => [
    hot.layer, hot.expert, fixed(hot.x_mean, 2), whole(hot.load),
    ...(ranks ? [hot.ranks.join(", ")] : [])])));
}

function drawDrift() {
  show("drift-section");
  byId("drift-text").textContent = `Against ${drift.baseline} (${whole(drift.baseline_tokens)} ` +
    "tokens): the share of each layer's load that went to other experts (total variation " +
    "distance).";
  const worst = drift.layers.indexOf(drift.max);
  redraws.push(() => bars(drift.layers, {
    into: byId("drift-bars"), label: "Drift of each layer", mean: drift.mean,
    top: Math.max(0.05, drift.max),
    high: drift.max > 0 ? [worst] : [], axis: "layer",
    format: (value) => percent(value, value < 0.1 ? 1 : 0),
    tip: (layer) => `Layer ${layer}: ${percent(drift.layers[layer])}`,
  }));
  byId("drift-table").replaceChildren(table(["layer", "expert", "share before", "share now"],
    drift.moves.map((move) =>
      [move.layer, move.expert, percent(move.before, 2), percent(move.after, 2)])));
}

function drawCheck() {
  const { holds, expected, wrong_layers: wrong, is_proof: isProof } = report.conservation;
  const told = `${whole(report.tokens.total)} tokens x ${report.top_k} per token = ` +
    `${whole(expected)} choices`;
  byId("conservation").textContent = holds
    ? isProof
      ? `✓ Every token is counted once in each layer: ${told}.`
      : `Tokens are told from the choices of each layer, so that nothing is checked: ${told}.`
    : `✗ The counts do not add up: ${told}, but not in layers ${wrong.join(", ")}.`;
  byId("notes").append(...report.notes.map((note) => make("li", {}, note)));
}

// #light and #dark in the address, or the button, go before what the system asks for.
function setUpTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const update = () => {
    byId("theme").textContent = isDark() ? "Light colours" : "Dark colours";
    redraws.forEach((redraw) => redraw());
  };
  if (["#dark", "#light"].includes(location.hash)) root.dataset.theme = location.hash.slice(1);
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    update();
  });
  system.addEventListener("change", update);
  matchMedia("print").addEventListener("change", update);
  window.addEventListener("resize", update);
  update();
}

drawHead();
if (report.tokens.total) {
  drawTiles();
  drawMap();
  if (hasRanks) drawRanks();
  drawLayers();
  if (report.rebalancing.length) drawRebalancing();
  drawHot();
  if (drift) drawDrift();
}
byId("summary").append(...report.summary.map((sentence) => make("li", {}, sentence)));
drawCheck();
setUpTheme();
