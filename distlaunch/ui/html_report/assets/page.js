"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const charts = [];
  const state = { axis: "step", log: false, smoothing: 0 };

  // texts of the user get into the page as text nodes only
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  // numbers that JSON does not have are the strings nan, inf and -inf
  const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

  function number(value, digits = 5) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 2)
      : String(+value.toPrecision(Math.max(digits, Math.floor(size).toString().length)));
  }

  // a tick of an axis with at least the digits in which it differs from the next one
  function tickLabel(tick, step) {
    const digits = tick ? Math.ceil(Math.log10(Math.abs(tick) / step)) + 2 : 0;
    return number(tick, Math.min(Math.max(digits, 5), 15));
  }

  const looksLikeNumber = /^-?[\d,.]+( \(\d+\)| ?%| ms| s)?$/;

  const rounded = (seconds) => (seconds === null || seconds === undefined ? "" : +seconds.toFixed(seconds < 1 ? 3 : 1));

  function table(names, rows, marked = null) {
    const cell = (value) => typeof value === "number" || looksLikeNumber.test(value)
      ? element("td", { class: "number" }, typeof value === "number" ? number(value) : value)
      : element("td", {}, value ?? "");
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": names.join(", ") },
      element("table", { class: "rows" },
        element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, ...rows.map((row) => element("tr", { class: row[0] === marked ? "marked" : null }, ...row.map(cell))))));
  }

  function section(id, title, ...children) {
    const shown = children.filter((child) => child);
    if (!shown.length) return;
    document.getElementById("contents").append(element("a", { href: `#${id}` }, title));
    document.body.append(element("section", { id }, element("h2", {}, title), ...shown));
  }

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function smoothed(values) {
    if (!state.smoothing) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = state.smoothing * mean + (1 - state.smoothing) * value;
      weight = state.smoothing * weight + (1 - state.smoothing);
      return mean / weight;
    });
  }

  // unknown before the first epoch of a stream has ended; the axis is in steps then
  const stepsPerEpoch = data.steps_per_epoch || 0;
  const knowsEpochs = !data.epochs || data.epochs.length > 0 || stepsPerEpoch > 0;

  // the number of epochs until a step
  function epochAt(step, epochs) {
    let before = 0, epoch = 0;
    for (const ended of epochs) {
      if (step <= ended.step) return epoch + ((step - before) / Math.max(ended.step - before, 1)) * (ended.epoch - epoch);
      [before, epoch] = [ended.step, ended.epoch];
    }
    const last = epochs.at(-1);
    if (!last) return stepsPerEpoch ? step / stepsPerEpoch : step;
    return last.epoch + (step - last.step) / Math.max(last.step / last.epoch, 1);
  }

  const place = (step, epochs = data.epochs) => (state.axis === "step" ? step : epochAt(step, epochs));

  // vertical lines where the run was continued after a restart
  function marks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = color("warn");
    ctx.setLineDash([4, 4]);
    for (const { step } of data.restarts ?? []) {
      const x = Math.round(chart.valToPos(place(step), "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // not with the values as arguments, of which a browser allows some ten thousands only
  const extremes = (values) => values.reduce(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  // the usual size of a curve's values: counts grow from nearly 0 within each epoch, so the first value alone may be tiny
  function usualSize(y) {
    const sizes = y.filter((value) => value).map(Math.abs);
    const sorted = [...sizes].sort((one, other) => one - other);
    return sizes.length ? Math.max(sizes[0], sorted[Math.floor(sizes.length / 4)]) : Infinity;
  }

  // the size above which values are not shown at first: a run that diverges would flatten all other curves, and its own
  function cutoff(lines, usual) {
    const [low, high] = extremes(lines.flat().filter((value) => value !== null));
    const largest = Math.max(-low, high);
    // shares grow from nearly 0 to 1, and percentages to 100
    return largest > 100 && largest > 100 * usual ? 10 * usual : Infinity;
  }

  const borderStyle = (dash) => (!dash ? "solid" : dash[0] > 4 ? "dashed" : "dotted");

  class Chart {
    constructor(title, lines, options = {}) {
      [this.title, this.lines, this.options] = [title, lines, options];
      this.whole = false;
      const showAll = () => { this.whole = true; this.draw(); };
      this.host = element("div", { ondblclick: showAll });
      this.note = element("p", { class: "note", role: "status" });
      const reset = element("button", { onclick: showAll, "aria-label": `show all of ${title}` }, "show all");
      const points = lines.flatMap((line) => line.curve.x.map((x, at) => [line.label, x, line.curve.y[at]]));
      const values = element("details", {
        ontoggle: (event) => {
          if (event.target.open && event.target.childElementCount === 1) {
            event.target.append(table(["curve", "step", "value"], points));
          }
        },
      }, element("summary", {}, `values (${points.length})`));
      this.frame = element("div", { class: "chart", role: "group", "aria-label": title },
        element("div", { class: "head" }, element("h3", {}, title), reset), this.host, this.note, values);
      charts.push(this);
    }

    draw() {
      if (this.plot) this.plot.destroy();
      const { linear, comparison } = this.options;
      const logs = state.log && !linear;
      let dropped = 0;  // the number of values that a log scale cannot show
      const tables = this.lines.map(({ curve, smooth, epochs }) => {
        const given = curve.y.map(finite);
        const y = logs ? given.map((value) => (value > 0 ? value : null)) : given;
        dropped += given.filter((value, at) => value !== null && y[at] === null).length;
        return [curve.x.map((step) => place(step, epochs)), smooth ? smoothed(y) : y];
      });
      const lines = tables.map(([, y]) => y);
      // the validation of one run may have few rows, and thus much smaller counts
      const usual = Math.min(...(comparison ? lines : lines.slice(0, 1)).map(usualSize));
      const limit = logs || linear || this.whole ? Infinity : cutoff(lines, usual);
      const values = tables.flatMap(([, y]) => y).filter((value) => value !== null);
      const shown = values.filter((value) => Math.abs(value) <= limit);
      const left = values.length - shown.length;
      const counted = (count) => (count === 1 ? "1 value" : `${count} values`);
      this.note.textContent = left ? `${counted(left)} beyond ${number(limit)} not shown; "show all" or the log scale show them`
        : dropped ? `${counted(dropped)} of 0 or less not shown: a log scale has none` : "";
      const [bottom, top] = extremes(shown);
      // called with the extremes of what is in view, also after zooming
      const range = (_, low, high) => low === null || low > top || high < bottom ? [low, high]
        : uPlot.rangeNum(Math.max(low, bottom), Math.min(high, top), 0.1, true);
      const width = Math.max(this.host.clientWidth, 200);
      const axis = { stroke: color("dim"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
      this.plot = new uPlot({
        width, height: 240,
        scales: { x: { time: false }, y: logs ? { distr: 3 } : left ? { range } : {} },
        axes: [{ ...axis }, { ...axis, size: 64, values: (_chart, ticks, _axis, _space, step) => ticks.map((tick) => (logs || tick === null ? number(tick) : tickLabel(tick, step))) }],
        legend: { markers: { dash: (_, at) => borderStyle(this.lines[at - 1]?.dash) } },
        series: [
          { label: state.axis, value: (_, x) => number(x) },
          ...this.lines.map((line) => ({
            label: line.label, stroke: line.color ?? color(line.role), width: line.thin ? 1 : 2, spanGaps: true,
            dash: line.dash, points: { show: line.curve.x.length < 60 && !line.thin },
            value: (_, y) => number(y),
          })),
        ],
        hooks: { draw: [marks] },
      }, uPlot.join(tables), this.host);
    }
  }

  const redraw = () => charts.forEach((chart) => chart.draw());

  function toggle(text, key, isOn, change) {
    const button = element("button", { "aria-pressed": String(isOn()), title: `key ${key}`, onclick: () => act() }, text());
    const act = () => {
      change();
      button.setAttribute("aria-pressed", String(isOn()));
      button.textContent = text();
      redraw();
    };
    document.addEventListener("keydown", (event) => {
      const busy = event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
      if (event.key === key && !busy) act();
    });
    return button;
  }

  function theme(name) {
    root.dataset.theme = name;
    redraw();
  }

  // head
  const dark = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  document.body.append(
    element("header", {},
      element("h1", {}, data.name), data.status && element("span", { class: `status ${data.status}` }, data.status),
      toggle(() => "dark", "d", () => root.dataset.theme === "dark",
        () => theme(root.dataset.theme === "dark" ? "light" : "dark"))),
    element("nav", { id: "contents", "aria-label": "contents" }));

  const hues = [210, 25, 140, 280, 50, 330, 180, 0];
  const dashes = [null, [8, 4], [2, 3]];
  // a color and dashes for each of up to 48 curves
  const look = (at) => ({
    color: `hsl(${hues[at % hues.length]} 65% ${Math.floor(at / hues.length) % 2 ? 35 : 50}%)`,
    dash: dashes[Math.floor(at / (2 * hues.length)) % dashes.length],
  });

  // curves with what changes how they are drawn
  function curves(drawn) {
    if (!drawn.length) return;
    const slider = element("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: "0",
      oninput: (event) => { state.smoothing = Number(event.target.value); redraw(); },
    });
    const tools = element("div", { class: "tools" },
      knowsEpochs ? toggle(() => `axis: ${state.axis}s`, "e", () => state.axis === "epoch",
        () => { state.axis = state.axis === "step" ? "epoch" : "step"; }) : null,
      toggle(() => "log scale", "l", () => state.log, () => { state.log = !state.log; }),
      element("label", {}, "smoothing", slider),
      element("span", {}, "drag over a chart to zoom in, double-click to show all",
        data.restarts?.length ? "; a dashed line marks a restart" : ""));
    section("curves", "Curves", tools, element("div", { class: "charts" }, ...drawn.map((chart) => chart.frame)));
  }

  function comparison() {
    root.classList.add("comparison");
    state.axis = "epoch";  // runs with other batches make other numbers of steps
    section("runs", "Runs", element("p", {}, [
      data.order, data.started && `started ${data.started}`, "the epoch of a best value is in brackets"].filter(Boolean).join("; ")),
      table(data.heads, data.rows, data.marked), ...data.best.map((text) => element("p", {}, text)));
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
    curves(names.flatMap((name) => ["epochs", "validation"].flatMap((kind) => {
      const lines = data.runs.map((run, at) => ({ run, at })).filter(({ run }) => run.curves[name]?.[kind]).map(
        ({ run, at }) => ({ label: run.name, curve: run.curves[name][kind], epochs: run.epochs, ...look(at), smooth: true }));
      return lines.length ? [new Chart(kind === "epochs" ? name : `${name}, validation`, lines, { comparison: true })] : [];
    })));
    section("shared", "The same in all runs", data.shared.length && table(["setting", "value"], data.shared));
  }

  function report() {
    section("summary", "Summary", element("dl", {},
      ...data.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    const metrics = Object.entries(data.curves).filter(([, parts]) => Object.keys(parts).length);
    curves(metrics.map(([name, { steps, epochs, validation }]) => new Chart(name, [
      steps && { label: "train, within epochs", curve: steps, role: "within", thin: true, smooth: true },
      epochs && { label: "train, by epoch", curve: epochs, role: "train" },
      validation && { label: "validation, by epoch", curve: validation, role: "validation", dash: [6, 3] },
    ].filter(Boolean))));

    // speed
    const kinds = {
      step_ms: "mean time of a step (ms)", examples_per_s: "examples per second, each task", input_percent: "waiting for input (%)",
      peers_percent: "waiting for other tasks' gradients (%)", cores: "busy cores", memory_mb: "memory (MB)",
      gpu_percent: "GPU utilization (%)", gpu_memory_mb: "GPU memory in use (MB)",
    };
    const tasks = Object.entries(data.speed);
    const speed = Object.entries(kinds).map(([kind, title]) => {
      const lines = tasks.filter(([, own]) => own[kind]).map(([task, own]) => {
        const at = tasks.findIndex(([name]) => name === task);
        return { label: task, curve: own[kind], ...look(at) };
      });
      return lines.length ? new Chart(title, lines, { linear: true }).frame : null;
    }).filter(Boolean);
    if (speed.length) section("speed", "Speed", element("div", { class: "charts" }, ...speed));

    // tables
    section("results", "Evaluations", data.evaluations.length && table(["step", "split", "values"], data.evaluations.map(
      (one) => [one.step, one.split, Object.entries(one.logs).map(([name, value]) => `${name} ${number(value)}`).join(", ")])));
    section("checkpoints", "Checkpoints and exports",
      data.checkpoints.length && table(["step", "size", "written in (s)", "training waited (s)", "path"], data.checkpoints.map(
        (one) => [one.step, one.size, rounded(one.seconds), rounded(one.stalled), one.path + (one.best ? " (best)" : "")])),
      Object.keys(data.exports).length && table(["export", "path"], Object.entries(data.exports)));
    section("attempts", "Attempts and restarts",
      data.attempts.length && table(["attempt", "ended", "from step", "to step", "after start (s)", "failed first"], data.attempts.map(
        (one) => [one.attempt, one.mode === "train" || one.mode === "run" ? one.status : `${one.mode}: ${one.status}`,
          one.first_step ?? "", one.first_step === null ? "" : one.last_step, rounded(one.seconds),
          one.culprit ? `${one.culprit}${one.host ? ` on ${one.host}` : ""}: ${one.reason}` : ""])),
      ...data.attempts.filter((one) => one.lines.length).map((one) => element("details", { open: data.status === "failed" },
        element("summary", {}, `end of ${one.log}`), element("pre", { tabindex: "0" }, one.lines.join("\n")))));
    section("model", "Model",
      data.parameters && element("p", {}, `${number(data.parameters)} parameters`),
      data.layers.length && table(["layer", "class", "output", "parameters", "trainable"], data.layers.map(
        (one) => [one.name, one.kind, one.output, one.parameters, one.trainable ? "yes" : "no"])),
      ...data.placement.map((text) => element("pre", { tabindex: "0" }, text)));
    section("config", "Config", data.config.length && element("p", {}, "Highlighted lines differ from the defaults."),
      data.config.length && element("pre", { tabindex: "0" }, ...data.config.flatMap(
        ({ text, differs }) => [differs ? element("span", { class: "differs" }, text) : text, "\n"])));
    const { git, packages, settings, run_dirs, ...others } = data.environment;
    const plain = (value) => (Array.isArray(value) ? value.join(" ") : typeof value === "object" ? JSON.stringify(value) : String(value));
    const known = [...Object.entries(others), ...Object.entries(packages ?? {})].filter(([, value]) => plain(value));
    section("environment", "Environment",
      settings?.length && table(["variable of the tasks", "value", "reason"], settings.map((one) => [one.name, one.value, one.reason])),
      known.length && element("dl", {},
        ...known.flatMap(([name, value]) => [element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, plain(value))])));
    section("code", "Code", git && element("p", {}, `commit ${git.commit}${git.diff ? ", with these changes:" : ""}`),
      git && git.diff && element("pre", { tabindex: "0" }, git.diff));
  }

  if (data.runs) comparison();
  else report();
  document.body.append(element("footer", {}, `distlaunch ${data.version}`));

  redraw();
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; redraw(); } });
})();
