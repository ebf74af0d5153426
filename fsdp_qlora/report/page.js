// Under the pointer: the nearest step of a chart and its values. The charts are there without this.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), area = figure.querySelector(".area");
  const rule = area.appendChild(document.createElement("div"));
  const tip = area.appendChild(document.createElement("div"));
  rule.className = "rule"; tip.className = "tip";
  const hide = () => { rule.hidden = tip.hidden = true; };
  const nearest = (points, x) => points.reduce(
    (best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best);
  const show = (event) => {
    const box = area.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const at = chart.left + Math.min(1, Math.max(0, share)) * (chart.right - chart.left);
    const found = chart.series.map(([name, , points]) => [name, nearest(points, at)]);
    const step = nearest(found.map((f) => f[1]), at)[0];
    const x = (step - chart.left) / (chart.right - chart.left) * box.width;
    const near = found.filter((f) => f[1][0] === step);
    tip.textContent = `step ${step.toLocaleString("en")}: ` + near.map(([name, p]) =>
      (chart.series.length > 1 ? name + " " : "") + Number(p[1].toPrecision(5)).toLocaleString("en",
        {maximumSignificantDigits: 5})).join(", ");
    rule.hidden = tip.hidden = false;
    rule.style.left = x + "px";
    tip.style.left = Math.max(0, Math.min(x + 8, box.width - tip.offsetWidth)) + "px";
  };
  hide();
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerleave", hide);
}
